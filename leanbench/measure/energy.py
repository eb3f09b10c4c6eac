"""Energy and sustained latency of a launch: seconds of graph replays without a gap, with NVML's
energy counter.

The counter moves in ticks (every 100 ms on an H200), so a window starts and ends on ticks that were
seen. The energy of one launch is

    energy_mj = (counter at the end - counter at the start) / (time between the two ticks) x
    sustained_us

where `sustained_us` is the GPU's time between the end of the first and of the last replay inside
the window, over the launches in between. While the GPU is never without work, launches come at the
rate 1 / sustained_us, and mean power over that rate is the energy of each, whatever fraction of a
launch the ticks cut off. What error there is comes from the times of the ticks: each lies somewhere
between two polls, so it is known to half their distance, and 1.5 ms at both ends of a window of 2 s
is 0.15% at worst. A delay of the counter that stays the same drops out.

A second reading comes from the instantaneous power, integrated over the same window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError
from leanbench.measure.energy_counter import EnergyCalibration
from leanbench.measure.energy_meter import EnergyMeter, SustainedReading
from leanbench.measure.replay_queue import Event, ReplayQueue, record_event
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml

#: Seconds of a window, and how many ticks of the counter it must hold.
MIN_WINDOW_S = 2.0
MAX_WINDOW_S = 3600.0
MIN_TICKS = 20


def check_window(window_s: float, tick_ms: float | None = None) -> None:
    """Refuses a window that is too short for the counter.

    Args:
        tick_ms: the counter's, where it is known.

    Raises:
        UserError: outside `MIN_WINDOW_S` to `MAX_WINDOW_S`, or shorter than `MIN_TICKS` ticks.
    """
    tick_ms = tick_ms or 0.0
    # A measured tick is not round, and a window runs on to its next tick anyway.
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


def measure_sustained(
    replay: Callable[[], object],
    launches_per_replay: int,
    nvml: Nvml | None,
    calibration: EnergyCalibration | None,
    window_s: float,
    warm_up_s: float = 1.0,
    *,
    before_drain: Callable[[ReplayQueue], None] = lambda queue: None,
    record: Callable[[], Event] = record_event,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> SustainedReading:
    """Replays without a gap: `warm_up_s` in which clocks and power settle, then the window.

    Args:
        replay: enqueues one replay of a CUDA graph on the current stream: some milliseconds of
            launches back to back over rotating buffers.
        launches_per_replay: launches in one replay.
        nvml: None: only the latency is measured.
        calibration: of this GPU; None: the counter is left alone, energy comes from the
            instantaneous power.
        window_s: has passed `check_window`; the window ends on the first tick after that.
        before_drain: called after the window, while replays are still queued.
        record: records a timing event on the current stream.
        now: the host's clock, in seconds.
        sleep: as `time.sleep`.

    Raises:
        GpuLostError: the GPU no longer answers.
        UserError: the window does not hold two replays.
    """
    queue = ReplayQueue(replay, record, now, sleep)
    queue.keep_busy(warm_up_s)
    meter = EnergyMeter(nvml, calibration, queue, now)
    start_s = meter.edge()
    (first, first_end), gaps = queue.next_end, queue.gaps
    meter.watch(start_s + window_s)
    end_s = meter.edge()
    last, last_end = queue.last_end
    gaps = queue.gaps - gaps
    before_drain(queue)
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


def sustained_outcome(
    reading: SustainedReading, calibration: EnergyCalibration | None, floor: SustainedReading | None
) -> Outcome:
    """A reading as the figures of a row, its warnings left out.

    Args:
        floor: the reading of a kernel that only reads the same bytes.
    """
    energy_mj = reading.energy_mj
    return Outcome(
        sustained_us=reading.sustained_us,
        sustained_s=reading.window_s,
        sustained_clock_mhz=reading.clock_mhz,
        energy_mj=energy_mj,
        energy_above_idle_mj=reading.energy_above_idle_mj,
        energy_by_power_mj=reading.energy_by_power_mj,
        sustained_power_w=reading.power_w,
        idle_power_w=None if calibration is None else calibration.idle_power_w,
        energy_delay_mj_us=None if energy_mj is None else energy_mj * reading.sustained_us,
        energy_floor_mj=None if floor is None else floor.energy_mj,
    )
