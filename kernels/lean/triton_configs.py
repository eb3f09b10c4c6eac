"""Settings of LeanAttention's Triton implementation: the heuristic, and the candidates."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.decomposition import TileGrid, stream_k_grid
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: Candidates as (tile_tokens, num_warps, num_stages, ctas_per_sm,
#: min_tiles_per_cta, align_grid): on an H200, each was among the fastest of 128 for some of 24
#: problems.
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
#: Maximum idle share of the KV cache, in bytes, for an aligned grid. Rounding the grid down to a
#: multiple of the output tiles idles CTAs but saves crossings of tile boundaries, about a
#: microsecond on an H200.
_MAX_IDLE_BYTES = 80e6

#: Limit of the minimum LeanTiles per CTA in a cache with sequences of any length. A share of its
#: capacity would leave a short sequence to a single CTA.
_ANY_LENGTH_MIN_TILES = 4

#: Tokens per CTA if a sequence's bits must not depend on the batch. Half of it would double the
#: partials.
_FIXED_RUN_TOKENS = 1024


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
    """Return settings chosen among the candidates on an H200; see reports/performance-log.md."""
    min_tiles = 1
    rows = problem.group_size * problem.q_len
    if rows >= 16:
        # One CTA merges all rows of all parts. With more than some 32 parts, merging takes longer
        # than reading the context.
        tile_tokens, warps, stages, per_sm = (
            (128, 8, 3, 1) if problem.head_dim <= 128 else (64, 4, 2, 1)
        )
        min_tiles = max(1, max(TileGrid.of(problem, tile_tokens).lean_tiles) // 32)
    elif problem.head_dim <= 64:
        tile_tokens, warps, stages, per_sm = 128, 4, 3, 2 if problem.kv_bytes < 600e6 else 3
        if rows > 1:
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
    align_grid = idle * problem.kv_bytes < _MAX_IDLE_BYTES
    return LeanTritonConfig(tile_tokens, warps, stages, per_sm, min_tiles, align_grid)


def any_length(problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
    """Return the heuristic's build for a full cache, with a grid for any lengths."""
    config = heuristic(replace(problem, context=problem.max_context), gpu)
    min_tiles = min(config.min_tiles_per_cta, _ANY_LENGTH_MIN_TILES)
    return replace(config, min_tiles_per_cta=min_tiles, align_grid=False)


def batch_invariant(problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
    """Return settings with bits that do not depend on the batch.

    LeanTile and warps determine the bits and follow from the family. Stages and the register cap do
    not affect them.
    """
    wide = problem.group_size * problem.q_len >= 16 and problem.head_dim <= 128
    tile_tokens, warps, stages, per_sm = (128, 8, 3, 1) if wide else (64, 4, 3, 2)
    stages = stages_that_fit(problem, tile_tokens, stages, gpu, per_sm)
    return LeanTritonConfig(
        tile_tokens, warps, stages, per_sm, 1, False, _FIXED_RUN_TOKENS // tile_tokens
    )


def candidates(problem: AttentionProblem, gpu: GpuSpec) -> list[LeanTritonConfig]:
    """Return the heuristic's settings and those of `_CANDIDATES` that fit."""
    fitting = [
        config for config in starmap(LeanTritonConfig, _CANDIDATES) if _fits(config, problem, gpu)
    ]
    return list(dict.fromkeys([heuristic(problem, gpu), *fitting]))


def _fits(config: LeanTritonConfig, problem: AttentionProblem, gpu: GpuSpec) -> bool:
    stages = stages_that_fit(
        problem, config.tile_tokens, config.num_stages, gpu, config.ctas_per_sm
    )
    return stages == config.num_stages
