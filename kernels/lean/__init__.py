"""LeanAttention: stream-K decode attention (Sanovar et al., 2024, arXiv 2405.10480)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.fa2 import one_query_token
from leanbench.kernels.launch import (
    PARTIAL_ROW_EXTRA,
    LaunchShape,
    TritonKernel,
    TritonLaunch,
    merge_rows_at_once,
    padded,
)

from leanbench.decomposition import Schedule, TileGrid, stream_k, stream_k_grid, tile_rows
from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig

if TYPE_CHECKING:
    from leanbench.inputs import AttentionInputs

#: The workspace's size whatever the problem: the grid is capped so that its partials fit.
WORKSPACE_BYTES = 16 * 1000 * 1000

#: What `--configs best` tries, as (tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles_per_cta, align_grid):
#: on an H200, those that were among the fastest of 128 for some of 24 problems.
_CANDIDATES = (
    (64, 4, 3, 2, 1, True),
    (64, 4, 3, 3, 1, False),
    (64, 4, 3, 3, 1, True),
    (64, 4, 4, 1, 1, True),
    (64, 4, 4, 1, 1, False),
    (64, 4, 3, 1, 4, False),
    (128, 4, 3, 2, 1, True),
    (128, 4, 3, 2, 1, False),
    (128, 4, 3, 3, 1, False),
    (128, 4, 4, 2, 1, False),
    (128, 4, 3, 1, 1, True),
    (128, 4, 3, 1, 4, False),
    (128, 8, 3, 1, 1, True),
    (256, 8, 3, 1, 1, False),
    (256, 8, 2, 1, 4, False),
)
#: What `leanbench tune` considers: all combinations whose stages fit. Eight warps want a LeanTile that feeds them.
_TUNED_TILES = ((64, (4,)), (128, (4, 8)), (256, (4, 8)))
_TUNED_STAGES = (2, 3, 4, 5, 6)
_TUNED_CTAS_PER_SM = {4: (1, 2, 3, 4), 8: (1, 2)}
_TUNED_MIN_TILES = (1, 2, 4, 8)
#: Rounding the grid down to a multiple of the output tiles idles a share of the CTAs and saves the crossing of borders,
#: about a microsecond. It pays while that share of the KV cache is below this (H200: between 32k and 64k at 56 heads).
_ALIGN_BYTES = 80e6

#: Partials that a merge loads at once, by whether a thread holds one number of each; kernels/lean/mailbox.py.
PARTIALS_AT_ONCE = {True: 8, False: 16}

#: 16 KB of stamps a CTA; more marks would need some 400k output tiles.
_MAX_MARKS = 1024


class Lean(TritonKernel):
    name = "lean"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (Triton)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's Triton kernel"
    tuned_as = "lean"

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        return one_query_token(self.name, problem)

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # Chosen among the candidates on an H200, see docs/performance-log.md.
        min_tiles = 1
        if problem.group_size >= 16:
            # One CTA merges all rows of all parts: past some 32 parts that takes longer than reading the context.
            tile_tokens, warps, stages, per_sm = (128, 8, 3, 1) if problem.head_dim <= 128 else (64, 4, 2, 1)
            min_tiles = max(1, max(TileGrid.of(problem, tile_tokens).lean_tiles) // 32)
        elif problem.head_dim <= 64:
            tile_tokens, warps, stages, per_sm = 128, 4, 3, 2 if problem.kv_bytes < 600e6 else 3
            if problem.group_size > 1:
                per_sm = 1
            elif TileGrid.of(problem, tile_tokens).total < 4 * gpu.sms:
                tile_tokens = 64
        else:
            full = problem.batch * problem.kv_heads >= gpu.sms
            tile_tokens, warps, stages, per_sm = (64, 4, 3, 2) if full else (64, 4, 4, 1)
        stages = stages_that_fit(problem, tile_tokens, stages, gpu, per_sm)
        tiles = TileGrid.of(problem, tile_tokens)
        grid = stream_k_grid(tiles.total, per_sm * gpu.sms, min_tiles)
        idle = 1 - stream_k_grid(tiles.total, per_sm * gpu.sms, min_tiles, tiles.output_tiles) / grid
        align_grid = idle * problem.kv_bytes < _ALIGN_BYTES
        return KernelConfig(tile_tokens, warps, stages, per_sm, min_tiles, align_grid=align_grid)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        candidates = [KernelConfig(*values[:5], align_grid=values[5]) for values in _CANDIDATES]
        fitting = [
            config
            for config in candidates
            if stages_that_fit(problem, config.tile_tokens, config.num_stages, gpu, config.ctas_per_sm or 1)
            == config.num_stages
        ]
        return list(dict.fromkeys([self.default_config(problem, gpu), *fitting]))

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        found: list[KernelConfig] = []
        for tile_tokens, all_warps in _TUNED_TILES:
            for num_warps, num_stages in product(all_warps, _TUNED_STAGES):
                for ctas_per_sm in _TUNED_CTAS_PER_SM[num_warps]:
                    if stages_that_fit(problem, tile_tokens, num_stages, gpu, ctas_per_sm) < num_stages:
                        continue
                    for min_tiles, align_grid in product(_TUNED_MIN_TILES, (True, False)):
                        config = KernelConfig(tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles, align_grid)
                        found.append(config)
        return found

    def grid_limit(self, rows: int, head_dim: int, wanted: int) -> int:
        return lean_grid_limit(rows, head_dim, wanted)

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int:
        at_once = merge_rows_at_once(rows, head_dim, num_warps)
        each = PARTIALS_AT_ONCE[one_number_each(rows, head_dim, num_warps)]
        return -(-rows // at_once) * -(-partials // each)

    def schedule(self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec) -> Schedule:
        assert config is not None
        assert config.ctas_per_sm is not None
        row_count = min(problem.group_size, tile_rows(problem.group_size, problem.head_dim))
        max_grid = lean_grid_limit(row_count, problem.head_dim, config.ctas_per_sm * gpu.sms)
        aligned = bool(config.align_grid) and not problem.is_ragged
        return stream_k(TileGrid.of(problem, config.tile_tokens), max_grid, config.min_tiles_per_cta or 1, aligned)

    def launches(self, inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.lean.triton import launches

        return launches(inputs, config)

    def most_marks(self, inputs: AttentionInputs, config: KernelConfig, launches: Sequence[TritonLaunch]) -> int:
        """From the lengths as they are now. A power of two: every number of marks is another build of the kernel."""
        shape = LaunchShape.of(inputs)
        tokens = [inputs.context] * shape.batch if inputs.cache_seqlens is None else inputs.cache_seqlens.tolist()
        lean_tiles = tuple(max(1, -(-count // config.tile_tokens)) for count in tokens)
        tiles = TileGrid(lean_tiles, shape.kv_heads * shape.row_tiles)
        segments = _most_segments(tiles, launches[0].grid, config.min_tiles_per_cta or 1)
        # The beginning; each part; a wait and a reduction for the last one.
        return min(_MAX_MARKS, padded(max(8, 1 + segments + 2)))


@lru_cache(maxsize=8)
def _most_segments(tiles: TileGrid, grid: int, min_tiles_per_cta: int) -> int:
    """Output tiles that one CTA has a part of."""
    segments = stream_k(tiles, grid, min_tiles_per_cta).segments
    return max(Counter(segment.cta for segment in segments).values())


def one_number_each(row_count: int, head_dim: int, num_warps: int) -> bool:
    """Whether a thread of the merge holds one number of the rows that are merged at once."""
    return merge_rows_at_once(row_count, head_dim, num_warps) * padded(head_dim) <= 32 * num_warps


def lean_grid_limit(row_count: int, head_dim: int, wanted: int) -> int:
    """The largest grid up to `wanted` whose partials, two per CTA, fit the workspace."""
    partial_bytes = 4 * row_count * (head_dim + PARTIAL_ROW_EXTRA)
    return min(wanted, WORKSPACE_BYTES // (2 * partial_bytes))


KERNELS = (Lean(),)
