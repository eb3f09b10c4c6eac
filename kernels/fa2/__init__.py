"""FlashAttention-2: one CTA per output tile (Dao, 2023, arXiv 2307.08691)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.kernels.configs import stages_that_fit, tile_candidates
from leanbench.kernels.launch import TritonKernel, TritonLaunch

from leanbench.core.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import KernelConfig

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class Fa2(TritonKernel):
    name = "fa2"
    title = "FlashAttention-2's decomposition: one CTA per output tile, never split (Triton)"
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; this project's Triton kernel"

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # The fastest on an H200 over 24 problems: a lone CTA wants its whole SM's shared memory in
        # flight.
        tile_tokens, stages = (256, 4) if problem.head_dim <= 64 else (128, 3)
        if problem.head_dim > 128:
            tile_tokens = 64
        return KernelConfig(tile_tokens, 4, stages_that_fit(problem, tile_tokens, stages, gpu))

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return list(
            dict.fromkeys([self.default_config(problem, gpu), *tile_candidates(problem, gpu)])
        )

    def schedule(
        self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec
    ) -> Schedule:
        assert config is not None
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def launches(self, inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fa2.triton import launches

        return launches(inputs, config)


KERNELS = (Fa2(),)
