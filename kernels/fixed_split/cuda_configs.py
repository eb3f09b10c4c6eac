"""The launch settings of FlashDecoding on lean.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from leanbench.kernels.fixed_split.configs import MOST_SPLITS, split_counts
from leanbench.kernels.lean.configs import EqualSplitsConfig
from leanbench.kernels.lean.cuda_build import HOPPER, CudaBuild, rows_of
from leanbench.kernels.lean.cuda_heuristic import fitted, tile_rows_of
from leanbench.kernels.lean.cuda_splits import (
    TILE_TOKENS,
    body,
    builds_to_try,
    lone_build,
    rows_to_try,
    shared_build,
)

from leanbench.core.config import number
from leanbench.core.decomposition import TileGrid, cluster_slots, usable_sms
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

#: What a lone CTA reads of its SM's share of the memory's bandwidth (H200: fa2 of 56 heads).
_LONE_RATE = 1.3
#: Microseconds of a merge through memory and of one within a cluster; of a wave after the first,
#: between two CTAs of an SM and where each has its own (H200).
_MERGE_US, _CLUSTER_US, _WAVE_US, _LONE_WAVE_US = 1.2, 0.5, 0.4, 1.0
#: Splits of an output tile at most, and of all together where lengths are the device's: eight waves
#: of 132 CTAs (predicted: within 4% of more on ragged batches of 4 and 16, up to 64k tokens).
_MOST_TRIED = 128
_ANY_LENGTH_UNITS = 1056


@dataclass(frozen=True, kw_only=True)
class FixedSplitCudaConfig(EqualSplitsConfig):
    """The settings of lean.cu's body, and the number of splits: a split is a CTA's, or a
    cluster's.
    """

    #: Parts of every output tile.
    splits: int = number(1, MOST_SPLITS)  # pyright: ignore[reportIncompatibleVariableOverride]


class _Shape(NamedTuple):
    """CTAs of an SM and of a cluster."""

    ctas_per_sm: int
    cluster_size: int


def cuda_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
    """CTAs of an SM and of a cluster, and splits, that read K and V of equal lengths the soonest by
    `_cost_us`.
    """
    rows = tile_rows_of(problem)
    tiles = TileGrid.of(problem, TILE_TOKENS, rows)
    _, shape, splits = min(
        (_cost_us(problem, tiles, shape, splits, gpu), shape, splits)
        for shape in _shapes(gpu)
        for splits in range(1, 1 + min(_MOST_TRIED, max(tiles.lean_tiles)))
    )
    make = lone_build if shape.ctas_per_sm == 1 else shared_build
    return _fitted(problem, gpu, make(problem, rows), rows, shape.cluster_size, splits)


def any_length_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
    """Splits for lengths that the host does not know: so many that SMs which are through with short
    sequences have others to take, each of two LeanTiles at least where the cache is full.
    """
    rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    tiles = TileGrid.of(problem, TILE_TOKENS, rows)
    most = min(_MOST_TRIED, max(tiles.lean_tiles) // 2)
    splits = max(1, min(most, _ANY_LENGTH_UNITS // tiles.output_tiles))
    return _fitted(problem, gpu, lone_build(problem, rows), rows, 1, splits)


def _fitted(
    problem: AttentionProblem,
    gpu: GpuSpec,
    build: tuple[int, int, int, int],
    rows: int,
    cluster_size: int,
    splits: int,
) -> FixedSplitCudaConfig:
    settings = body(problem, gpu, build, rows)
    config = FixedSplitCudaConfig(**settings, cluster_size=cluster_size, splits=splits)
    return fitted(config, problem, gpu)


def cuda_candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[FixedSplitCudaConfig]:
    """Builds and rows of an output tile that fit, with every split count worth measuring, and
    clusters of the build with the most bytes in flight.
    """
    clusters = (2, 4, 8) if gpu.compute_capability >= HOPPER else ()
    for rows in rows_to_try(problem):
        tiles = TileGrid.of(problem, TILE_TOKENS, rows)
        shapes = [(build, 1) for build in builds_to_try(problem)]
        shapes += [(lone_build(problem, rows), cluster) for cluster in clusters]
        for build, cluster in shapes:
            settings = body(problem, gpu, build, rows) | {"cluster_size": cluster}
            for splits in split_counts(tiles, gpu, cluster):
                config = FixedSplitCudaConfig(**settings, splits=splits)
                if CudaBuild.of(problem, config).fits(gpu):
                    yield config


def _shapes(gpu: GpuSpec) -> list[_Shape]:
    if gpu.compute_capability < HOPPER:
        return [_Shape(1, 1), _Shape(2, 1)]
    return [_Shape(1, 1), _Shape(2, 1), _Shape(1, 2), _Shape(1, 4), _Shape(1, 8)]


def _cost_us(
    problem: AttentionProblem, tiles: TileGrid, shape: _Shape, splits: int, gpu: GpuSpec
) -> float:
    """What reading all splits takes, wave by wave, with the merges."""
    ctas_per_sm, cluster = shape
    rate = gpu.bandwidth_tb_s * 1e6
    sms, slots = usable_sms(gpu.sms, cluster), cluster_slots(gpu.sms, ctas_per_sm, cluster)
    split_bytes = -(-max(tiles.lean_tiles) // splits) * TILE_TOKENS * problem.token_bytes
    waves, rest = divmod(tiles.output_tiles * splits, slots)

    def wave_us(ctas: int) -> float:
        if ctas == 0:
            return 0.0
        running = min(sms, ctas * cluster)
        return ctas * split_bytes / min(rate, _LONE_RATE * rate * running / gpu.sms)

    reading_us = waves * wave_us(slots) + wave_us(rest)
    restart_us = _LONE_WAVE_US if ctas_per_sm == 1 else _WAVE_US
    merging_us = (_MERGE_US if splits > 1 else 0) + (_CLUSTER_US if cluster > 1 else 0)
    return reading_us + merging_us + restart_us * max(0, waves - 1 + (rest > 0))
