"""The launch settings of FlashDecoding in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanbench.kernels.configs import SHARED_RESERVE_KB, shared_kb, stages_that_fit

from leanbench.core.config import TileConfig, number
from leanbench.core.decomposition import TileGrid, fixed_split_heuristic
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: (tile_tokens, num_warps, num_stages) that `--configs best` tries with every split count.
_TILES = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 8, 2))
#: Parts of an output tile at most; and of those worth measuring.
MOST_SPLITS = 2**16
_MOST_TRIED = 128
#: Waves of CTAs, one to an SM, where lengths are on the device; the same up to an eighth as many
#: output tiles as SMs, where more splits are short and many to merge. Chosen on the 25 uneven
#: batches of reports/h200/settings/uneven.txt (entry 52).
_WAVES, _FEW_WAVES = 8, 2


@dataclass(frozen=True)
class FixedSplitTritonConfig(TileConfig):
    """A LeanTile, warps, stages and the number of splits."""

    implementation = "triton"

    #: Parts of every output tile.
    splits: int = number(1, MOST_SPLITS)


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
    """The fastest on an H200 over 24 problems, each with its best split count; the splits are
    FlashAttention's heuristic's.
    """
    tile_tokens, stages = _build(problem, gpu)
    tiles = TileGrid.of(problem, tile_tokens)
    cta_kb = shared_kb(problem, tile_tokens, stages, gpu) + SHARED_RESERVE_KB
    resident = max(1, int(gpu.shared_kb_per_sm / cta_kb))
    splits = fixed_split_heuristic(tiles.output_tiles, gpu.sms * resident, max(tiles.lean_tiles))
    return FixedSplitTritonConfig(tile_tokens, 4, stages, splits)


def any_length(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
    """The heuristic's LeanTile and stages; `any_length_splits` for a full cache."""
    tile_tokens, stages = _build(problem, gpu)
    splits = any_length_splits(TileGrid.of(problem, tile_tokens), gpu)
    return FixedSplitTritonConfig(tile_tokens, 4, stages, splits)


def _build(problem: AttentionProblem, gpu: GpuSpec) -> tuple[int, int]:
    """Tokens of a LeanTile, and stages."""
    tile_tokens, stages = (128, 3) if problem.head_dim <= 64 else (64, 4)
    return tile_tokens, stages_that_fit(problem, tile_tokens, stages, gpu)


def candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[FixedSplitTritonConfig]:
    """Tiles whose stages fit, with every split count worth measuring."""
    for tile_tokens, num_warps, num_stages in _TILES:
        if stages_that_fit(problem, tile_tokens, num_stages, gpu) == num_stages:
            for splits in split_counts(TileGrid.of(problem, tile_tokens), gpu):
                yield FixedSplitTritonConfig(tile_tokens, num_warps, num_stages, splits)


def split_counts(tiles: TileGrid, gpu: GpuSpec, cluster_size: int = 1) -> list[int]:
    """Split counts worth measuring: 1, and those that make from half a wave to eight waves of
    CTAs, or of clusters.
    """
    counts = {1}
    for waves in (0.5, 1, 1.5, 2, 3, 4, 6, 8):
        splits = int(gpu.sms * waves / (tiles.output_tiles * cluster_size))
        counts.update((splits, splits + 1))
    most = min(_MOST_TRIED, max(tiles.lean_tiles))
    return sorted(splits for splits in counts if 1 <= splits <= most)


def any_length_splits(tiles: TileGrid, gpu: GpuSpec) -> int:
    """Splits for lengths that the host does not know: so many that SMs which are through with short
    sequences have others to take, each of two LeanTiles at least where the cache is full, as
    `tiles` is.
    """
    most = min(_MOST_TRIED, max(tiles.lean_tiles) // 2)
    waves = _FEW_WAVES if 8 * tiles.output_tiles <= gpu.sms else _WAVES
    return max(1, min(most, waves * gpu.sms // tiles.output_tiles))
