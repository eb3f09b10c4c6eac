"""From measurements to the fields of a row, and what in them deserves a warning or an alarm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core.gpu_spec import GpuSpec
from leanbench.measure.timing import Effort, Timing

if TYPE_CHECKING:
    from leanbench.gpu.nvml import GpuState
    from leanbench.gpu.processes import GpuProcess

#: A latency may lie this far below the read floor before it is called impossible: both carry noise,
#: and the floor is the best of a few kernels.
FLOOR_MARGIN = 0.03
#: Reads of at least this many bytes should come near the datasheet's bandwidth; below this share
#: something is wrong.
_LARGE_READ_BYTES = 500e6
_HEALTHY_SHARE = 0.75
#: Reasons that say the GPU is in trouble. The power limit is not among them: many GPUs always run
#: against it.
TROUBLE = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}


def timing_fields(timing: Timing, kv_bytes: int, floor_us: float) -> dict[str, Any]:
    """A timing as row fields."""
    low, high = timing.interval_us
    p25, p75 = timing.quartiles_us
    return {
        "latency_us": timing.median_us,
        "latency_p25_us": p25,
        "latency_p75_us": p75,
        "latency_ci_low_us": low,
        "latency_ci_high_us": high,
        "samples": len(timing.samples_us),
        "launches_per_sample": timing.launches_per_sample,
        "throttled_samples": timing.throttled_samples,
        "bandwidth_tb_s": kv_bytes / timing.median_us / 1e6,
        "read_floor_us": floor_us,
        "read_floor_share": floor_us / timing.median_us,
        **_state_fields([state for state in timing.states if state is not None]),
    }


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


def _state_fields(states: list[GpuState]) -> dict[str, Any]:
    if not states:
        return {}
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    temperatures = [state.temperature_c for state in states if state.temperature_c is not None]
    powers = [state.power_w for state in states if state.power_w is not None]
    known = [state.throttle_reasons for state in states if state.throttle_reasons is not None]
    return {
        "sm_clock_mhz": int(statistics.median(clocks)) if clocks else None,
        "temperature_c": max(temperatures, default=None),
        "power_w": statistics.median(powers) if powers else None,
        "throttle_reasons": (
            sorted({reason for reasons in known for reason in reasons}) if known else None
        ),
    }


def noise(timing: Timing, effort: Effort) -> str | None:
    """One sentence if the stopping rule was not met, or the GPU slowed down to protect itself; or
    None.
    """
    trouble = {
        reason for state in timing.states if state for reason in state.throttle_reasons or ()
    } & TROUBLE
    if trouble:
        return (
            f"the GPU lowered its clocks ({', '.join(sorted(trouble))}) and"
            f" {timing.throttled_samples} repeats did not outlast it: cool it or take load off it,"
            " then measure again"
        )
    if timing.meets(effort):
        return None
    return (
        f"the confidence interval of the median reaches {timing.relative_ci:.1%} to one side after "
        f"{len(timing.samples_us)} samples, above {effort.relative_ci:.1%}"
    )


def disturbance(processes: Sequence[GpuProcess] | None) -> str | None:
    """One sentence if other programs used the GPU meanwhile, or None."""
    busy = [process for process in processes or () if process.sm_utilisation]
    if not busy:
        return None
    names = ", ".join(f"{process.name or 'a program'} (pid {process.pid})" for process in busy[:3])
    return f"other programs used the GPU meanwhile: {names}; stop them and measure again"


def impossible(
    latency_us: float, floor_us: float, kv_bytes: int, spec: GpuSpec, cache: str
) -> str | None:
    """One sentence if no kernel that reads K and V from memory can be so fast, or None."""
    if latency_us < floor_us * (1 - FLOOR_MARGIN):
        return (
            f"{latency_us:.2f} µs beats a kernel that only reads the same bytes ({floor_us:.2f}"
            " µs): K and V came from a cache, or were not all read"
        )
    tb_s = kv_bytes / latency_us / 1e6
    if (
        _knows_bandwidth(spec)
        and cache == "cold"
        and kv_bytes > 2 * spec.l2_mb * 2**20
        and tb_s > spec.bandwidth_tb_s
    ):
        return (
            f"{tb_s:.2f} TB/s is above the {spec.bandwidth_tb_s:g} TB/s that the memory of this GPU"
            " can deliver"
        )
    return None


def throttle_warning(timing: Timing) -> str | None:
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
        not _knows_bandwidth(spec)
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
    if cache == "cold" or kv_bytes <= spec.l2_mb * 2**20 / 2:
        return None
    half = f"more than half of the {spec.l2_mb:g} MB of L2"
    return f"K and V ({kv_bytes / 1e6:.0f} MB) are {half}: they do not all stay in it"


def rotation_warning(copies: int, kv_bytes: int, spec: GpuSpec, cache: str) -> str | None:
    """A sentence if memory has no room for enough copies to keep the L2 cold."""
    if cache == "warm" or copies * kv_bytes >= 3 * spec.l2_mb * 2**20:
        return None
    return (
        f"memory has room for {copies} copies of K and V only ({copies * kv_bytes / 1e6:.0f} MB):"
        " part of them stays in the L2"
    )


def _knows_bandwidth(spec: GpuSpec) -> bool:
    """Not where the GPU is in no list and its driver does not tell: then a stand-in is in its
    place.
    """
    return "assumed" not in spec.source
