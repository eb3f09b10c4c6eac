"""Registry entry of LeanAttention's Triton implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.kernels.launch import (
    LaunchShape,
    TritonLaunch,
    events_per_row,
    most_parts,
)
from leanbench.kernels.lean import triton_configs
from leanbench.kernels.lean.configs import LeanTritonConfig
from leanbench.kernels.lean.workspace import lean_grid_limit
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.decomposition import Schedule, TileGrid, fixed_runs, stream_k, tile_rows
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.kernels.launch import Relaunch

    from leanbench.core.inputs import AttentionInputs


class LeanTriton(TritonKernel[LeanTritonConfig]):
    name = "lean_triton"
    title = "LeanAttention: stream-K over LeanTiles, reduction in the same launch (Triton)"
    decomposition = "stream_k"
    source = "Sanovar et al. 2024, arXiv 2405.10480; this project's Triton kernel"
    tuned_as = "lean"
    is_api = True
    config_types = (LeanTritonConfig,)

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
        if problem.lengths_on == "device":
            return self.any_length_config(problem.known_to_host, gpu)
        return triton_configs.heuristic(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
        return triton_configs.any_length(problem, gpu)

    def batch_invariant_config(self, problem: AttentionProblem, gpu: GpuSpec) -> LeanTritonConfig:
        return triton_configs.batch_invariant(problem, gpu)

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[LeanTritonConfig]:
        return triton_configs.candidates(problem, gpu)

    def schedule(
        self, problem: AttentionProblem, config: LeanTritonConfig, gpu: GpuSpec
    ) -> Schedule:
        tiles = TileGrid.of(problem, config.tile_tokens)
        if config.fixed_run_tiles:
            return fixed_runs(tiles, config.fixed_run_tiles)
        rows = tile_rows(problem.group_size, problem.head_dim, problem.q_len)
        row_count = min(problem.group_size * problem.q_len, rows)
        max_grid = lean_grid_limit(row_count, problem.head_dim, config.ctas_per_sm * gpu.sms)
        aligned = config.align_grid and problem.lengths_on == "host"
        return stream_k(tiles, max_grid, config.min_tiles_per_cta, aligned)

    def launches(
        self, inputs: AttentionInputs, config: LeanTritonConfig
    ) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.lean.triton import launches

        return launches(inputs, config)

    def relaunch(self, inputs: AttentionInputs, config: LeanTritonConfig) -> Relaunch:
        from leanbench.kernels.lean.triton import TritonRelaunch

        return TritonRelaunch(inputs, config)

    def most_events(
        self, inputs: AttentionInputs, config: LeanTritonConfig, launches: Sequence[TritonLaunch]
    ) -> int:
        """Return the capacity for events, from the current lengths."""
        shape = LaunchShape.of(inputs)
        per_sequence = shape.kv_heads * shape.row_tiles
        fixed = config.fixed_run_tiles > 0
        grid, min_tiles = launches[0].grid, config.min_tiles_per_cta
        parts = (
            1
            if fixed
            else most_parts(
                inputs.read_lengths(), config.tile_tokens, per_sequence, grid, min_tiles
            )
        )
        # The beginning; each part; a wait and a reduction for the last one.
        return events_per_row(1 + parts + 2)
