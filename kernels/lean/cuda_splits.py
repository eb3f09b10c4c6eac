"""Kernels on lean.cu with equal splits, the same number for every output tile.

They use its copies, its arithmetic and its merge in the decompositions of FlashAttention-2 (one
split, computed by a CTA) and of FlashDecoding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from leanbench.kernels.lean.configs import EqualSplitsConfig
from leanbench.kernels.lean.cuda_build import CudaBuild, refusal_of_fp8, rows_of
from leanbench.kernels.lean.cuda_kernel import VALUE_DIMS, LeanCuda, missing
from leanbench.kernels.lean.cuda_masks import as_seen, dealt_lengths
from leanbench.kernels.lean.cuda_settings import (
    TILE_ROWS,
    TILE_TOKENS,
    copy_of,
    small_chunk,
    widest,
)

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.decomposition import Schedule, TileGrid, equal_splits
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources, TracedCall
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

ConfigT = TypeVar("ConfigT", bound=EqualSplitsConfig)
#: Candidates (chunk_tokens, num_warps, num_stages, ctas_per_sm) by the largest head_dim in 16 bits:
#: those of `leanbench tune` for lean_cuda, and more CTAs per SM, which fill a last wave better.
BUILDS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 4, 3, 1), (32, 8, 2, 1), (32, 8, 3, 1), (32, 4, 3, 2), (32, 4, 2, 2), (32, 4, 2, 3)),
    128: ((32, 4, 3, 1), (16, 8, 3, 1), (16, 8, 2, 1), (16, 4, 3, 2), (16, 4, 2, 2), (16, 4, 2, 3)),
    256: ((16, 4, 3, 1), (16, 4, 2, 1), (16, 8, 1, 1), (16, 4, 1, 2)),
    576: ((16, 4, 1, 1), (16, 2, 3, 1), (16, 2, 2, 1)),
}


class EqualSplitsCuda(Kernel[ConfigT]):
    """A kernel on lean.cu with `config.splits` splits per output tile."""

    #: Only lean_cuda distributes packed queries by their lengths, and merges across GPUs that share
    #: sequences.
    axes = LeanCuda.axes - {"q_lens", "parallel"}
    head_dims = LeanCuda.head_dims
    page_sizes = LeanCuda.page_sizes
    max_q_len = LeanCuda.max_q_len
    guards_lengths = True

    def unavailable_reason(self) -> str | None:
        return missing(self.name)

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.value_dim not in VALUE_DIMS:
            return (
                f"{self.name} does not take v_head_dim {problem.value_dim}: choose a multiple of 8"
                " up to 256, or 512"
            )
        return refusal_of_fp8(
            problem.kv_dtype, problem.head_dim, problem.value_dim, self.name
        ) or missing(self.name)

    @abstractmethod
    def host_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        """Return settings for lengths known to the host."""

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> ConfigT:
        if problem.lengths_on == "device" or problem.leftpad:
            return self.any_length_config(problem.known_to_host, gpu)
        return self.host_config(as_seen(problem), gpu)

    def schedule(self, problem: AttentionProblem, config: ConfigT, gpu: GpuSpec) -> Schedule | None:
        build = CudaBuild.of(problem, config)
        if build.q_len == 0:
            # The number of query tokens is not part of the build.
            return None
        lengths = dealt_lengths(build, problem)
        tiles = TileGrid.of(problem, config.tile_tokens, build.rows, lengths)
        schedule = equal_splits(tiles, config.splits, build.cluster)
        return replace(schedule, decomposition=self.decomposition)

    def compile(
        self, problem: AttentionProblem, config: ConfigT, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        build = CudaBuild.of(problem, config)
        return (build.resources(compile_cuda(build.source(capability)), config.cluster_size),)

    def prepare(self, inputs: AttentionInputs, config: ConfigT) -> Callable[[], None]:
        from leanbench.kernels.lean.cuda import launch_of

        return launch_of(inputs, config).run()

    def resources(self, inputs: AttentionInputs, config: ConfigT) -> tuple[LaunchResources, ...]:
        from leanbench.kernels.lean.cuda import launch_of

        return (launch_of(inputs, config).resources(),)

    def prepare_traced(self, inputs: AttentionInputs, config: ConfigT) -> TracedCall:
        from leanbench.kernels.launch import events_per_row
        from leanbench.kernels.lean.cuda import launch_of
        from leanbench.kernels.traced import TracedLaunches

        # The beginning; the part and its reduction.
        return TracedLaunches((launch_of(inputs, config),), events_per_row(3), inputs.q.device)


def body(
    problem: AttentionProblem, gpu: GpuSpec, build: tuple[int, int, int, int], rows: int
) -> dict[str, Any]:
    """Return the settings of a build common to every `EqualSplitsConfig`."""
    chunk, warps, stages, ctas_per_sm = build
    return {
        "tile_tokens": TILE_TOKENS,
        "num_warps": warps,
        "num_stages": stages,
        "ctas_per_sm": ctas_per_sm,
        "chunk_tokens": chunk,
        "tile_rows": rows,
        "copy": copy_of(problem, gpu),
    }


def builds_to_try(problem: AttentionProblem) -> tuple[tuple[int, int, int, int], ...]:
    """Return the entry of `BUILDS` for the problem.

    In 8 bits, a row has the bytes of half its head_dim.
    """
    numbers = widest(problem) if problem.kv_dtype == SAME else widest(problem) // 2
    return next(builds for most, builds in BUILDS.items() if numbers <= most)


def rows_to_try(problem: AttentionProblem) -> list[int]:
    """Return the distinct `tile_rows` for the problem."""
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    return [rows for rows in TILE_ROWS if rows <= most]


def lone_build(problem: AttentionProblem, rows: int) -> tuple[int, int, int, int]:
    """Return the build of a CTA alone on its SM.

    Four warps with larger chunks are slower at whole output tiles (reports/performance-log.md,
    entry 52).
    """
    if widest(problem) > 128:
        return 16, 4, 3, 1
    return small_chunk(problem, rows), 8, 2, 1


def cluster_build(problem: AttentionProblem, rows: int) -> tuple[int, int, int, int]:
    """Return the build with the most bytes in flight, for CTAs of a cluster alone on their SMs."""
    if widest(problem) > 128:
        return 16, 4, 3, 1
    if widest(problem) > 64:
        return (32, 4, 3, 1) if rows == TILE_ROWS[0] else (16, 8, 3, 1)
    return (64, 4, 3, 1) if rows < TILE_ROWS[-1] else (32, 8, 2, 1)


def shared_build(problem: AttentionProblem, rows: int) -> tuple[int, int, int, int]:
    """Return the build for two CTAs per SM: one reads while the other begins or ends."""
    return small_chunk(problem, rows), 4, 2 if widest(problem) <= 64 else 3, 2
