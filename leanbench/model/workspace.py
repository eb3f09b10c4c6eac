"""Bytes that CTAs of a launch pass to one another."""

from __future__ import annotations

from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.decomposition import Schedule
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import CudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.workspace import partial_bytes
from leanbench.model.rates import partial_rows, split_bytes


def workspace_bytes(
    problem: AttentionProblem, config: KernelConfig | None, schedule: Schedule
) -> int | None:
    """Return the bytes of the partials that a launch writes; None for another kind of kernel.

    A host block keeps its own partial, unless a second launch merges.
    """
    if not isinstance(config, TileConfig):
        return None
    partials = sum(
        not part.is_whole and (schedule.merge_launch or not part.is_host)
        for part in schedule.segments
    )
    if isinstance(config, CudaConfig):
        return partials * CudaBuild.of(problem, config).partial_bytes
    if schedule.merge_launch:
        return partials * split_bytes(problem)
    return partials * partial_bytes(partial_rows(problem), problem.head_dim)
