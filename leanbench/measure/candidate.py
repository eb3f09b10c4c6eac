"""Kernel under measurement, and the row fields of its check and timing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.measure.timing import Launches, Replay, Timing
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.check.reference import CheckResult
    from leanbench.gpu.nvml import GpuState


@dataclass(kw_only=True, eq=False)
class Candidate:
    """Kernel with its settings and launches on a loaded subject."""

    kernel: Kernel
    #: One launch per buffer, in the order of rotation.
    launches: Launches
    config: KernelConfig | None = None
    #: Row fields so far.
    outcome: Outcome
    #: Sentences for the row.
    warnings: list[str] = field(default_factory=list)
    #: Graph of the launches, once captured.
    replay: Replay = field(init=False, repr=False)
    #: Samples of the rounds. If GPUs share the problem, only rank 0 has them.
    timing: Timing = field(init=False, repr=False)

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def is_incorrect(self) -> bool:
        """True after a failed check. Nothing more is measured then."""
        return self.outcome.status == "incorrect"


def check_outcome(check: CheckResult, failure: str | None) -> Outcome:
    """Return the errors of a check. The status is `incorrect` if there is a failure."""
    errors = Outcome(
        relative_error=check.relative_error,
        lse_error=check.lse_error,
        checked_heads=check.checked_heads,
        total_heads=check.total_heads,
    )
    return errors | Outcome(status="incorrect", reason=failure) if failure else errors


def timing_outcome(timing: Timing, kv_bytes: int, floor_us: float | None = None) -> Outcome:
    """Return the figures of a timing, compared with the read floor if there is one."""
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
    return figures | _gpu_state([state for state in timing.states if state is not None])


def sample_fields(timing: Timing, crosscheck_us: Sequence[float] = ()) -> dict[str, Any]:
    """Return the fields of leanbench.records.samples.Samples, without the cell."""
    return {
        "samples_us": [round(sample, 4) for sample in timing.samples_us],
        "rounds": timing.rounds,
        "sm_clock_mhz": [None if state is None else state.sm_clock_mhz for state in timing.states],
        "crosscheck_us": [round(sample, 4) for sample in crosscheck_us],
    }


def _gpu_state(states: list[GpuState]) -> Outcome:
    """Summarize the states of the GPU after each sample."""
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
