"""Which GPUs are here, by NVML and without torch.

GPUs are counted as CUDA counts them: `CUDA_VISIBLE_DEVICES` hides and reorders. NVML itself knows
nothing of that variable, so every look-up goes through the GPU's UUID or the list of visible ones.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from leanbench.gpu.nvml_library import (
    GpuNotFoundError,
    NvmlError,
    NvmlUnavailableError,
    ask,
    open_nvml,
)


@dataclass(frozen=True)
class LocalGpu:
    """One GPU that CUDA programs started here would see. A figure that NVML does not know
    is None.
    """

    #: As CUDA and torch count, after `CUDA_VISIBLE_DEVICES`.
    index: int
    #: As the driver prints it, e.g. ``NVIDIA H200``.
    product: str
    #: ``GPU-...``, or ``MIG-...`` for a MIG instance named in `CUDA_VISIBLE_DEVICES`.
    uuid: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    driver_version: str
    compute_capability: tuple[int, int] | None
    #: Is the GPU partitioned? Then CUDA sees one instance, smaller than `memory_total_bytes` of the
    #: whole.
    mig: bool


def local_gpus() -> list[LocalGpu]:
    """Every GPU that CUDA would see here, in its order; empty where there is no driver or no GPU.

    Raises:
        NvmlError: there is a driver, but it is broken; the sentence says the fix.
    """
    try:
        with open_nvml() as nvml:
            return [
                _local_gpu(nvml, index, handle)
                for index, handle in enumerate(visible_handles(nvml))
            ]
    except NvmlUnavailableError:
        return []


def why_silent() -> str | None:
    """One sentence why NVML cannot say which GPUs are here; None where it can, also where there are
    none.
    """
    try:
        with open_nvml() as nvml:
            visible_handles(nvml)
            return None
    except NvmlError as error:
        return str(error)


def why_no_gpu() -> str | None:
    """One sentence why `local_gpus` is empty, None when it is not."""
    try:
        with open_nvml() as nvml:
            if visible_handles(nvml):
                return None
            if nvml.nvmlDeviceGetCount():
                return (
                    f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides every"
                    " GPU: unset it"
                )
            return "the NVIDIA driver finds no GPU"
    except NvmlError as error:
        return str(error)


def visible_handles(nvml: Any) -> list[Any]:
    """Handles in CUDA's order: NVML's own is that of the PCI bus.

    CUDA puts the fastest of unlike GPUs first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; which one that
    is only CUDA knows.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    visible: list[Any] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        handle = None
        if entry.isdigit():
            handle = handles[int(entry)] if int(entry) < len(handles) else None
        elif entry.startswith("MIG-"):
            handle = ask(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        elif entry.startswith("GPU-"):
            # CUDA takes any beginning of a UUID that is unique.
            matches = [
                handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(entry)
            ]
            handle = matches[0] if len(matches) == 1 else None
        if handle is None:
            break  # CUDA ignores everything from the first bad entry on
        visible.append(handle)
    return visible


def handle_of(nvml: Any, device: int | str) -> Any:
    """NVML's handle of a GPU, by its number as CUDA counts or its UUID.

    Raises:
        GpuNotFoundError: there is none.
    """
    if isinstance(device, int):
        uuid = _torch_uuid(device)
        if uuid is None:
            visible = visible_handles(nvml)
            if not 0 <= device < len(visible):
                raise GpuNotFoundError(
                    f"there is no GPU {device}, visible here: {len(visible)} (counted from 0)"
                )
            return visible[device]
        device = uuid
    for uuid in (device, f"GPU-{device}", f"MIG-{device}"):
        handle = ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is not None:
            return handle
    raise GpuNotFoundError(f"there is no GPU with UUID {device}: `nvidia-smi -L` lists them")


def _torch_uuid(index: int) -> str | None:
    """What torch says, if it runs CUDA already: the only sure word on how unlike GPUs are
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


def _local_gpu(nvml: Any, index: int, handle: Any) -> LocalGpu:
    memory = ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return LocalGpu(
        index=index,
        product=nvml.nvmlDeviceGetName(handle),
        uuid=uuid,
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        driver_version=nvml.nvmlSystemGetDriverVersion(),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig=uuid.startswith("MIG-") or (mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE),
    )
