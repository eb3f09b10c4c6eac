"""What a cell measures beside latency: planning where there is some; when asked, energy, occupancy,
hardware counters. Row fields each.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.measure.options import CacheState

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml
    from leanbench.measure.candidate import Candidate
    from leanbench.measure.energy import EnergyCalibration


#: Repeats of a plan: those that count, and those before.
_PLANS, _FIRST_PLANS = 20, 3


def calibrate(nvml: Nvml | None) -> EnergyCalibration | None:
    """The energy counter's tick and the idle power, before anything runs; takes two seconds."""
    if nvml is None:
        return None
    from leanbench.measure import energy

    return energy.calibrate(nvml)


def plan_fields(candidate: Candidate, inputs: AttentionInputs) -> dict[str, Any]:
    """Wall time of what must run once for a step's lengths, until the GPU has done its part; empty
    without any.
    """
    import torch

    plan = candidate.kernel.planner(inputs)
    if plan is None:
        return {}
    seconds: list[float] = []
    for _ in range(_FIRST_PLANS + _PLANS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"plan_us": 1e6 * statistics.median(seconds[_FIRST_PLANS:])}


def resource_fields(
    candidate: Candidate, buffers: list[AttentionInputs], spec: GpuSpec
) -> dict[str, Any]:
    """Theoretical warp occupancy and what it comes from; a kernel that does not tell leaves them
    out.
    """
    from leanbench.gpu.occupancy import theoretical_occupancy

    resources = candidate.kernel.resources(buffers[0], candidate.config)
    if not resources:
        return {}
    # The first launch reads K and V.
    reader = resources[0]
    return {
        "theoretical_warp_occupancy": theoretical_occupancy(reader, spec).share,
        "registers_per_thread": reader.registers_per_thread,
        "shared_kb_per_cta": reader.shared_bytes / 1024,
        "spilled_registers": reader.spilled_registers,
    }


def busy_fields(
    candidate: Candidate, problem: AttentionProblem, buffers: list[AttentionInputs], spec: GpuSpec
) -> dict[str, Any]:
    """SM busy share, and what measuring it cost; a kernel without an instrumented build leaves them
    out.
    """
    from leanbench.measure.timeline import record_timeline

    latency_us = candidate.row["latency_us"]
    timeline = record_timeline(
        problem, candidate.kernel, candidate.config, buffers, spec, latency_us
    )
    if timeline is None:
        return {}
    cost = None if timeline.traced_latency_us is None else timeline.traced_latency_us / latency_us
    return {"sm_busy_share": timeline.sm_busy_share, "instrumentation_cost": cost}


def counter_fields(
    candidate: Candidate, problem: AttentionProblem, device_index: int, cache: CacheState
) -> dict[str, Any]:
    """Nsight Compute's counters; where it gives none, the candidate gets a warning."""
    from leanbench.measure.counters import count

    counted = count(problem, candidate.kernel.name, candidate.config, device_index, cache)
    if isinstance(counted, str):
        candidate.warnings.append(counted)
        return {}
    return counted.row_fields()
