"""LeanAttention: stream-K decode attention (Sanovar et al., 2024, arXiv 2405.10480)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from leanbench.kernels.configs import stages_that_fit
from leanbench.kernels.launch import (
    LaunchShape,
    TritonKernel,
    TritonLaunch,
    events_per_row,
    merge_rows_at_once,
    most_parts,
)
from leanbench.kernels.lean.cuda_heuristic import HOPPER
from leanbench.kernels.lean.cuda_kernel import LeanCuda
from leanbench.kernels.lean.workspace import (
    PARTIALS_AT_ONCE,
    lean_grid_limit,
    one_number_each,
)

from leanbench.core.decomposition import (
    Schedule,
    TileGrid,
    fixed_runs,
    stream_k,
    stream_k_grid,
    tile_rows,
)
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import BATCH_INVARIANT, KernelConfig, LaunchResources, TracedCall

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: What `--configs best` tries, as (tile_tokens, num_warps, num_stages, ctas_per_sm,
#: min_tiles_per_cta, align_grid): on an H200, those that were among the fastest of 128 for some of
#: 24 problems.
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
#: What `leanbench tune` considers: all combinations whose stages fit. Eight warps want a LeanTile
#: that feeds them.
_TUNED_TILES = ((64, (4,)), (128, (4, 8)), (256, (4, 8)))
_TUNED_STAGES = (2, 3, 4, 5, 6)
_TUNED_CTAS_PER_SM = {4: (1, 2, 3, 4), 8: (1, 2)}
_TUNED_MIN_TILES = (1, 2, 4, 8)
#: Rounding the grid down to a multiple of the output tiles idles a share of the CTAs and saves the
#: crossing of borders, about a microsecond. It pays while that share of the KV cache is below this
#: (H200: between 32k and 64k at 56 heads).
_ALIGN_BYTES = 80e6

#: LeanTiles of a CTA at least, at most so many where a cache may hold sequences of any length: a
#: share of its capacity would leave a short sequence to a single CTA.
_ANY_LENGTH_MIN_TILES = 4

#: Tokens of a CTA where a sequence's bits must not depend on the batch. Half as many would be twice
#: the partials.
_FIXED_RUN_TOKENS = 1024


class LeanTriton(TritonKernel):
    name = "lean_triton"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (Triton)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's Triton kernel"
    tuned_as = "lean"
    implementation = "triton"

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # Chosen among the candidates on an H200, see docs/performance-log.md.
        min_tiles = 1
        rows = problem.group_size * problem.q_len
        if rows >= 16:
            # One CTA merges all rows of all parts: past some 32 parts that takes longer than
            # reading the context.
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
        idle = (
            1 - stream_k_grid(tiles.total, per_sm * gpu.sms, min_tiles, tiles.output_tiles) / grid
        )
        align_grid = idle * problem.kv_bytes < _ALIGN_BYTES
        return KernelConfig(tile_tokens, warps, stages, per_sm, min_tiles, align_grid=align_grid)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        config = self.default_config(replace(problem, context=problem.max_context), gpu)
        min_tiles = min(config.min_tiles_per_cta or 1, _ANY_LENGTH_MIN_TILES)
        return replace(config, min_tiles_per_cta=min_tiles, align_grid=False)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # LeanTile and warps decide about bits and follow from the family; stages and the cap on
        # registers do not.
        wide = problem.group_size * problem.q_len >= 16 and problem.head_dim <= 128
        tile_tokens, warps, stages, per_sm = (128, 8, 3, 1) if wide else (64, 4, 3, 2)
        stages = stages_that_fit(problem, tile_tokens, stages, gpu, per_sm)
        return KernelConfig(
            tile_tokens, warps, stages, per_sm, fixed_run_tiles=_FIXED_RUN_TOKENS // tile_tokens
        )

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        candidates = [KernelConfig(*values[:5], align_grid=values[5]) for values in _CANDIDATES]
        fitting = [
            config
            for config in candidates
            if stages_that_fit(
                problem, config.tile_tokens, config.num_stages, gpu, config.ctas_per_sm or 1
            )
            == config.num_stages
        ]
        return list(dict.fromkeys([self.default_config(problem, gpu), *fitting]))

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        found: list[KernelConfig] = []
        for tile_tokens, all_warps in _TUNED_TILES:
            for num_warps, num_stages in product(all_warps, _TUNED_STAGES):
                for ctas_per_sm in _TUNED_CTAS_PER_SM[num_warps]:
                    if (
                        stages_that_fit(problem, tile_tokens, num_stages, gpu, ctas_per_sm)
                        < num_stages
                    ):
                        continue
                    for min_tiles, align_grid in product(_TUNED_MIN_TILES, (True, False)):
                        config = KernelConfig(
                            tile_tokens, num_warps, num_stages, ctas_per_sm, min_tiles, align_grid
                        )
                        found.append(config)
        return found

    def grid_limit(self, rows: int, head_dim: int, wanted: int) -> int:
        return lean_grid_limit(rows, head_dim, wanted)

    def merge_rounds(self, rows: int, head_dim: int, num_warps: int, partials: int) -> int:
        at_once = merge_rows_at_once(rows, head_dim, num_warps)
        each = PARTIALS_AT_ONCE[one_number_each(rows, head_dim, num_warps)]
        return -(-rows // at_once) * -(-partials // each)

    def schedule(
        self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec
    ) -> Schedule | None:
        assert config is not None
        assert config.ctas_per_sm is not None
        tiles = TileGrid.of(problem, config.tile_tokens)
        if config.fixed_run_tiles is not None:
            return fixed_runs(tiles, config.fixed_run_tiles)
        rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len)
        row_count = min(problem.group_size * problem.q_len, rows)
        max_grid = lean_grid_limit(row_count, problem.head_dim, config.ctas_per_sm * gpu.sms)
        aligned = bool(config.align_grid) and not problem.is_ragged
        return stream_k(tiles, max_grid, config.min_tiles_per_cta or 1, aligned)

    def launches(self, inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.lean.triton import launches

        return launches(inputs, config)

    def most_events(
        self, inputs: AttentionInputs, config: KernelConfig, launches: Sequence[TritonLaunch]
    ) -> int:
        """From the lengths as they are now."""
        shape = LaunchShape.of(inputs)
        per_sequence = shape.kv_heads * shape.row_tiles
        fixed = config.fixed_run_tiles is not None
        grid, min_tiles = launches[0].grid, config.min_tiles_per_cta or 1
        parts = (
            1 if fixed else most_parts(inputs, config.tile_tokens, per_sequence, grid, min_tiles)
        )
        # The beginning; each part; a wait and a reduction for the last one.
        return events_per_row(1 + parts + 2)


class Lean(LeanTriton):
    """Both implementations: the config says which."""

    name = "lean"
    title = (
        "LeanAttention: stream-K over LeanTiles, reduction in the same launch (the faster of CUDA"
        " C++ and Triton)"
    )
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's CUDA C++ and Triton kernels"
    implementation = None

    def __init__(self) -> None:
        self._cuda = LeanCuda()

    def implementation_of(self, config: KernelConfig) -> LeanTriton | LeanCuda:
        return self._cuda if is_cuda(config) else _TRITON

    def implementation_on(self, gpu: GpuSpec) -> LeanTriton | LeanCuda:
        # Hopper is where the CUDA C++ implementation was measured.
        use_cuda = gpu.compute_capability == HOPPER and self._cuda.unavailable_reason() is None
        return self._cuda if use_cuda else _TRITON

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return self.implementation_on(gpu).default_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return self.implementation_on(gpu).any_length_config(problem, gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return self.implementation_on(gpu).batch_invariant_config(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return [
            *self._cuda_configs(LeanCuda.candidate_configs, problem, gpu),
            *_TRITON.candidate_configs(problem, gpu),
        ]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return [
            *_TRITON.tuning_space(problem, gpu),
            *self._cuda_configs(LeanCuda.tuning_space, problem, gpu),
        ]

    def _cuda_configs(
        self,
        which: Callable[[LeanCuda, AttentionProblem, GpuSpec], list[KernelConfig]],
        problem: AttentionProblem,
        gpu: GpuSpec,
    ) -> list[KernelConfig]:
        return (
            [] if self._cuda.unavailable_reason() is not None else which(self._cuda, problem, gpu)
        )

    def schedule(
        self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec
    ) -> Schedule | None:
        assert config is not None
        return self.implementation_of(config).schedule(problem, config, gpu)

    def compile(
        self, problem: AttentionProblem, config: KernelConfig, capability: tuple[int, int]
    ) -> tuple[LaunchResources, ...]:
        if is_cuda(config):
            return self._cuda.compile(problem, config, capability)
        return _TRITON.compile(problem, config, capability)

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], None]:
        kernel, config = self._implementation(inputs, config)
        return kernel.prepare(inputs, config)

    def resources(
        self, inputs: AttentionInputs, config: KernelConfig | None
    ) -> tuple[LaunchResources, ...]:
        kernel, config = self._implementation(inputs, config)
        return kernel.resources(inputs, config)

    def prepare_traced(self, inputs: AttentionInputs, config: KernelConfig | None) -> TracedCall:
        kernel, config = self._implementation(inputs, config)
        return kernel.prepare_traced(inputs, config)

    def _implementation(
        self, inputs: AttentionInputs, config: KernelConfig | None
    ) -> tuple[LeanTriton | LeanCuda, KernelConfig | None]:
        """Which one runs, and how: tensors that the CUDA C++ one cannot take go to Triton's, with
        its heuristic.
        """
        if not is_cuda(config):
            return _TRITON, config
        from leanbench.kernels.lean.cuda import refusal

        if refusal(inputs) is None:
            return self._cuda, config
        from leanbench.kernels.launch import problem_of, spec_of

        assert config is not None
        problem, gpu = problem_of(inputs), spec_of(inputs.q.device)
        if config.fixed_run_tiles is not None:
            return _TRITON, _TRITON.batch_invariant_config(problem, gpu)
        return _TRITON, _TRITON.default_config(problem, gpu)


class LeanBatchInvariant(Lean):
    """What `batch_invariant=True` costs, to be seen beside `lean`."""

    name = "lean_batch_invariant"
    title = "lean with batch_invariant=True: bits that do not depend on the rest of the batch"
    tuned_as = None
    config_choice = BATCH_INVARIANT

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return self.batch_invariant_config(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        return self.batch_invariant_config(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return [self.batch_invariant_config(problem, gpu)]

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        """Not tuned; one for each implementation."""
        return [
            _TRITON.batch_invariant_config(problem, gpu),
            *self._cuda_configs(
                lambda cuda, *asked: [cuda.batch_invariant_config(*asked)], problem, gpu
            ),
        ]


def is_cuda(config: KernelConfig | None) -> bool:
    return config is not None and config.implementation == "cuda"


_TRITON = LeanTriton()
KERNELS = (Lean(), _TRITON, LeanCuda(), LeanBatchInvariant())
