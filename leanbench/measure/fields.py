"""Fields of a row, from a timing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leanbench.measure.timing import Timing
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.nvml import GpuState


def timing_outcome(timing: Timing, kv_bytes: int, floor_us: float | None = None) -> Outcome:
    """A timing as the figures of a row, with the read floor's where there is one."""
    low, high = timing.interval_us
    p25, p75 = timing.quartiles_us
    figures = Outcome(
        latency_us=timing.median_us,
        latency_p25_us=p25,
        latency_p75_us=p75,
        latency_ci_low_us=low,
        latency_ci_high_us=high,
        samples=len(timing.samples_us),
        launches_per_sample=timing.launches_per_sample,
        throttled_samples=timing.throttled_samples,
        bandwidth_tb_s=kv_bytes / timing.median_us / 1e6,
    )
    if floor_us is not None:
        figures |= Outcome(read_floor_us=floor_us, read_floor_share=floor_us / timing.median_us)
    return figures | _state([state for state in timing.states if state is not None])


def sample_fields(timing: Timing, crosscheck_us: Sequence[float]) -> dict[str, Any]:
    """A timing's raw samples, the fields of leanbench.records.samples.Samples but the
    cell's name.
    """
    return {
        "samples_us": [round(sample, 4) for sample in timing.samples_us],
        "rounds": timing.rounds,
        "sm_clock_mhz": [None if state is None else state.sm_clock_mhz for state in timing.states],
        "crosscheck_us": [round(sample, 4) for sample in crosscheck_us],
    }


def _state(states: list[GpuState]) -> Outcome:
    if not states:
        return Outcome()
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    temperatures = [state.temperature_c for state in states if state.temperature_c is not None]
    powers = [state.power_w for state in states if state.power_w is not None]
    known = [state.throttle_reasons for state in states if state.throttle_reasons is not None]
    reasons = sorted({reason for reasons in known for reason in reasons}) if known else None
    return Outcome(
        sm_clock_mhz=int(statistics.median(clocks)) if clocks else None,
        temperature_c=max(temperatures, default=None),
        power_w=statistics.median(powers) if powers else None,
        throttle_reasons=reasons,
    )
