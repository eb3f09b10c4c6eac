"""FlashAttention-2: one CTA per output tile (Dao, 2023, arXiv 2307.08691)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.kernels.fa2.configs import Fa2Config, candidates, heuristic
from leanbench.kernels.launch import TritonLaunch
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class Fa2(TritonKernel[Fa2Config]):
    name = "fa2"
    title = "FlashAttention-2's decomposition: one CTA per output tile, never split (Triton)"
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; this project's Triton kernel"

    config_types = (Fa2Config,)
    axes = TritonKernel.axes | {"window_left", "softcap"}

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> Fa2Config:
        return heuristic(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[Fa2Config]:
        return list(dict.fromkeys([heuristic(problem, gpu), *candidates(problem, gpu)]))

    def schedule(self, problem: AttentionProblem, config: Fa2Config, gpu: GpuSpec) -> Schedule:
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def launches(self, inputs: AttentionInputs, config: Fa2Config) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fa2.triton import launches

        return launches(inputs, config)


KERNELS = (Fa2(),)
