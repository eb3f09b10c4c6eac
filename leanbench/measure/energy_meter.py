"""NVML's samples of a GPU under load between the edges of a window, and the reading they make."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from leanbench.measure.energy_counter import (
    STATE_POLL_S,
    TICK_POLL_S,
    EnergyCalibration,
    EnergyCounter,
    Tick,
    mean_power_w,
    without_counter,
)
from leanbench.measure.replay_queue import ReplayQueue

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml

#: A counter that has not moved for this many of its ticks, and this long, has stopped.
_PATIENCE_TICKS = 10
_PATIENCE_S = 1.0
#: Above these a reading carries a warning: between the two readings of energy, and of a window, how
#: well its ends are known.
_MAX_DIVERGENCE = 0.05
_MAX_TICK_ERROR = 0.01


@dataclass(frozen=True)
class SustainedReading:
    """One launch under seconds of the same load. A figure that cannot be had is None."""

    sustained_us: float
    #: From the first tick to the last.
    window_s: float
    #: Median SM clock.
    clock_mhz: int | None
    #: Mean power.
    power_w: float | None
    #: By the counter; where it is missing or failed, by the instantaneous power, and `warnings`
    #: says so.
    energy_mj: float | None
    #: What the GPU would have used idle in that time, taken off.
    energy_above_idle_mj: float | None
    #: The second reading; None where there is only one.
    energy_by_power_mj: float | None
    #: All that were seen in the window, e.g. ``["sw_power_cap"]``.
    throttle_reasons: list[str] | None
    #: A sentence each.
    warnings: list[str]


class EnergyMeter:
    """NVML's samples between two edges; fills the queue while it waits."""

    def __init__(
        self,
        nvml: Nvml | None,
        calibration: EnergyCalibration | None,
        queue: ReplayQueue,
        now: Callable[[], float],
    ) -> None:
        self._nvml, self._calibration, self._queue, self._now = nvml, calibration, queue, now
        self._counter: EnergyCounter | None = None
        if nvml is not None and calibration is not None and calibration.tick_ms is not None:
            self._counter = EnergyCounter(nvml, now)
            self._patience_s = max(_PATIENCE_S, _PATIENCE_TICKS * calibration.tick_ms / 1000)
        self._ticks: list[Tick] = []
        self._powers: list[tuple[float, float]] = []
        self._clocks_mhz: list[int] = []
        self._reasons: set[str] | None = None

    def edge(self) -> float:
        """The time of one end of the window: of the counter's next tick, or now where no counter is
        used.
        """
        tick = self._next_tick()
        edge_s = self._now() if tick is None else tick.time_s
        self._ticks += [] if tick is None else [tick]
        self._read_state()
        self._queue.feed()
        return edge_s

    def watch(self, until_s: float) -> None:
        """Reads power, clock and throttle reasons until then; a counter that goes back is noticed
        too.
        """
        while (left_s := until_s - self._now()) > 0:
            next_read_s = self._now() + min(STATE_POLL_S, left_s)
            while (pause_s := next_read_s - self._now()) > 0:
                self._queue.pause(pause_s)
            self._read_state()
            if self._counter is not None:
                self._counter.poll()

    def reading(self, sustained_us: float, window_s: float) -> SustainedReading:
        """Reading between the two edges, for one launch."""
        trusted = self._counter is not None and self._counter.failure is None
        counter_w = mean_power_w(*self._ticks) if trusted else None
        integrated_w = integrated_power_w(self._powers)
        power_w = counter_w if trusted else integrated_w
        idle_w = None
        if self._calibration is not None:
            # Taken off by the same reading that it was measured with.
            idle_w = (
                self._calibration.idle_power_w
                if trusted
                else self._calibration.idle_power_by_reading_w
            )
        above_idle_w = (
            None if power_w is None or idle_w is None or power_w < idle_w else power_w - idle_w
        )
        return SustainedReading(
            sustained_us=sustained_us,
            window_s=window_s,
            clock_mhz=round(statistics.median(self._clocks_mhz)) if self._clocks_mhz else None,
            power_w=power_w,
            energy_mj=_energy_mj(power_w, sustained_us),
            energy_above_idle_mj=_energy_mj(above_idle_w, sustained_us),
            energy_by_power_mj=_energy_mj(integrated_w, sustained_us) if trusted else None,
            throttle_reasons=None if self._reasons is None else sorted(self._reasons),
            warnings=self._warnings(counter_w, integrated_w, idle_w, window_s),
        )

    def _next_tick(self) -> Tick | None:
        counter = self._counter
        if counter is None:
            return None
        last_s = self._now() + self._patience_s
        while counter.failure is None:
            self._queue.pause(TICK_POLL_S)
            tick = counter.poll()
            if tick is not None:
                return tick
            if self._now() > last_s:
                counter.failure = (
                    f"NVML's energy counter stood still for {self._patience_s:.1f} s under load"
                )
        return None

    def _read_state(self) -> None:
        if self._nvml is None:
            return
        now_s, power_w = self._now(), self._nvml.power_instant_w()
        clock_mhz, reasons = self._nvml.sm_clock_mhz(), self._nvml.throttle_reasons()
        self._powers += [] if power_w is None else [(now_s, power_w)]
        self._clocks_mhz += [] if clock_mhz is None else [clock_mhz]
        if reasons is not None:
            self._reasons = (self._reasons or set()).union(reasons)

    def _warnings(
        self,
        counter_w: float | None,
        integrated_w: float | None,
        idle_w: float | None,
        window_s: float,
    ) -> list[str]:
        if self._nvml is None:
            return []
        warnings: list[str] = []
        if self._calibration is None:
            warnings.append(
                without_counter("NVML's energy counter was not calibrated", integrated_w)
            )
        else:
            warnings += self._calibration.warnings
        if self._counter is not None and self._counter.failure is not None:
            warnings.append(without_counter(self._counter.failure, integrated_w))
        if counter_w is not None and integrated_w is not None:
            divergence = integrated_w / counter_w - 1
            if abs(divergence) > _MAX_DIVERGENCE:
                warnings.append(
                    f"two readings of energy differ by {abs(divergence):.1%}: mean power"
                    f" {counter_w:.0f} W by the energy counter, {integrated_w:.0f} W by the"
                    " instantaneous power"
                )
        tick_error = sum(tick.error_s for tick in self._ticks) / window_s
        if counter_w is not None and tick_error > _MAX_TICK_ERROR:
            warnings.append(
                f"NVML answered too slowly: energy is uncertain by {tick_error:.1%}, because the"
                " ticks of its counter are not known any better"
            )
        power_w = integrated_w if counter_w is None else counter_w
        if power_w is not None and idle_w is not None and power_w < idle_w:
            warnings.append(
                f"{power_w:.0f} W under load is below the {idle_w:.0f} W of the GPU that was called"
                " idle"
            )
        return warnings


def integrated_power_w(powers: Sequence[tuple[float, float]]) -> float | None:
    """Mean of (time in s, W) by trapezoids; None for fewer than two."""
    if len(powers) < 2:
        return None
    energy_j = sum(
        (later_s - s) * (later_w + w) / 2 for (s, w), (later_s, later_w) in pairwise(powers)
    )
    return energy_j / (powers[-1][0] - powers[0][0])


def _energy_mj(power_w: float | None, time_us: float) -> float | None:
    return None if power_w is None else power_w * time_us / 1000
