"""What NVML says of the GPUs that are here, without torch: which there are, and how one is doing right now.

GPUs are counted as CUDA counts them: `CUDA_VISIBLE_DEVICES` hides and reorders. NVML itself knows nothing of that
variable, so every look-up goes through the GPU's UUID or the list of visible ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from leanbench.errors import UserError

# Bits of nvmlClocksEventReasons. Idle, and clocks that somebody set, are no throttling: bits 0x1, 0x2 and 0x100.
_THROTTLE_REASONS = {
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x200: "board_limit",
    0x400: "reliability",
}


class NvmlError(UserError):
    """NVML could not answer; the sentence says the fix."""


class NvmlUnavailableError(NvmlError):
    """No NVIDIA driver, or no GPU that it can drive."""


class GpuNotFoundError(NvmlError):
    """The driver works, but has no such GPU."""


class GpuLostError(NvmlError):
    """The GPU fell off the bus or needs a reset."""


@dataclass(frozen=True)
class LocalGpu:
    """One GPU that CUDA programs started here would see. A figure that NVML does not know is None."""

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
    #: Is the GPU partitioned? Then CUDA sees one instance, smaller than `memory_total_bytes` of the whole.
    mig: bool


@dataclass(frozen=True)
class GpuState:
    """One reading. A field that the GPU does not support is None."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    #: Why the clocks are lower than they could be, e.g. ``["sw_power_cap"]``; empty when nothing holds them back.
    throttle_reasons: list[str] | None


@dataclass(frozen=True)
class GpuLimits:
    """What the GPU was built for. A field that the GPU does not support is None."""

    sm_clock_mhz: int | None
    power_limit_w: float | None
    #: Both edges of the highest memory clock, times the bus width.
    bandwidth_tb_s: float | None


class Nvml:
    """NVML for one GPU, open between `with` and its end.

    Args:
        device: the index as torch counts, or a UUID with or without its ``GPU-`` prefix.

    Raises:
        NvmlUnavailableError: there is no driver.
        GpuNotFoundError: there is no such GPU.
    """

    def __init__(self, device: int | str = 0) -> None:
        self.device = device

    def __enter__(self) -> Nvml:
        self._library = _library()
        self._nvml = self._library.__enter__()
        try:
            handle = _handle_of(self._nvml, self.device)
            # Clocks and power belong to the whole GPU: a MIG instance has none of its own.
            whole = _ask(self._nvml, self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
            self._handle = handle if whole is None else whole
        except BaseException:
            self._library.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.__exit__(None, None, None)

    def state(self) -> GpuState:
        """Clocks, temperature, power and throttle reasons now; about a millisecond.

        Raises:
            GpuLostError: the GPU no longer answers.
        """
        nvml, gpu = self._nvml, self._handle
        return GpuState(
            sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            power_w=_power_w(nvml, gpu),
            throttle_reasons=_throttle_reasons(nvml, gpu),
        )

    def limits(self) -> GpuLimits:
        """Highest clocks, default power limit, and the bandwidth that memory clock and bus width amount to."""
        nvml, gpu = self._nvml, self._handle
        power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)
        memory_clock_mhz = _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_MEM)
        bus_bits = _ask(nvml, nvml.nvmlDeviceGetMemoryBusWidth, gpu)
        return GpuLimits(
            sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM),
            power_limit_w=power_mw / 1000 if power_mw else None,
            bandwidth_tb_s=2 * memory_clock_mhz * bus_bits / 8 / 1e6 if memory_clock_mhz and bus_bits else None,
        )


def local_gpus() -> list[LocalGpu]:
    """Every GPU that CUDA would see here, in its order; empty where there is no driver or no GPU.

    Raises:
        NvmlError: there is a driver, but it is broken; the sentence says the fix.
    """
    try:
        with _library() as nvml:
            return [_local_gpu(nvml, index, handle) for index, handle in enumerate(_visible(nvml))]
    except NvmlUnavailableError:
        return []


def why_no_gpu() -> str | None:
    """One sentence why `local_gpus` is empty, None when it is not."""
    try:
        with _library() as nvml:
            if _visible(nvml):
                return None
            if nvml.nvmlDeviceGetCount():
                return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides every GPU: unset it"
            return "the NVIDIA driver finds no GPU"
    except NvmlError as error:
        return str(error)


@contextmanager
def _library() -> Iterator[Any]:
    """NVML, initialised; it counts its users, so nesting is fine."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailableError("pynvml is not installed: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            raise NvmlError(
                "the NVIDIA driver was updated while its kernel module kept running: reboot, or reload the module"
            ) from None
        # A container or a machine without a GPU fails here in many ways; none of them leaves a GPU to use.
        raise NvmlUnavailableError(f"there is no working NVIDIA driver here (NVML: {error})") from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    """The answer, or None where this GPU, driver or user has none."""
    try:
        return function(*args)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise GpuLostError("the GPU no longer answers: reset it with `nvidia-smi --gpu-reset`, or reboot") from None
        return None


def _visible(nvml: Any) -> list[Any]:
    """Handles in CUDA's order: NVML's own is that of the PCI bus.

    CUDA puts the fastest of unlike GPUs first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; which one that is only CUDA knows.
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
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        elif entry.startswith("GPU-"):
            # CUDA takes any beginning of a UUID that is unique.
            matches = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(entry)]
            handle = matches[0] if len(matches) == 1 else None
        if handle is None:
            break  # CUDA ignores everything from the first bad entry on
        visible.append(handle)
    return visible


def _handle_of(nvml: Any, device: int | str) -> Any:
    if isinstance(device, int):
        uuid = _torch_uuid(device)
        if uuid is None:
            visible = _visible(nvml)
            if not 0 <= device < len(visible):
                raise GpuNotFoundError(f"there is no GPU {device}, visible here: {len(visible)} (counted from 0)")
            return visible[device]
        device = uuid
    for uuid in (device, f"GPU-{device}", f"MIG-{device}"):
        handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is not None:
            return handle
    raise GpuNotFoundError(f"there is no GPU with UUID {device}: `nvidia-smi -L` lists them")


def _torch_uuid(index: int) -> str | None:
    """What torch says, if it runs CUDA already: the only sure word on how unlike GPUs are ordered."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not 0 <= index < torch.cuda.device_count():
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else str(uuid)


def _local_gpu(nvml: Any, index: int, handle: Any) -> LocalGpu:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
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


def _power_w(nvml: Any, handle: Any) -> float | None:
    # The older call averages over about a second on recent GPUs, so the instantaneous field comes first.
    values = _ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if values and values[0].nvmlReturn == nvml.NVML_SUCCESS:
        return values[0].value.uiVal / 1000
    power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return None if power_mw is None else power_mw / 1000


def _throttle_reasons(nvml: Any, handle: Any) -> list[str] | None:
    bits = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 have the older name only
        bits = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return None if bits is None else [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]
