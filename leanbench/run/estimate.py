"""What a sweep would take, before it starts: for `--dry-run`."""

from __future__ import annotations

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import kernel
from leanbench.run.cells import Cell

#: Seconds of one measured cell beside its candidates: inputs, check, read floor, samples.
MEASURED_CELL_S = 2.0
#: Seconds to compile one candidate and rank it.
MEASURED_CANDIDATE_S = 0.2
#: Seconds to predict one config.
PREDICTED_CONFIG_S = 0.01
#: Share of a GPU's memory that one process can get.
USABLE_MEMORY = 0.95


def estimated_seconds(cell: Cell, gpu: GpuSpec, predicted: bool) -> float:
    """A rough figure: constants, and the traffic of a cell whose caches are large."""
    candidates = len(kernel(cell.kernel).candidate_configs(cell.problem, gpu)) if cell.configs == "best" else 0
    if predicted:
        return max(1, candidates) * PREDICTED_CONFIG_S
    # Inputs are written, read by the reference and rewritten: some hundred passes over the caches.
    traffic = 100 * cell.problem.kv_allocated_bytes / (gpu.bandwidth_tb_s * 1e12)
    return MEASURED_CELL_S + candidates * MEASURED_CANDIDATE_S + traffic


def fits(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """Whether the caches and the tensors beside them find room in an otherwise empty GPU."""
    beside = problem.io_bytes - problem.kv_bytes
    return problem.kv_allocated_bytes + beside <= USABLE_MEMORY * gpu.memory_gb * 1e9
