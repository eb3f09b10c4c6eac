"""The GPU that is here, as a `GpuSpec`, and the choice between measuring on it and predicting for
another.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.catalogue import find, match_product, slug
from leanbench.gpu.nvml import Nvml
from leanbench.gpu.nvml_library import NvmlError
from leanbench.gpu.visible import LocalGpu, local_gpus, why_no_gpu, why_silent

#: What is predicted for when there is no GPU and none was named: the GPU of the LeanAttention
#: paper.
DEFAULT_GPU = "a100-80gb"
#: Stand-ins for a GPU that is in no list and does not say: below any current data-centre GPU's.
_UNKNOWN_BANDWIDTH_TB_S = 0.25
_UNKNOWN_CLOCK_MHZ = 1500
_UNKNOWN_POWER_W = 300


@dataclass(frozen=True)
class Target:
    """What a command is about: a GPU to measure on, or the model of one."""

    spec: GpuSpec
    #: torch's index of the GPU; None: nothing is measured, `spec` is predicted for.
    local_index: int | None
    #: Why a GPU that is here is not used, or not in full, where that may surprise.
    note: str | None = None


def choose(gpu_name: str | None, require_gpu: bool) -> Target:
    """What `--gpu` and `--require-gpu` mean on this machine; torch is not imported where NVML says
    there is no GPU.

    No name: the first GPU here, or else the model of `DEFAULT_GPU`. A name: a GPU here that is one
    of those, or else the model of that GPU. Where NVML cannot say what is here, torch is asked.

    Raises:
        UserError: the name is unknown; or `require_gpu`, and no GPU here answers to it; or the
            driver is broken.
    """
    broken: NvmlError | None = None
    try:
        gpus = local_gpus()
    except NvmlError as error:
        gpus, broken = [], error
    if not gpus and (silence := why_silent() if broken is None else str(broken)) is not None:
        target = _torch_target(gpu_name, silence)
        if target is not None:
            return target
        if broken is not None:
            raise broken
    here = next(
        (gpu for gpu in gpus if gpu_name is None or _answers_to(gpu.product, gpu_name)), None
    )
    if here is None:
        spec = find(gpu_name or DEFAULT_GPU)
        if require_gpu:
            raise UserError(_nothing_to_measure_on(gpu_name, gpus))
        return Target(spec, None)
    obstacle = _why_torch_cannot()
    if obstacle is None:
        index = 0 if gpu_name is None else _torch_index(here)
        return Target(spec_of_device(index), index)
    if require_gpu:
        raise UserError(f"there is an {here.product} here, but {obstacle}")
    spec = find(gpu_name) if gpu_name else match_product(here.product) or find(DEFAULT_GPU)
    return Target(spec, None, note=f"there is an {here.product} here, but {obstacle}")


def _torch_target(gpu_name: str | None, silence: str) -> Target | None:
    """A GPU to measure on without NVML's word, which is silent for the reason given; None where
    torch has none.
    """
    if not _has_cuda():
        return None
    try:
        import torch
    except (ImportError, OSError):
        return None
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        spec = spec_of_device(index)
        if gpu_name is None or _answers_to(spec.product, gpu_name):
            note = (
                "Clocks, temperature, power and other processes stay unknown, NVML cannot be used"
                f" ({silence})"
            )
            return Target(spec, index, note)
    return None


def _has_cuda() -> bool:
    """Whether the driver's library for CUDA is here. Without it torch sees no GPU, which it takes
    seconds to say.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def spec_of_device(index: int) -> GpuSpec:
    """The GPU that torch counts as `index`: the catalogue's figures, replaced where the driver
    knows better.

    A MIG instance gets its share of the whole GPU's bandwidth, in proportion to its memory. A
    product that the catalogue does not know gets its figures from the driver alone; `source` says
    so.
    """
    import torch

    device = torch.cuda.get_device_properties(index)
    known = match_product(device.name)
    base = known or _unknown_product(device, index)
    # A whole GPU's total is 2^30 bytes a GB, less a few percent; an instance has an eighth or more
    # of that.
    share = device.total_memory / (base.memory_gb * 2**30) if " MIG " in device.name else 1.0
    return replace(
        base,
        product=device.name,
        compute_capability=(device.major, device.minor),
        sms=device.multi_processor_count,
        memory_gb=round(base.memory_gb * share, 1),
        bandwidth_tb_s=base.bandwidth_tb_s * share,
        l2_mib=_read(device, "L2_cache_size", 2**20, base.l2_mib),
        shared_kb_per_sm=int(
            _read(device, "shared_memory_per_multiprocessor", 1024, base.shared_kb_per_sm)
        ),
        shared_kb_per_cta=int(
            _read(device, "shared_memory_per_block_optin", 1024, base.shared_kb_per_cta)
        ),
        registers_per_sm=int(_read(device, "regs_per_multiprocessor", 1, base.registers_per_sm)),
        source=(
            base.source
            if known is None
            else f"the driver; bandwidth, clock and power: {known.source}"
        ),
    )


def _read(device: Any, name: str, unit: int, fallback: float) -> float:
    """A property that not every torch version has, in `unit`s."""
    value = getattr(device, name, None)
    return value / unit if value else fallback


def _unknown_product(device: Any, index: int) -> GpuSpec:
    """A spec from what the driver says; figures it keeps to itself are assumed, and `source` names
    them.
    """
    try:
        with Nvml(index) as nvml:
            limits = nvml.limits()
        clock_mhz, power_w, bandwidth_tb_s = (
            limits.sm_clock_mhz,
            limits.power_limit_w,
            limits.bandwidth_tb_s,
        )
    except NvmlError:
        clock_mhz = power_w = bandwidth_tb_s = None
    answers = {"bandwidth": bandwidth_tb_s, "clock": clock_mhz, "power": power_w}
    missing = [name for name, value in answers.items() if value is None]
    source = "the driver; bandwidth: memory clock times bus width"
    return GpuSpec(
        name=slug(device.name),
        product=device.name,
        compute_capability=(device.major, device.minor),
        sms=device.multi_processor_count,
        memory_gb=round(device.total_memory / 2**30, 1),
        bandwidth_tb_s=bandwidth_tb_s or _UNKNOWN_BANDWIDTH_TB_S,
        # The smallest of compute capability 8.0 and later, for a torch that does not say.
        l2_mib=4,
        shared_kb_per_sm=100,
        shared_kb_per_cta=99,
        registers_per_sm=65_536,
        boost_clock_mhz=clock_mhz or _UNKNOWN_CLOCK_MHZ,
        power_limit_w=round(power_w or _UNKNOWN_POWER_W),
        source=f"{source}; assumed: {', '.join(missing)}" if missing else source,
    )


def _answers_to(product: str, name: str) -> bool:
    """Is `name` this GPU's catalogue name, alias or product name, or the family it belongs to
    (``a100``)?
    """
    wanted = slug(name)
    if wanted == slug(product):
        return True
    spec = match_product(product)
    if spec is None:
        return False
    if wanted == spec.name or wanted in spec.aliases:
        return True
    # `a100` is short for a100-80gb where there is no GPU, but whoever has an A100-40GB here means
    # that one. `h200` is a GPU of its own, and no family.
    return spec.name.startswith(f"{wanted}-") and find(wanted).name != wanted


def _torch_index(gpu: LocalGpu) -> int:
    """torch's index of a GPU that NVML named: they differ where CUDA puts the fastest of unlike
    GPUs first.
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
    products = ", ".join(dict.fromkeys(gpu.product for gpu in gpus))
    return f"--require-gpu: no {gpu_name} here, only {products}; leave --gpu out to measure on that"
