"""Energy and sustained latency of a launch: seconds of graph replays without a gap, with NVML's
energy counter.

The counter moves in ticks (every 100 ms on an H200), so a window starts and ends on observed ticks.
The energy of one launch is

    energy_mj = (counter at the end - counter at the start) / (time between the two ticks) x
    sustained_us

where `sustained_us` is the GPU's time between the end of the first and of the last replay inside
the window, divided by the launches in between. The GPU is never idle, so launches come at the rate
1 / sustained_us. Mean power divided by that rate is the energy of each, whatever fraction of a
launch the ticks cut off. The error comes from the times of the ticks. Each lies between two polls,
so it is known to half their distance: 1.5 ms at both ends of a window of 2 s is 0.15% at worst. A
constant delay of the counter cancels.

A second reading integrates the instantaneous power over the same window.

GPUs that share a problem replay the same chain for the same seconds. Each reads its own counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError
from leanbench.measure.energy_meter import (
    EnergyCalibration,
    EnergyMeter,
    Event,
    ReplayQueue,
    SustainedReading,
    record_event,
)
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml
    from leanbench.measure.ranks import Ranks

#: Limits of a window in seconds, and the minimum number of the counter's ticks in it.
MIN_WINDOW_S = 2.0
MAX_WINDOW_S = 3600.0
MIN_TICKS = 20
#: Extra load after the window of GPUs that share a problem: their counters tick at different times.
_REST_S = 0.5


def check_window(window_s: float, tick_ms: float | None = None) -> None:
    """Refuse a window that is too short for the counter.

    Args:
        tick_ms: Time between the counter's ticks, if known.

    Raises:
        UserError: Outside `MIN_WINDOW_S` to `MAX_WINDOW_S`, or shorter than `MIN_TICKS` ticks.
    """
    tick_ms = tick_ms or 0.0
    # A measured tick is not round, and a window extends to the next tick anyway.
    enough_ticks = (window_s * 1000 / tick_ms if tick_ms else math.inf) > MIN_TICKS - 0.5
    if MIN_WINDOW_S <= window_s <= MAX_WINDOW_S and enough_ticks:
        return
    least_s = max(MIN_WINDOW_S, math.ceil(MIN_TICKS * tick_ms / 100) / 10)
    if window_s > MAX_WINDOW_S:
        raise UserError(
            f"a window of {window_s:.12g} s is longer than the limit of {MAX_WINDOW_S:g} s: give it"
            f" {least_s:g} to {MAX_WINDOW_S:g} s"
        )
    ticks = (
        f"the energy counter moves every {tick_ms:.0f} ms"
        if tick_ms
        else "the energy counter moves in steps"
    )
    raise UserError(
        f"a window of {window_s:g} s measures no energy, {ticks}: give it {least_s:g} to"
        f" {MAX_WINDOW_S:g} s"
    )


def measure_window(
    replay: Callable[[], object],
    launches_per_replay: int,
    nvml: Nvml | None,
    calibration: EnergyCalibration | None,
    window_s: float,
    warm_up_s: float = 1.0,
    *,
    ranks: Ranks | None = None,
    record: Callable[[], Event] = record_event,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> SustainedReading:
    """Replay without a gap: `warm_up_s` for clocks and power to settle, then the window.

    Args:
        replay: Enqueues one replay of a CUDA graph on the current stream: some milliseconds of
            launches back to back over rotating buffers.
        launches_per_replay: Launches in one replay.
        nvml: None to measure only the latency.
        calibration: Calibration of this GPU; None to ignore the counter, so that energy comes from
            the instantaneous power.
        window_s: Length, checked by `check_window`. The window ends on the first tick after it.
        ranks: Ranks that replay the same chain. Each measures its own GPU.
        record: Records a timing event on the current stream.
        now: Host clock in seconds.
        sleep: Same as `time.sleep`.

    Raises:
        GpuLostError: The GPU no longer answers.
        UserError: The window does not hold two replays.
    """
    shared = None
    if ranks is not None:
        # The ranks are processes of one host, which share its clock.
        common_end_s = ranks.broadcast(now() + warm_up_s + window_s + _REST_S)
        replay = shared = EqualReplays(ranks, replay, common_end_s)
        ranks.barrier()
    queue = ReplayQueue(replay, record, now, sleep)
    queue.keep_busy(warm_up_s)
    meter = EnergyMeter(nvml, calibration, queue, now)
    start_s = meter.edge()
    (first, first_end), gaps = queue.next_end, queue.gaps
    meter.watch(start_s + window_s)
    end_s = meter.edge()
    last, last_end = queue.last_end
    gaps = queue.gaps - gaps
    if shared is not None:
        shared.finish(queue, now)
    queue.drain()
    if last <= first:
        raise UserError(
            f"a window of {window_s:g} s does not hold two replays of the CUDA graph: give it more"
        )
    sustained_us = first_end.elapsed_time(last_end) * 1000 / ((last - first) * launches_per_replay)
    reading = meter.reading(sustained_us, end_s - start_s)
    if gaps:
        reading.warnings.append(
            f"the GPU ran out of queued work {gaps} times in the sustained window, the host was too"
            " slow: sustained latency and energy hold the gaps"
        )
    return reading


class EqualReplays:
    """Replays of a chain, in the end equally many on each rank. One more on a single rank would
    wait for the others forever.

    Args:
        replay: Enqueues one replay.
        end_s: Common end on the clock that all ranks share.
    """

    def __init__(self, ranks: Ranks, replay: Callable[[], object], end_s: float) -> None:
        self._ranks, self._replay, self._end_s = ranks, replay, end_s
        self.count = 0

    def __call__(self) -> None:
        self._replay()
        self.count += 1

    def finish(self, queue: ReplayQueue, now: Callable[[], float]) -> None:
        """Replay until the common end, then up to the count of the rank with the most replays."""
        queue.keep_busy(self._end_s - now())
        for _ in range(max(self._ranks.all_gather(self.count)) - self.count):
            self()


def sustained_outcome(
    readings: Sequence[SustainedReading], floor: SustainedReading | None = None
) -> Outcome:
    """Combine the readings of all GPUs into the figures of a row, without their warnings.

    Times and clocks are those of the slowest GPU. Powers and energies are added, or None if one is
    missing.

    Args:
        floor: Reading of a kernel that only reads the same bytes.
    """
    sustained_us = max(reading.sustained_us for reading in readings)
    clocks = [reading.clock_mhz for reading in readings if reading.clock_mhz is not None]
    energy_mj = _total([reading.energy_mj for reading in readings])
    return Outcome(
        sustained_us=sustained_us,
        sustained_s=min(reading.window_s for reading in readings),
        sustained_clock_mhz=min(clocks, default=None),
        energy_mj=energy_mj,
        energy_above_idle_mj=_total([reading.energy_above_idle_mj for reading in readings]),
        energy_by_power_mj=_total([reading.energy_by_power_mj for reading in readings]),
        sustained_power_w=_total([reading.power_w for reading in readings]),
        idle_power_w=_total([reading.idle_power_w for reading in readings]),
        energy_delay_mj_us=None if energy_mj is None else energy_mj * sustained_us,
        energy_floor_mj=None if floor is None else floor.energy_mj,
    )


def _total(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if len(present) == len(values) else None
