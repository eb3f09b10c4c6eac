"""Launch settings of the FlashAttention-2 decomposition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.lean.configs import EqualSplitsConfig
from leanbench.kernels.lean.cuda_build import CudaBuild, rows_of
from leanbench.kernels.lean.cuda_settings import fitted
from leanbench.kernels.lean.cuda_splits import (
    body,
    builds_to_try,
    lone_build,
    rows_to_try,
    shared_build,
)

from leanbench.core.config import TileConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem


@dataclass(frozen=True)
class Fa2TritonConfig(TileConfig):
    implementation = "triton"


@dataclass(frozen=True, kw_only=True)
class Fa2CudaConfig(EqualSplitsConfig):
    """Settings of the body of lean.cu, with an output tile per CTA."""

    #: A cluster would split the output tile.
    cluster_size: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride]


def triton_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> Fa2TritonConfig:
    """Return the fastest settings over 24 problems on an H200.

    A CTA alone on its SM needs all shared memory for bytes in flight.
    """
    tile_tokens, stages = (256, 4) if problem.head_dim <= 64 else (128, 3)
    if problem.head_dim > 128:
        tile_tokens = 64
    return Fa2TritonConfig(tile_tokens, 4, stages_that_fit(problem, tile_tokens, stages, gpu))


def triton_candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Fa2TritonConfig]:
    """Yield combinations of LeanTile, warps and stages that fit."""
    for tile_tokens, num_stages, num_warps in product((64, 128, 256), (2, 3, 4, 6), (4, 8)):
        if stages_that_fit(problem, tile_tokens, num_stages, gpu) == num_stages:
            yield Fa2TritonConfig(tile_tokens, num_warps, num_stages)


def cuda_heuristic(problem: AttentionProblem, gpu: GpuSpec) -> Fa2CudaConfig:
    """Return settings for lengths known to the host.

    A CTA alone on its SM keeps the most bytes in flight. With more output tiles than SMs, one CTA
    reads while another begins or ends.
    """
    rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    row_tiles = -(-problem.group_size * problem.q_len // rows)
    output_tiles = problem.batch * problem.kv_heads * row_tiles
    build = shared_build(problem, rows) if output_tiles > gpu.sms else lone_build(problem, rows)
    return fitted(Fa2CudaConfig(**body(problem, gpu, build, rows)), problem, gpu)


def cuda_any_length(problem: AttentionProblem, gpu: GpuSpec) -> Fa2CudaConfig:
    """Return settings for lengths on the device.

    The CTA of the longest sequence ends last, so it reads at the highest rate.
    """
    rows = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    build = lone_build(problem, rows)
    return fitted(Fa2CudaConfig(**body(problem, gpu, build, rows)), problem, gpu)


def cuda_candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Fa2CudaConfig]:
    """Yield builds and `tile_rows` that fit."""
    for build, rows in product(builds_to_try(problem), rows_to_try(problem)):
        config = Fa2CudaConfig(**body(problem, gpu, build, rows))
        if CudaBuild.of(problem, config).fits(gpu):
            yield config
