"""Launch settings of FlashDecoding on lean.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from leanbench.kernels.fixed_split.configs import MOST_SPLITS, any_length_splits, split_counts
from leanbench.kernels.lean.configs import EqualSplitsConfig
from leanbench.kernels.lean.cuda_build import HOPPER, CudaBuild, rows_of
from leanbench.kernels.lean.cuda_settings import TILE_ROWS, fitted, widest
from leanbench.kernels.lean.cuda_splits import (
    TILE_TOKENS,
    body,
    builds_to_try,
    cluster_build,
    lone_build,
    rows_to_try,
    shared_build,
)

from leanbench.core.config import number
from leanbench.core.decomposition import TileGrid, cluster_slots, usable_sms
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

# Coefficients of `_cost_us`, fitted to timings of 37 problems with equal lengths
# (reports/performance-log.md, entry 52).
#: Read rate of an SM relative to its share of the memory bandwidth: with at most half of the SMs
#: running, and with more. Two SMs share a path to the L2. At most half of the SMs together read no
#: more than `_HALF_SHARE` of the bandwidth.
_LONE_RATE, _PAIRED_RATE, _HALF_SHARE = 2.2, 1.3, 0.9
#: Microseconds per merge through memory, per merge within a cluster, and per wave after the first.
_MERGE_US, _CLUSTER_US, _WAVE_US = 2.0, 1.6, 0.4


@dataclass(frozen=True, kw_only=True)
class FixedSplitCudaConfig(EqualSplitsConfig):
    """Settings of the body of lean.cu, and the number of splits. A CTA or a cluster computes a
    split.
    """

    splits: int = number(1, MOST_SPLITS)  # pyright: ignore[reportIncompatibleVariableOverride]


class _Shape(NamedTuple):
    """CTAs per SM and per cluster."""

    ctas_per_sm: int
    cluster_size: int


def cuda_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
    """Return settings for equal lengths with the lowest `_cost_us`.

    The search covers CTAs per SM and per cluster, and split counts worth measuring.
    """
    # Output tiles of few rows share K and V through the L2.
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    rows = TILE_ROWS[0] if 2 * problem.kv_bytes < gpu.l2_bytes else most
    tiles = TileGrid.of(problem, TILE_TOKENS, rows)
    _, shape, splits = min(
        (_cost_us(problem, tiles, shape, splits, gpu), shape, splits)
        for shape in _shapes(gpu)
        for splits in split_counts(tiles, gpu, shape.cluster_size)
    )
    return _fitted(problem, gpu, shape, rows, splits)


def any_length_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
    """Return settings for lengths on the device.

    The splits are `any_length_splits` of a full cache. Like lean_cuda, two CTAs share an SM if rows
    are short.
    """
    rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    splits = any_length_splits(TileGrid.of(problem, TILE_TOKENS, rows), gpu)
    shape = _Shape(2 if widest(problem) <= 64 else 1, 1)
    return _fitted(problem, gpu, shape, rows, splits)


def _fitted(
    problem: AttentionProblem, gpu: GpuSpec, shape: _Shape, rows: int, splits: int
) -> FixedSplitCudaConfig:
    if shape.cluster_size > 1:
        build = cluster_build(problem, rows)
    elif shape.ctas_per_sm > 1:
        build = shared_build(problem, rows)
    else:
        build = lone_build(problem, rows)
    settings = body(problem, gpu, build, rows)
    config = FixedSplitCudaConfig(**settings, cluster_size=shape.cluster_size, splits=splits)
    return fitted(config, problem, gpu)


def cuda_candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[FixedSplitCudaConfig]:
    """Yield builds and `tile_rows` that fit, with split counts worth measuring, and clusters.

    Clusters use the build with the most bytes in flight.
    """
    clusters = (2, 4, 8) if gpu.compute_capability >= HOPPER else ()
    for rows in rows_to_try(problem):
        tiles = TileGrid.of(problem, TILE_TOKENS, rows)
        shapes = [(build, 1) for build in builds_to_try(problem)]
        shapes += [(cluster_build(problem, rows), cluster) for cluster in clusters]
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
    """Estimate the time to read all splits, wave by wave, and to merge them."""
    ctas_per_sm, cluster = shape
    rate = gpu.bandwidth_tb_s * 1e6
    sms, slots = usable_sms(gpu.sms, cluster), cluster_slots(gpu.sms, ctas_per_sm, cluster)
    split_bytes = -(-max(tiles.lean_tiles) // splits) * TILE_TOKENS * problem.token_bytes
    waves, remainder = divmod(tiles.output_tiles * splits, slots)

    def wave_us(units: int) -> float:
        if units == 0:
            return 0.0
        # CTAs that share an SM have together the bytes in flight of one alone.
        running = units * cluster / ctas_per_sm / gpu.sms
        if units * cluster <= gpu.sms / 2:
            share = min(_HALF_SHARE, _LONE_RATE * running)
        else:
            share = min(sms / gpu.sms, _PAIRED_RATE * running)
        return units * split_bytes / (rate * share)

    reading_us = waves * wave_us(slots) + wave_us(remainder)
    merging_us = (_MERGE_US if splits > 1 else 0) + (_CLUSTER_US if cluster > 1 else 0)
    return reading_us + merging_us + _WAVE_US * max(0, waves - 1 + (remainder > 0))
