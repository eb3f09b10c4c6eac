"""LeanAttention: stream-K decode attention (Sanovar et al., 2024, arXiv 2405.10480)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.fa2 import one_query_token
from leanbench.kernels.launch import PARTIAL_ROW_EXTRA

from leanbench.decomposition import Schedule, TileGrid, stream_k, tile_rows
from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs

#: The workspace's size whatever the problem: the grid is capped so that its partials fit.
WORKSPACE_BYTES = 16 * 1000 * 1000

#: (tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles_per_cta) that `--configs best` tries.
_CANDIDATES = (
    (64, 4, 3, 2, 1),
    (64, 4, 4, 2, 2),
    (64, 4, 3, 3, 1),
    (128, 4, 2, 3, 1),
    (128, 4, 3, 2, 1),
    (128, 4, 3, 2, 2),
    (128, 4, 4, 1, 1),
    (128, 4, 4, 1, 2),
    (128, 8, 4, 1, 1),
    (256, 8, 2, 1, 1),
    (256, 8, 3, 1, 1),
    (256, 8, 2, 2, 1),
)


class Lean(Kernel):
    name = "lean"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (Triton)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's Triton kernel"

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        return one_query_token(self.name, problem)

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        tile_tokens = 128 if problem.head_dim <= 128 else 64
        stages = stages_that_fit(problem, tile_tokens, 3, gpu, per_sm=2)
        return KernelConfig(tile_tokens, num_warps=4, num_stages=stages, ctas_per_sm=2, min_tiles_per_cta=1)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        fitting = [
            KernelConfig(tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles_per_cta)
            for tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles_per_cta in _CANDIDATES
            if stages_that_fit(problem, tile_tokens, num_stages, gpu, per_sm=ctas_per_sm) == num_stages
        ]
        return list(dict.fromkeys([self.default_config(problem, gpu), *fitting]))

    def schedule(self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec) -> Schedule:
        assert config is not None
        assert config.ctas_per_sm is not None
        row_count = min(problem.group_size, tile_rows(problem.group_size, problem.head_dim))
        max_grid = lean_grid_limit(row_count, problem.head_dim, config.ctas_per_sm * gpu.sms)
        aligned = bool(config.align_grid) and not problem.is_ragged
        return stream_k(TileGrid.of(problem, config.tile_tokens), max_grid, config.min_tiles_per_cta or 1, aligned)

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], None]:
        from leanbench.kernels.lean.triton import prepare

        assert config is not None
        return prepare(inputs, config)


def lean_grid_limit(row_count: int, head_dim: int, wanted: int) -> int:
    """The largest grid up to `wanted` whose partials, two per CTA, fit the workspace."""
    partial_bytes = 4 * row_count * (head_dim + PARTIAL_ROW_EXTRA)
    return min(wanted, WORKSPACE_BYTES // (2 * partial_bytes))


KERNELS = (Lean(),)
