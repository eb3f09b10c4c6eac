"""What a cell measures only when asked: energy, occupancy, hardware counters. Row fields each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.gpu.spec import GpuSpec
from leanbench.inputs import AttentionInputs
from leanbench.measure.options import CacheState
from leanbench.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.gpu.nvml import Nvml
    from leanbench.measure.cell import Candidate
    from leanbench.measure.energy import EnergyCalibration, SustainedReading


def calibrate(nvml: Nvml | None) -> EnergyCalibration | None:
    """The energy counter's tick and the idle power, before anything runs; takes two seconds."""
    if nvml is None:
        return None
    from leanbench.measure import energy

    return energy.calibrate(nvml)


def energy_fields(
    reading: SustainedReading, calibration: EnergyCalibration | None, floor: SustainedReading | None
) -> dict[str, Any]:
    from leanbench.measure.energy import row_fields

    return row_fields(reading, calibration, floor)


def occupancy_fields(
    candidate: Candidate, problem: AttentionProblem, buffers: list[AttentionInputs], spec: GpuSpec
) -> dict[str, Any]:
    """Theoretical warp occupancy and SM busy share; a kernel that does not tell leaves them out."""
    from leanbench.gpu.occupancy import theoretical_occupancy
    from leanbench.measure.timeline import record_timeline

    found: dict[str, Any] = {}
    resources = candidate.kernel.resources(buffers[0], candidate.config)
    if resources:
        # The first launch reads K and V.
        longest = resources[0]
        found |= {
            "theoretical_warp_occupancy": theoretical_occupancy(longest, spec).share,
            "registers_per_thread": longest.registers_per_thread,
            "shared_kb_per_cta": longest.shared_bytes / 1024,
            "spilled_registers": longest.spilled_registers,
        }
    latency_us = candidate.row["latency_us"]
    timeline = record_timeline(problem, candidate.kernel, candidate.config, buffers, spec, latency_us)
    if timeline is not None:
        found["sm_busy_share"] = timeline.sm_busy_share
        if timeline.traced_latency_us is not None:
            found["instrumentation_cost"] = timeline.traced_latency_us / latency_us
    return found


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
