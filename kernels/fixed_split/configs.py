"""Launch settings of FlashDecoding in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanbench.kernels.configs import SHARED_RESERVE_KB, shared_kb, stages_that_fit

from leanbench.core.config import TileConfig, number
from leanbench.core.decomposition import TileGrid, fixed_split_heuristic
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: (tile_tokens, num_warps, num_stages) that `--configs best` combines with every split count.
_TILES = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 8, 2))
#: Maximum number of splits, and the maximum worth measuring.
MOST_SPLITS = 2**16
_MOST_TRIED = 128
#: Waves with one CTA per SM for lengths on the device. `_FEW_WAVES` limits them if there are at
#: most an eighth as many output tiles as SMs: more splits would be short and slow to merge. Chosen
#: on 25 uneven batches (reports/performance-log.md, entry 52).
_WAVES, _FEW_WAVES = 8, 2


@dataclass(frozen=True)
class FixedSplitTritonConfig(TileConfig):
    """LeanTile, warps, stages and the number of splits."""

    implementation = "triton"

    splits: int = number(1, MOST_SPLITS)


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
    """Return the fastest build over 24 problems on an H200, with FlashAttention's splits."""
    tile_tokens, stages = _build(problem, gpu)
    tiles = TileGrid.of(problem, tile_tokens)
    cta_kb = shared_kb(problem, tile_tokens, stages, gpu) + SHARED_RESERVE_KB
    resident = max(1, int(gpu.shared_kb_per_sm / cta_kb))
    splits = fixed_split_heuristic(tiles.output_tiles, gpu.sms * resident, max(tiles.lean_tiles))
    return FixedSplitTritonConfig(tile_tokens, 4, stages, splits)


def any_length(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
    """Return the heuristic's build with `any_length_splits` for a full cache."""
    tile_tokens, stages = _build(problem, gpu)
    splits = any_length_splits(TileGrid.of(problem, tile_tokens), gpu)
    return FixedSplitTritonConfig(tile_tokens, 4, stages, splits)


def _build(problem: AttentionProblem, gpu: GpuSpec) -> tuple[int, int]:
    """Return tokens per LeanTile, and stages."""
    tile_tokens, stages = (128, 3) if problem.head_dim <= 64 else (64, 4)
    return tile_tokens, stages_that_fit(problem, tile_tokens, stages, gpu)


def candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[FixedSplitTritonConfig]:
    """Yield builds that fit, combined with every split count worth measuring."""
    for tile_tokens, num_warps, num_stages in _TILES:
        if stages_that_fit(problem, tile_tokens, num_stages, gpu) == num_stages:
            for splits in split_counts(TileGrid.of(problem, tile_tokens), gpu):
                yield FixedSplitTritonConfig(tile_tokens, num_warps, num_stages, splits)


def split_counts(tiles: TileGrid, gpu: GpuSpec, cluster_size: int = 1) -> list[int]:
    """Return split counts worth measuring: 1, and those that make half a wave to eight waves.

    A wave is of CTAs or of clusters.
    """
    counts = {1}
    for waves in (0.5, 1, 1.5, 2, 3, 4, 6, 8):
        splits = int(gpu.sms * waves / (tiles.output_tiles * cluster_size))
        counts.update((splits, splits + 1))
    most = min(_MOST_TRIED, max(tiles.lean_tiles))
    return sorted(splits for splits in counts if 1 <= splits <= most)


def any_length_splits(tiles: TileGrid, gpu: GpuSpec) -> int:
    """Return the number of splits for lengths on the device.

    There are enough splits for SMs that finish short sequences to take over work of long ones. In a
    full cache, as `tiles` describes it, a split has at least two LeanTiles.
    """
    most = min(_MOST_TRIED, max(tiles.lean_tiles) // 2)
    waves = _FEW_WAVES if 8 * tiles.output_tiles <= gpu.sms else _WAVES
    return max(1, min(most, waves * gpu.sms // tiles.output_tiles))
