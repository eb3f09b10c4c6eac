"""The GPU of this machine as a `GpuSpec`, and the choice between measuring and predicting."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.catalogue import (
    CATALOGUE,
    UnknownGpu,
    find,
    is_instance,
    is_known,
    is_virtual,
    match_product,
    model_of,
    slug,
)
from leanbench.gpu.nvml import GpuLimits, Nvml
from leanbench.gpu.nvml_library import NvmlError
from leanbench.gpu.visible import LocalGpu, local_gpus, why_no_gpu, why_silent

#: GPU of predictions without `--gpu` on a machine without a GPU: the model was fitted to it, and
#: knows both the Triton and the CUDA C++ kernels there.
DEFAULT_GPU = "h200"
#: Assumptions for an unknown GPU: below any current data-centre GPU.
_UNKNOWN_BANDWIDTH_TB_S = 0.25
_UNKNOWN_CLOCK_MHZ = 1500
_UNKNOWN_POWER_W = 300


@dataclass(frozen=True)
class Target:
    """GPU to measure on or to predict for."""

    spec: GpuSpec
    #: torch's index of the GPU; None for a prediction.
    local_index: int | None
    #: Reason why a GPU here is not used, or not in full.
    note: str | None = None


def choose(gpu_name: str | None, require_gpu: bool) -> Target:
    """Resolve `--gpu` and `--require-gpu` on this machine. torch is not imported if NVML finds no
    GPU.

    Without a name: the first GPU here, or else the model of `DEFAULT_GPU`. With a name: a matching
    GPU here, or else the model of that GPU. If NVML cannot answer, torch is asked.

    Raises:
        UnknownGpu: The name matches neither the catalogue nor a GPU here.
        NvmlError: The GPU in question cannot be read; or `require_gpu`, and NVML is broken.
        UserError: `require_gpu`, and no GPU here matches.
    """
    fault: NvmlError | None = None
    try:
        gpus = local_gpus()
    except NvmlError as error:
        gpus, fault = [], error
    here = next((gpu for gpu in gpus if gpu_name is None or _answers_to(gpu, gpu_name)), None)
    if here is None or here.fault is not None:
        # Torch may know what NVML cannot read.
        fault = fault or next((gpu.fault for gpu in gpus if gpu.fault is not None), None)
        silence = why_silent() if fault is None and not gpus else fault and str(fault)
        if silence is not None and (target := _torch_target(gpu_name, gpus, silence)) is not None:
            return target
    if here is None:
        return _predicted(gpu_name, require_gpu, gpus, fault)
    if here.fault is not None:
        raise here.fault
    obstacle = _why_torch_cannot()
    if obstacle is None:
        index = 0 if gpu_name is None else _torch_index(here)
        return Target(spec_of_device(index), index)
    note = f"there is an {here.product} here, but {obstacle}"
    spec = match_product(here.product)
    if require_gpu or (spec is None and gpu_name is not None):
        raise UserError(note)
    return Target(spec or find(DEFAULT_GPU), None, note)


def _predicted(
    gpu_name: str | None, require_gpu: bool, gpus: list[LocalGpu], fault: NvmlError | None
) -> Target:
    """Return the model of a GPU that is not here."""
    if require_gpu:
        if fault is not None and not gpus:
            raise fault
        raise UserError(_nothing_to_measure_on(gpu_name, gpus))
    name = gpu_name or DEFAULT_GPU
    note = _why_surprising(name, gpus, fault)
    try:
        return Target(find(name), None, note)
    except UnknownGpu as error:
        raise (error if note is None else UnknownGpu(name, f"{error.hint}; {note}")) from None


def _why_surprising(name: str, gpus: list[LocalGpu], fault: NvmlError | None) -> str | None:
    """Return why a prediction may surprise: CUDA would not see a GPU that is here, or another
    product of the model is.
    """
    if fault is not None:
        return str(fault) if gpus else f"NVML cannot be used ({fault})"
    if not gpus:
        is_meant = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip() in ("", "-1")
        return None if is_meant or why_silent() is not None else why_no_gpu()
    for gpu in gpus:
        if model_of(gpu.product) == model_of(name):
            known = match_product(gpu.product)
            own_name = known.name if known else slug(gpu.product)
            return (
                f"there is an {gpu.product} here, another GPU than {name} (`--gpu {own_name}`"
                " measures on it)"
            )
    return None


def _torch_target(gpu_name: str | None, gpus: list[LocalGpu], silence: str) -> Target | None:
    """Return a GPU to measure on that torch finds without NVML, or None. `silence` is NVML's
    fault.
    """
    if not _has_cuda():
        return None
    try:
        import torch
    except (ImportError, OSError):
        return None
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        spec = spec_of_device(index)
        if gpu_name is None or _is_name_of(spec.product, gpu_name):
            uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
            if uuid and any(gpu.uuid.endswith(uuid) for gpu in gpus):
                return Target(spec, index)
            note = (
                "Clocks, temperature, power and other processes stay unknown, NVML cannot be used"
                f" ({silence})"
            )
            return Target(spec, index, note)
    return None


def _has_cuda() -> bool:
    """Return True if the driver's CUDA library is here. Without it torch takes seconds to find no
    GPU.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def spec_of_device(index: int) -> GpuSpec:
    """Return the GPU with torch's index: the catalogue's figures, corrected by the driver.

    A MIG instance gets its share of the bandwidth, in proportion to its memory. An unknown product
    gets only the driver's figures; `source` says so.
    """
    import torch

    device = torch.cuda.get_device_properties(index)
    known = match_product(device.name)
    base = known or _unknown_product(device, index)
    # A whole GPU has 2^30 bytes a GB, less a few percent. An instance has an eighth or more of
    # that. Other virtual GPUs take turns at the whole bandwidth.
    share = device.total_memory / (base.memory_gb * 2**30)
    memory_share = share if is_instance(device.name) or is_virtual(device.name) else 1
    bandwidth_share = share if is_instance(device.name) else 1
    per_sm = _read(device, "shared_memory_per_multiprocessor", 1024, base.shared_kb_per_sm)
    per_cta = _read(device, "shared_memory_per_block_optin", 1024, base.shared_kb_per_cta)
    source = f"the driver; bandwidth, clock and power: {base.source}" if known else base.source
    return replace(
        base,
        product=device.name,
        compute_capability=(device.major, device.minor),
        sms=device.multi_processor_count,
        memory_gb=round(base.memory_gb * memory_share, 1),
        bandwidth_tb_s=base.bandwidth_tb_s * bandwidth_share,
        l2_mib=_read(device, "L2_cache_size", 2**20, base.l2_mib),
        shared_kb_per_sm=int(per_sm),
        shared_kb_per_cta=int(per_cta),
        registers_per_sm=int(_read(device, "regs_per_multiprocessor", 1, base.registers_per_sm)),
        source=source,
    )


def _read(device: Any, name: str, unit: int, fallback: float) -> float:
    """Return a property that not every torch version has, in `unit`s."""
    value = getattr(device, name, None)
    return value / unit if value else fallback


def _unknown_product(device: Any, index: int) -> GpuSpec:
    """Build a spec from the driver's figures. `source` names the assumed ones."""
    try:
        with Nvml(index) as nvml:
            limits = nvml.limits()
    except NvmlError:
        limits = GpuLimits(None, None, None)
    answers = {
        "bandwidth": limits.bandwidth_tb_s,
        "clock": limits.sm_clock_mhz,
        "power": limits.power_limit_w,
    }
    missing = [name for name, value in answers.items() if value is None]
    source = "the driver; bandwidth: memory clock times bus width"
    memory_gb = round(device.total_memory / 2**30, 1)
    name = slug(device.name)
    return GpuSpec(
        # An "NVIDIA H100" of 94 GB is not the catalogue's `h100`.
        name=f"{name}-{memory_gb:.0f}gb" if is_known(name) else name,
        product=device.name,
        compute_capability=(device.major, device.minor),
        sms=device.multi_processor_count,
        memory_gb=memory_gb,
        bandwidth_tb_s=limits.bandwidth_tb_s or _UNKNOWN_BANDWIDTH_TB_S,
        # The minimum of compute capability 8.0 and later, for an older torch.
        l2_mib=4,
        shared_kb_per_sm=100,
        shared_kb_per_cta=99,
        registers_per_sm=65_536,
        boost_clock_mhz=limits.sm_clock_mhz or _UNKNOWN_CLOCK_MHZ,
        power_limit_w=round(limits.power_limit_w or _UNKNOWN_POWER_W),
        source=f"{source}; assumed: {', '.join(missing)}" if missing else source,
    )


def _answers_to(gpu: LocalGpu, name: str) -> bool:
    return gpu.fault is None and _is_name_of(gpu.product, name)


def _is_name_of(product: str, name: str) -> bool:
    """Return True if `name` is this GPU's catalogue name, alias, product name or family
    (``a100``).
    """
    wanted, words = slug(name), slug(product)
    if wanted == words:
        return True
    spec = match_product(product)
    if spec is not None and (wanted == spec.name or wanted in spec.aliases):
        return True
    # `a100` is short for a100-80gb, but matches an A100-40GB that is here. `h200` is no family: an
    # H200 NVL is another GPU.
    if words.startswith(f"{wanted}-"):
        return all(slug(other.product) != wanted for other in CATALOGUE)
    if spec is not None and spec.name.startswith(f"{wanted}-"):
        return all(other.name != wanted for other in CATALOGUE)
    return False


def _torch_index(gpu: LocalGpu) -> int:
    """Return torch's index of an NVML GPU. They differ if CUDA puts the fastest of unlike GPUs
    first.
    """
    import torch

    for index in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if uuid and gpu.uuid.endswith(uuid):
            return index
    return gpu.index


def _why_torch_cannot() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build, see"
            " https://pytorch.org"
        )
    return (
        f"torch {torch.__version__} cannot start CUDA {torch.version.cuda} on it: "
        "update the driver, or install a torch built for an older CUDA"
    )


def _nothing_to_measure_on(gpu_name: str | None, gpus: list[LocalGpu]) -> str:
    if not gpus:
        return f"--require-gpu: {why_no_gpu()}; leave --require-gpu out to predict"
    here = ", ".join(dict.fromkeys(gpu.product for gpu in gpus if gpu.fault is None))
    faults = "".join(f"; {gpu.fault}" for gpu in gpus if gpu.fault is not None)
    return (
        f"--require-gpu: no {gpu_name} here, only {here or 'what cannot be read'}; leave --gpu out"
        f" to measure on that{faults}"
    )
