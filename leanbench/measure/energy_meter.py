"""Samples of NVML under load: its energy counter, the replays that keep the GPU busy meanwhile, and
the reading between two edges of a window.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml

#: Pause between reads of the counter while waiting for a tick.
TICK_POLL_S = 0.002
#: Pause between reads of power, clock and throttle reasons. They change no faster than the counter.
STATE_POLL_S = 0.02
#: Minimum number of ticks for a median.
_MIN_CALIBRATION_TICKS = 3
#: Maximum drift between the halves of a calibration. Above it, the GPU was not idle.
_MAX_IDLE_DRIFT = 0.10
#: The counter counts as stopped after this many of its ticks, and at least this time.
_PATIENCE_TICKS = 10
_PATIENCE_S = 1.0
#: Limits without a warning: difference of the two readings of energy, and uncertainty of a window's
#: ends.
_MAX_DIVERGENCE = 0.05
_MAX_TICK_ERROR = 0.01
#: Queued work in seconds, within limits on replays. Long enough to outlast a pause of the host,
#: short enough for the driver's queue: a full one blocks the host.
_QUEUED_S = 0.03
_MIN_REPLAYS = 3
_MAX_REPLAYS = 256
#: Maximum pause of the host, as a share of the queued work.
_PAUSE_SHARE = 0.25
_WARM_UP_PAUSE_S = 0.005


@dataclass(frozen=True)
class Tick:
    """Change of the counter, dated to the middle of the two reads around it."""

    time_s: float
    #: Half the time between the two reads.
    error_s: float
    energy_mj: int


@dataclass(frozen=True)
class EnergyCalibration:
    """Resolution of NVML's energy figures on this GPU, and its idle power."""

    #: Median time between changes of the energy counter; None if it cannot be used, see `warnings`.
    tick_ms: float | None
    #: Mean power of the idle GPU, by the counter, or by the instantaneous power without a counter.
    idle_power_w: float | None
    #: The same by the instantaneous power; None if the driver has none.
    idle_power_by_reading_w: float | None
    #: Sentences that apply to every reading with this calibration.
    warnings: tuple[str, ...] = ()


class EnergyCounter:
    """NVML's energy counter, watched for ticks. `failure` has the reason once it is unusable."""

    def __init__(self, nvml: Nvml, now: Callable[[], float]) -> None:
        self._nvml, self._now = nvml, now
        self._read_s, energy_mj = now(), nvml.total_energy_mj()
        self._energy_mj = energy_mj or 0
        self.failure = "the GPU has no energy counter" if energy_mj is None else None

    def poll(self) -> Tick | None:
        """Return the tick since the last poll, if any."""
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
    """Watch counter and power of the idle GPU. It must have been idle for a second before.

    Raises:
        GpuLostError: The GPU no longer answers.
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
    """Return the mean power between two ticks of the counter."""
    return (end.energy_mj - start.energy_mj) / 1000 / (end.time_s - start.time_s)


def without_counter(failure: str, power_w: float | None) -> str:
    """Return a warning with the reason and the replacement of the counter."""
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


class Event(Protocol):
    """Interface of `torch.cuda.Event` that the queue uses."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


def record_event() -> Event:
    """Record a timing event on torch's current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ReplayQueue:
    """Replays queued on the current stream, so that the GPU stays busy while the host is not.

    Args:
        replay: Enqueues one replay.
        record: Records an event after it.
        now: Host clock in seconds.
        sleep: Same as `time.sleep`.
    """

    def __init__(
        self,
        replay: Callable[[], object],
        record: Callable[[], Event],
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._replay, self._record, self._now, self._sleep = replay, record, now, sleep
        #: Ends of the queued and running replays, in order.
        self._pending: deque[Event] = deque()
        #: Number of replays observed to have ended.
        self.finished = 0
        #: Number of times that the queue was found empty.
        self.gaps = 0
        replay()
        start = record()
        replay()
        self._last_end = record()
        self._last_end.synchronize()
        replay_s = max(1e-6, start.elapsed_time(self._last_end) / 1000)
        self._depth = min(_MAX_REPLAYS, max(_MIN_REPLAYS, math.ceil(_QUEUED_S / replay_s)))
        self._max_pause_s = _PAUSE_SHARE * self._depth * replay_s
        self._fill()

    @property
    def next_end(self) -> tuple[int, Event]:
        """End of the running replay: the value of `finished` at that time, and the event."""
        return self.finished + 1, self._pending[0]

    @property
    def last_end(self) -> tuple[int, Event]:
        """Latest observed end: the value of `finished` at that time, and the event."""
        return self.finished, self._last_end

    def feed(self) -> None:
        """Count the replays that have ended and queue as many."""
        while self._pending and self._pending[0].query():
            self._last_end = self._pending.popleft()
            self.finished += 1
        self.gaps += not self._pending
        self._fill()

    def pause(self, seconds: float) -> None:
        """Sleep for that time, or less if the queue would run dry, and feed the queue."""
        self._sleep(max(0.0, min(seconds, self._max_pause_s)))
        self.feed()

    def keep_busy(self, seconds: float) -> None:
        """Replay for that time."""
        end_s = self._now() + seconds
        while self._now() < end_s:
            self.pause(_WARM_UP_PAUSE_S)

    def drain(self) -> None:
        """Wait for the queued replays."""
        if self._pending:
            self._pending[-1].synchronize()

    def _fill(self) -> None:
        while len(self._pending) < self._depth:
            self._replay()
            self._pending.append(self._record())


@dataclass(frozen=True)
class SustainedReading:
    """Figures of one launch under seconds of the same load. Unavailable figures are None."""

    sustained_us: float
    #: From the first tick to the last.
    window_s: float
    #: Median SM clock.
    clock_mhz: int | None
    #: Mean power.
    power_w: float | None
    #: By the counter; by the instantaneous power, with a warning, if the counter is unusable.
    energy_mj: float | None
    #: Energy minus that of the idle GPU in the same time.
    energy_above_idle_mj: float | None
    #: Second reading of energy; None if there is only one.
    energy_by_power_mj: float | None
    #: All reasons in the window, e.g. ``["sw_power_cap"]``.
    throttle_reasons: list[str] | None
    #: One sentence each.
    warnings: list[str]
    #: Power of the idle GPU by the calibration.
    idle_power_w: float | None = None
    #: Seconds since the start, SM clock in MHz and power in W of each reading.
    states: tuple[tuple[float, int | None, float | None], ...] = ()


class EnergyMeter:
    """Samples of NVML between two edges of a window. Feeds the queue while it waits."""

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
        self._states: list[tuple[float, int | None, float | None]] = []
        self._reasons: set[str] | None = None

    def edge(self) -> float:
        """Wait for the counter's next tick and return its time; without a counter, now."""
        tick = self._next_tick()
        edge_s = self._now() if tick is None else tick.time_s
        self._ticks += [] if tick is None else [tick]
        self._read_state()
        self._queue.feed()
        return edge_s

    def watch(self, until_s: float) -> None:
        """Read power, clock and throttle reasons, and detect a counter that goes back."""
        while (left_s := until_s - self._now()) > 0:
            next_read_s = self._now() + min(STATE_POLL_S, left_s)
            while (pause_s := next_read_s - self._now()) > 0:
                self._queue.pause(pause_s)
            self._read_state()
            if self._counter is not None:
                self._counter.poll()

    def reading(self, sustained_us: float, window_s: float) -> SustainedReading:
        """Return the figures of one launch between the two edges."""
        trusted = self._counter is not None and self._counter.failure is None
        counter_w = mean_power_w(*self._ticks) if trusted else None
        clocks_mhz = [mhz for _, mhz, _ in self._states if mhz is not None]
        integrated_w = integrated_power_w([(s, w) for s, _, w in self._states if w is not None])
        power_w = counter_w if trusted else integrated_w
        idle_w = None
        if self._calibration is not None:
            # Subtract idle power by the same kind of reading.
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
            clock_mhz=round(statistics.median(clocks_mhz)) if clocks_mhz else None,
            power_w=power_w,
            energy_mj=_energy_mj(power_w, sustained_us),
            energy_above_idle_mj=_energy_mj(above_idle_w, sustained_us),
            energy_by_power_mj=_energy_mj(integrated_w, sustained_us) if trusted else None,
            throttle_reasons=None if self._reasons is None else sorted(self._reasons),
            warnings=self._warnings(counter_w, integrated_w, idle_w, window_s),
            idle_power_w=None if self._calibration is None else self._calibration.idle_power_w,
            states=tuple((round(s - self._states[0][0], 3), mhz, w) for s, mhz, w in self._states),
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
        self._states.append((now_s, clock_mhz, power_w))
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
    """Return the mean of (time in s, W) by trapezoids; None for fewer than two."""
    if len(powers) < 2:
        return None
    energy_j = sum(
        (later_s - s) * (later_w + w) / 2 for (s, w), (later_s, later_w) in pairwise(powers)
    )
    return energy_j / (powers[-1][0] - powers[0][0])


def _energy_mj(power_w: float | None, time_us: float) -> float | None:
    return None if power_w is None else power_w * time_us / 1000
