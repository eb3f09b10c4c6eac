"""State, limits and processes of one GPU by NVML, without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from leanbench.gpu.nvml_library import ask, open_nvml
from leanbench.gpu.visible import handle_of

# Bits of nvmlClocksEventReasons. Idle and user-defined clocks (0x1, 0x2, 0x100) are no throttling.
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


@dataclass(frozen=True)
class GpuState:
    """One reading. A field that the GPU does not support is None."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    #: Reasons for lowered clocks, such as ``["sw_power_cap"]``.
    throttle_reasons: list[str] | None


@dataclass(frozen=True)
class GpuLimits:
    """Limits of the GPU. A field that the GPU does not support is None."""

    sm_clock_mhz: int | None
    power_limit_w: float | None
    #: Both edges of the highest memory clock, times the bus width.
    bandwidth_tb_s: float | None


class Nvml:
    """NVML for one GPU, as a context manager. Every read raises GpuLostError for a lost GPU.

    Args:
        device: torch's index, or a UUID with or without its ``GPU-`` prefix.

    Raises:
        NvmlUnavailableError: There is no driver.
        GpuNotFoundError: There is no such GPU.
    """

    def __init__(self, device: int | str = 0) -> None:
        self.device = device

    def __enter__(self) -> Nvml:
        self._library = open_nvml()
        self._nvml = self._library.__enter__()
        try:
            handle = handle_of(self._nvml, self.device)
            # Clocks and power belong to the whole GPU: a MIG instance has none of its own.
            whole = ask(self._nvml, self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
            self._handle = handle if whole is None else whole
        except BaseException:
            self._library.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._library.__exit__(kind, error, trace)

    def state(self) -> GpuState:
        """Read clocks, temperature, power and throttle reasons; about a millisecond."""
        nvml, gpu = self._nvml, self._handle
        return GpuState(
            sm_clock_mhz=ask(nvml, nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask(nvml, nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            temperature_c=ask(nvml, nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            power_w=_power_w(nvml, gpu),
            throttle_reasons=_throttle_reasons(nvml, gpu),
        )

    def total_energy_mj(self) -> int | None:
        """Return the energy of the whole GPU, memory included, since the driver was loaded, in mJ.

        None before Volta. The counter moves in ticks, every 100 ms on an H200.
        """
        return ask(self._nvml, self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)

    def power_instant_w(self) -> float | None:
        """Return the latest instantaneous power; None if the driver has only a one-second
        average.
        """
        return _power_instant_w(self._nvml, self._handle)

    def power_limit_w(self) -> float | None:
        """Return the enforced power limit."""
        limit_mw = ask(self._nvml, self._nvml.nvmlDeviceGetEnforcedPowerLimit, self._handle)
        return None if limit_mw is None else limit_mw / 1000

    def throttle_reasons(self) -> list[str] | None:
        """Return the throttle reasons of `state`, in one call to the driver."""
        return _throttle_reasons(self._nvml, self._handle)

    def sm_clock_mhz(self) -> int | None:
        """Return the SM clock of `state`, in one call to the driver."""
        nvml = self._nvml
        return ask(nvml, nvml.nvmlDeviceGetClockInfo, self._handle, nvml.NVML_CLOCK_SM)

    def other_processes(self, since_us: int = 0) -> list[GpuProcess] | None:
        """Return the other processes with a context on this GPU, by pid; None if NVML cannot list
        them.

        A process without kernels has an `sm_utilisation` of 0. Ended processes are not listed.

        Args:
            since_us: Start of the counted SM use, as `time.time_ns() // 1000`.
        """
        return other_processes(self._nvml, self._handle, since_us)

    def limits(self) -> GpuLimits:
        """Return maximum clocks, default power limit, and the bandwidth of memory clock and bus
        width.
        """
        nvml, gpu = self._nvml, self._handle
        power_mw = ask(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu)
        memory_clock_mhz = ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_MEM)
        bus_bits = ask(nvml, nvml.nvmlDeviceGetMemoryBusWidth, gpu)
        return GpuLimits(
            sm_clock_mhz=ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM),
            power_limit_w=power_mw / 1000 if power_mw else None,
            bandwidth_tb_s=(
                2 * memory_clock_mhz * bus_bits / 8 / 1e6 if memory_clock_mhz and bus_bits else None
            ),
        )


def _power_w(nvml: Any, handle: Any) -> float | None:
    # The older call averages over about a second on recent GPUs, so the instantaneous field comes
    # first.
    if (power_w := _power_instant_w(nvml, handle)) is not None:
        return power_w
    power_mw = ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return None if power_mw is None else power_mw / 1000


def _power_instant_w(nvml: Any, handle: Any) -> float | None:
    values = ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if values and values[0].nvmlReturn == nvml.NVML_SUCCESS:
        return values[0].value.uiVal / 1000
    return None


def _throttle_reasons(nvml: Any, handle: Any) -> list[str] | None:
    bits = ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 have the older name only
        bits = ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return None if bits is None else [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]


#: Clients of the Multi-Process Service are in a list of their own.
_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


@dataclass(frozen=True)
class GpuProcess:
    """A process with a context on a GPU."""

    #: NVML's pid. In a container it can be the host's, and not exist here.
    pid: int
    #: Program without its folder; None if it cannot be seen from here.
    name: str | None
    #: Percent of time with a kernel on the SMs, the highest of NVML's samples; 0 for an idle
    #: context, None if unknown.
    sm_utilisation: int | None


def other_processes(nvml: Any, gpu: Any, since_us: int) -> list[GpuProcess] | None:
    """Return the other processes of a GPU; see `Nvml.other_processes`.

    Args:
        nvml: The `pynvml` module.
        gpu: Handle of the whole GPU.
    """
    lists = [ask(nvml, getattr(nvml, name), gpu) for name in _LISTS]
    if lists[0] is None:
        return None
    pids = {int(process.pid) for processes in lists for process in processes or ()}
    if os.getpid() not in pids and _runs_cuda_here():
        # The pids are counted elsewhere, and one of them is this process.
        strangers = {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
        if len(strangers) > 1:
            return None
        pids -= strangers
    utilisation = _sm_utilisation(nvml, gpu, since_us)
    return [
        GpuProcess(pid, _name(nvml, pid), None if utilisation is None else utilisation.get(pid, 0))
        for pid in sorted(pids - {os.getpid()})
    ]


def _sm_utilisation(nvml: Any, gpu: Any, since_us: int) -> dict[int, int] | None:
    """Return the highest sample of each pid, in percent. A pid without samples had no work."""

    def read() -> list[Any]:
        try:
            return nvml.nvmlDeviceGetProcessUtilization(gpu, since_us)
        except nvml.NVMLError as error:
            # The binding raises SUCCESS when the driver says that there are no samples.
            if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
                return []
            raise

    samples = ask(nvml, read)
    if samples is None:
        return None
    highest: dict[int, int] = {}
    for sample in samples:
        # Drivers are known to return entries that were never filled: old times, thousands of
        # percent.
        if sample.timeStamp > since_us and sample.smUtil <= 100:
            highest[sample.pid] = max(highest.get(sample.pid, 0), int(sample.smUtil))
    return highest


def _runs_cuda_here() -> bool:
    """Return True if this process certainly has a context: torch uses memory of a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0


def _name(nvml: Any, pid: int) -> str | None:
    name = ask(nvml, nvml.nvmlSystemGetProcessName, pid)
    if not name:
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            return None
    # NVML gives the whole path, of some programs the arguments too.
    words = name.split()
    return words[0].rsplit("/", 1)[-1] if words else None
