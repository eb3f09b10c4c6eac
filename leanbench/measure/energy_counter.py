"""NVML's energy counter: its ticks, and what it says of the idle GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml

#: Between two reads of the counter while a tick is awaited.
TICK_POLL_S = 0.002
#: Between two reads of power, clock and throttle reasons, which change no faster than the counter.
STATE_POLL_S = 0.02
#: Fewer ticks give no median.
_MIN_CALIBRATION_TICKS = 3
#: Between the halves of a calibration: above this, the GPU was not idle.
_MAX_IDLE_DRIFT = 0.10


@dataclass(frozen=True)
class Tick:
    """A change of the counter, at the middle of the two reads around it."""

    time_s: float
    #: Half the distance of the two reads.
    error_s: float
    energy_mj: int


@dataclass(frozen=True)
class EnergyCalibration:
    """Resolution of NVML's energy figures on this GPU, and its idle power."""

    #: Median time between changes of the energy counter; None: there is no counter to use,
    #: `warnings` says why.
    tick_ms: float | None
    #: Mean power of the idle GPU: by the counter, or by the instantaneous power where there is no
    #: counter.
    idle_power_w: float | None
    #: By the instantaneous power; None where the driver has none.
    idle_power_by_reading_w: float | None
    #: A sentence each; they hold for every reading made with this calibration.
    warnings: tuple[str, ...] = ()


class EnergyCounter:
    """The counter, watched for ticks. Once it is of no use, `failure` says why."""

    def __init__(self, nvml: Nvml, now: Callable[[], float]) -> None:
        self._nvml, self._now = nvml, now
        self._read_s, energy_mj = now(), nvml.total_energy_mj()
        self._energy_mj = energy_mj or 0
        self.failure = "the GPU has no energy counter" if energy_mj is None else None

    def poll(self) -> Tick | None:
        """The tick since the last poll, if there was one."""
        if self.failure is not None:
            return None
        before_s, before_mj = self._read_s, self._energy_mj
        self._read_s, energy_mj = self._now(), self._nvml.total_energy_mj()
        if energy_mj is None:
            self.failure = "NVML's energy counter stopped answering"
            return None
        self._energy_mj = energy_mj
        if energy_mj < before_mj:
            self.failure = f"NVML's energy counter went back from {before_mj} to {energy_mj} mJ"
        if energy_mj <= before_mj:
            return None
        return Tick((before_s + self._read_s) / 2, (self._read_s - before_s) / 2, energy_mj)


def calibrate(
    nvml: Nvml,
    seconds: float = 1.8,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> EnergyCalibration:
    """Watches counter and power for that long. The GPU must have nothing to do, from a second
    before on.

    Raises:
        GpuLostError: the GPU no longer answers.
    """
    counter = EnergyCounter(nvml, now)
    ticks: list[Tick] = []
    powers_w: list[float] = []
    next_power_s = started_s = now()
    while (now_s := now()) < started_s + seconds:
        if now_s >= next_power_s:
            power_w = nvml.power_instant_w()
            powers_w += [] if power_w is None else [power_w]
            next_power_s = now_s + STATE_POLL_S
        sleep(TICK_POLL_S)
        tick = counter.poll()
        ticks += [] if tick is None else [tick]
    reading_w = statistics.fmean(powers_w) if powers_w else None
    failure = counter.failure
    if failure is None and len(ticks) < _MIN_CALIBRATION_TICKS:
        failure = f"NVML's energy counter moved {len(ticks)} times in {seconds:g} s"
    if failure is not None:
        return EnergyCalibration(None, reading_w, reading_w, (without_counter(failure, reading_w),))
    return EnergyCalibration(
        tick_ms=statistics.median(
            later.time_s - earlier.time_s for earlier, later in pairwise(ticks)
        )
        * 1000,
        idle_power_w=mean_power_w(ticks[0], ticks[-1]),
        idle_power_by_reading_w=reading_w,
        warnings=_drift(ticks),
    )


def mean_power_w(start: Tick, end: Tick) -> float:
    """Between two ticks, by the counter."""
    return (end.energy_mj - start.energy_mj) / 1000 / (end.time_s - start.time_s)


def without_counter(failure: str, power_w: float | None) -> str:
    """A warning: why the counter is not used, and what takes its place."""
    if power_w is None:
        return f"{failure}, and NVML has no instantaneous power: there is no energy"
    return f"{failure}: energy comes from the instantaneous power alone"


def _drift(ticks: Sequence[Tick]) -> tuple[str, ...]:
    middle = ticks[len(ticks) // 2]
    first_w, second_w = mean_power_w(ticks[0], middle), mean_power_w(middle, ticks[-1])
    if abs(second_w - first_w) <= _MAX_IDLE_DRIFT * min(first_w, second_w):
        return ()
    sentence = (
        f"power went from {first_w:.0f} to {second_w:.0f} W while the GPU should have been idle"
    )
    return (f"{sentence}: energy above idle is uncertain",)
