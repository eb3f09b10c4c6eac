"""Figures and status of a timed candidate, and warnings about suspicious figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.core.gpu_spec import GpuSpec
from leanbench.measure.buffers import cold_bytes
from leanbench.measure.candidate import Candidate, sample_fields, timing_outcome
from leanbench.measure.crosscheck import contradiction, cross_check, disagreement
from leanbench.measure.protocol import FLOOR, Subject
from leanbench.measure.timing import Effort, Timing
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.gpu.nvml import GpuProcess

#: Allowed distance of a latency below the read floor. Both are noisy, and the floor is the best of
#: a few kernels.
FLOOR_MARGIN = 0.03
#: Reads of at least this many bytes should reach this share of the datasheet's bandwidth.
_LARGE_READ_BYTES = 500e6
_HEALTHY_SHARE = 0.75
#: Throttle reasons of a GPU in trouble. The power limit is not one: many GPUs always run at it.
SLOWDOWNS = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}


def latency_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Return the latency, its cross-check, and the samples of both in `raw_samples`."""
    timing, floor_us = candidate.timing, subject.timings[FLOOR].median_us
    fields = timing_outcome(timing, subject.problem.kv_bytes, floor_us)
    checked = cross_check(candidate.launches, timing.median_us)
    if isinstance(checked, str):
        candidate.warnings.append(checked)
        return fields | Outcome(raw_samples=sample_fields(timing))
    differs = disagreement(checked.median_us, timing.samples_us)
    candidate.warnings += [differs] if differs else []
    return fields | Outcome(
        crosscheck_us=checked.median_us,
        crosscheck_clock_mhz=checked.clock_mhz,
        gpu_kernels=list(checked.kernels) or None,
        raw_samples=sample_fields(timing, checked.samples_us),
    )


def judge(subject: Subject, candidate: Candidate) -> Outcome:
    """Add warnings. Return the status with its reason, unless a check has failed."""
    spec, options = subject.instruments.spec, subject.instruments.options
    kv_bytes, timing = subject.problem.kv_bytes, candidate.timing
    floor_us, cache = subject.timings[FLOOR].median_us, options.cache
    warnings = (
        throttle_warning(timing),
        floor_warning(floor_us, kv_bytes, spec, cache),
        warm_warning(kv_bytes, spec, cache),
        rotation_warning(len(candidate.launches), kv_bytes, spec, cache),
    )
    candidate.warnings += [warning for warning in warnings if warning]
    if candidate.is_incorrect:
        return Outcome()
    alarm = impossible(timing.median_us, floor_us, kv_bytes, spec, cache)
    by_clock_us = candidate.outcome.crosscheck_us
    if alarm is None and by_clock_us is not None:
        alarm = contradiction(by_clock_us, timing.samples_us)
    return verdict(alarm, disturbance(subject.other_processes) or noise(timing, options.effort))


def verdict(alarm: str | None, noisy: str | None) -> Outcome:
    """Return `suspect`, `noisy` or `ok`, and the reason. An alarm comes before noise."""
    return Outcome(status="suspect" if alarm else "noisy" if noisy else "ok", reason=alarm or noisy)


def noise(timing: Timing, effort: Effort) -> str | None:
    """Return a sentence if the median is not precise, or the GPU slowed down to protect itself."""
    trouble = {
        reason for state in timing.states if state for reason in state.throttle_reasons or ()
    } & SLOWDOWNS
    if trouble:
        return (
            f"the GPU lowered its clocks ({', '.join(sorted(trouble))}) and"
            f" {timing.throttled_samples} repeats did not outlast it: cool it or take load off it,"
            " then measure again"
        )
    if timing.is_precise(effort):
        return None
    return (
        f"the confidence interval of the median reaches {timing.relative_ci:.1%} to one side after "
        f"{len(timing.samples_us)} samples, above {effort.relative_ci:.1%}"
    )


def disturbance(processes: Sequence[GpuProcess] | None) -> str | None:
    """Return a sentence if other programs used the GPU meanwhile."""
    busy = [process for process in processes or () if process.sm_utilisation]
    if not busy:
        return None
    names = ", ".join(f"{process.name or 'a program'} (pid {process.pid})" for process in busy[:3])
    return f"other programs used the GPU meanwhile: {names}; stop them and measure again"


def impossible(
    latency_us: float, floor_us: float, kv_bytes: int, spec: GpuSpec, cache: str
) -> str | None:
    """Return why K and V cannot have been read from memory in one of these times, or None."""
    if latency_us < floor_us * (1 - FLOOR_MARGIN):
        return (
            f"{latency_us:.2f} µs beats a kernel that only reads the same bytes ({floor_us:.2f}"
            " µs): K and V came from a cache, or were not all read"
        )
    if not knows_bandwidth(spec) or cache == "warm" or kv_bytes <= 2 * spec.l2_bytes:
        return None
    for of, time_us in (("", latency_us), (" of the read floor", floor_us)):
        tb_s = kv_bytes / time_us / 1e6
        if tb_s > spec.bandwidth_tb_s:
            return (
                f"{tb_s:.2f} TB/s{of} is above the {spec.bandwidth_tb_s:g} TB/s that the memory of"
                " this GPU can deliver: K and V came from a cache, or were not all read"
            )
    return None


def throttle_warning(timing: Timing) -> str | None:
    """Return a sentence if samples were taken at lowered clocks."""
    reasons = {
        reason for state in timing.states if state for reason in state.throttle_reasons or ()
    }
    if not reasons:
        return None
    return (
        f"clocks were lowered ({', '.join(sorted(reasons))}) in samples that count, after"
        f" {timing.throttled_samples} were thrown away"
    )


def floor_warning(floor_us: float, kv_bytes: int, spec: GpuSpec, cache: str) -> str | None:
    """A sentence if even the read floor is far below what this GPU's memory should deliver."""
    tb_s = kv_bytes / floor_us / 1e6
    if (
        not knows_bandwidth(spec)
        or cache == "warm"
        or kv_bytes < _LARGE_READ_BYTES
        or tb_s >= _HEALTHY_SHARE * spec.bandwidth_tb_s
    ):
        return None
    return (
        f"a kernel that only reads gets {tb_s:.2f} of {spec.bandwidth_tb_s:g} TB/s: another program"
        " uses the GPU, or its memory is slowed down; run `leanbench doctor`"
    )


def warm_warning(kv_bytes: int, spec: GpuSpec, cache: str) -> str | None:
    # Seen on an H200: 59 MB in its 63 MB are no faster than from memory.
    if cache == "cold" or kv_bytes <= spec.l2_bytes / 2:
        return None
    half = f"more than half of the {spec.l2_bytes / 1e6:.0f} MB of L2"
    return f"K and V ({kv_bytes / 1e6:.0f} MB) are {half}: they do not all stay in it"


def rotation_warning(copies: int, kv_bytes: int, spec: GpuSpec, cache: str) -> str | None:
    """Return a sentence if memory is too small for enough copies to keep the L2 cold."""
    if cache == "warm" or copies * kv_bytes >= cold_bytes(spec):
        return None
    return (
        f"memory has room for {copies} copies of K and V only ({copies * kv_bytes / 1e6:.0f} MB):"
        " part of them stays in the L2"
    )


def knows_bandwidth(spec: GpuSpec) -> bool:
    """Return False for a GPU of no list whose driver does not tell: its bandwidth is a stand-in."""
    return "assumed" not in spec.source
