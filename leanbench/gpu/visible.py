"""GPUs of this machine, by NVML and without torch.

GPUs have CUDA's indices: `CUDA_VISIBLE_DEVICES` hides and reorders them. NVML ignores that
variable, so every look-up uses the GPU's UUID or the list of visible GPUs.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from leanbench.gpu.catalogue import is_instance
from leanbench.gpu.nvml_library import (
    GpuLostError,
    GpuNotFoundError,
    NvmlError,
    NvmlUnavailableError,
    ask,
    open_nvml,
    unreadable,
)


@dataclass(frozen=True)
class LocalGpu:
    """One GPU that CUDA programs would see. A figure that NVML does not know is None."""

    #: Index in CUDA and torch, after `CUDA_VISIBLE_DEVICES`.
    index: int
    #: Product name of the driver, such as ``NVIDIA H200``; empty with a `fault`.
    product: str
    #: ``GPU-...``, or ``MIG-...`` for a MIG instance named in `CUDA_VISIBLE_DEVICES`; empty with a
    #: `fault`.
    uuid: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    driver_version: str
    compute_capability: tuple[int, int] | None
    #: True for a partitioned GPU. CUDA sees one instance, smaller than `memory_total_bytes`.
    mig: bool
    #: Error of a lost or forbidden GPU, which keeps its index.
    fault: NvmlError | None = None


@dataclass(frozen=True)
class Place:
    """A GPU in CUDA's order."""

    #: ``GPU 1``, as nvidia-smi counts, or ``MIG-...``.
    name: str
    #: NVML's handle; None with a `fault`.
    handle: Any
    #: Why NVML gives no handle.
    fault: NvmlError | None = None


def local_gpus() -> list[LocalGpu]:
    """Return every GPU that CUDA would see here, in its order; empty without driver or GPU.

    Raises:
        NvmlError: The driver is broken.
    """
    try:
        with open_nvml() as nvml:
            places = visible_places(nvml)
            driver_version = nvml.nvmlSystemGetDriverVersion()
            return [
                _local_gpu(nvml, index, place, driver_version) for index, place in enumerate(places)
            ]
    except NvmlUnavailableError:
        return []


def why_silent() -> str | None:
    """Return a sentence if NVML cannot list the GPUs, or None, even if there are none."""
    try:
        with open_nvml() as nvml:
            visible_places(nvml)
            return None
    except NvmlError as error:
        return str(error)


def why_no_gpu() -> str | None:
    """Return a sentence about an empty `local_gpus`, or None."""
    try:
        with open_nvml() as nvml:
            visible, reason = _visible(nvml)
            if visible:
                return None
            if not nvml.nvmlDeviceGetCount():
                return "the NVIDIA driver finds no GPU"
            return (
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides every"
                f" GPU{reason and f' ({reason})'}: unset it"
            )
    except NvmlError as error:
        return str(error)


def visible_places(nvml: Any) -> list[Place]:
    """Return the GPUs in CUDA's order: NVML's own is that of the PCI bus.

    CUDA puts the fastest of unlike GPUs first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; which one that
    is only CUDA knows.
    """
    return _visible(nvml)[0]


def _visible(nvml: Any) -> tuple[list[Place], str]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does. Return the visible GPUs, or why there is none.

    The first entry decides whether all are UUIDs or numbers. One that names no GPU ends the list, a
    repeated one empties it. CUDA opens one MIG instance only.
    """
    places = [_place(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return places, ""
    entries = wanted.split(",")
    if wanted.startswith(("GPU-", "MIG-")):
        names = list(takewhile(lambda entry: entry.startswith(wanted[:4]), entries))
        matches = (_named(nvml, places, name) for name in names)
    else:
        names = list(takewhile(lambda number: number >= 0, map(_number, entries)))
        matches = (places[number] if number < len(places) else None for number in names)
    visible = [place for place in takewhile(lambda place: place is not None, matches) if place]
    if len(set(names)) < len(names) or len({place.name for place in visible}) < len(visible):
        return [], "it names one twice, which leaves CUDA none"
    if visible:
        return visible[:1] if wanted.startswith("MIG-") else visible, ""
    return [], "" if wanted.strip() in ("", "-1") else "its first entry is no GPU here"


def _place(nvml: Any, number: int) -> Place:
    name = f"GPU {number}"
    try:
        return Place(name, nvml.nvmlDeviceGetHandleByIndex(number))
    except nvml.NVMLError as error:
        return Place(name, None, unreadable(nvml, name, error))


def _named(nvml: Any, places: list[Place], uuid: str) -> Place | None:
    """Return the MIG instance of that UUID, or the only GPU whose UUID starts with it."""
    if uuid.startswith("MIG-"):
        handle = ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
        return None if handle is None else Place(uuid, handle)
    matches = [place for place in places if _uuid(nvml, place).startswith(uuid)]
    return matches[0] if len(matches) == 1 else None


def _uuid(nvml: Any, place: Place) -> str:
    """Return the GPU's UUID; empty if it cannot be read."""
    if place.fault is not None:
        return ""
    try:
        return nvml.nvmlDeviceGetUUID(place.handle)
    except nvml.NVMLError:
        return ""


def _number(entry: str) -> int:
    """Read a number as C's strtol does: the digits that an entry begins with, else -1."""
    digits = re.match(r"\s*[+-]?[0-9]+", entry)
    return int(digits[0]) if digits else -1


def handle_of(nvml: Any, device: int | str) -> Any:
    """Return NVML's handle of a GPU, by CUDA's index or by UUID.

    Raises:
        GpuNotFoundError: There is none.
        NvmlError: It cannot be read.
    """
    if isinstance(device, int):
        uuid = _torch_uuid(device)
        if uuid is None:
            visible = visible_places(nvml)
            if not 0 <= device < len(visible):
                raise GpuNotFoundError(
                    f"there is no GPU {device}, visible here: {len(visible)} (counted from 0)"
                )
            if (fault := visible[device].fault) is not None:
                raise fault
            return visible[device].handle
        device = uuid
    for uuid in (device, f"GPU-{device}", f"MIG-{device}"):
        handle = ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is not None:
            return handle
    raise GpuNotFoundError(f"there is no GPU with UUID {device}: `nvidia-smi -L` lists them")


def _torch_uuid(index: int) -> str | None:
    """Return torch's answer if it runs CUDA already: only CUDA knows how unlike GPUs are
    ordered.
    """
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not torch.cuda.is_initialized()
        or not 0 <= index < torch.cuda.device_count()
    ):
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else str(uuid)


def _local_gpu(nvml: Any, index: int, place: Place, driver_version: str) -> LocalGpu:
    fault = place.fault
    if fault is None:
        try:
            return _readable_gpu(nvml, index, place.handle, driver_version)
        except (nvml.NVMLError, GpuLostError) as error:
            fault = unreadable(nvml, place.name, error)
    return LocalGpu(index, "", "", None, None, driver_version, None, False, fault)


def _readable_gpu(nvml: Any, index: int, handle: Any, driver_version: str) -> LocalGpu:
    memory = ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    product = nvml.nvmlDeviceGetName(handle)
    return LocalGpu(
        index=index,
        product=product,
        uuid=uuid,
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        driver_version=driver_version,
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig=is_instance(product)
        or uuid.startswith("MIG-")
        or (mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE),
    )
