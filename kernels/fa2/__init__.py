"""FlashAttention-2: one CTA per output tile (Dao, 2023, arXiv 2307.08691)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.kernels.fa2.configs import (
    Fa2CudaConfig,
    Fa2TritonConfig,
    cuda_any_length,
    cuda_candidates,
    cuda_heuristic,
    triton_candidates,
    triton_heuristic,
)
from leanbench.kernels.launch import TritonLaunch
from leanbench.kernels.lean.cuda_splits import EqualSplitsCuda
from leanbench.kernels.lean.implementations import Implementations
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class Fa2Triton(TritonKernel[Fa2TritonConfig]):
    name = "fa2_triton"
    title = "FlashAttention-2's decomposition: one CTA per output tile, never split (Triton)"
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; this project's Triton kernel"

    config_types = (Fa2TritonConfig,)
    axes = TritonKernel.axes | {"window_left", "softcap"}

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> Fa2TritonConfig:
        return triton_heuristic(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[Fa2TritonConfig]:
        return list(
            dict.fromkeys([triton_heuristic(problem, gpu), *triton_candidates(problem, gpu)])
        )

    def schedule(
        self, problem: AttentionProblem, config: Fa2TritonConfig, gpu: GpuSpec
    ) -> Schedule:
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def launches(
        self, inputs: AttentionInputs, config: Fa2TritonConfig
    ) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fa2.triton import launches

        return launches(inputs, config)


class Fa2Cuda(EqualSplitsCuda[Fa2CudaConfig]):
    name = "fa2_cuda"
    title = (
        "FlashAttention-2's decomposition on the copies and arithmetic of lean_cuda: one CTA per"
        " output tile, never split (CUDA C++)"
    )
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; this project's CUDA C++ kernel"
    config_types = (Fa2CudaConfig,)

    def host_config(self, problem: AttentionProblem, gpu: GpuSpec) -> Fa2CudaConfig:
        return cuda_heuristic(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> Fa2CudaConfig:
        return cuda_any_length(problem, gpu)

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[Fa2CudaConfig]:
        return list(cuda_candidates(problem, gpu))


_TRITON, _CUDA = Fa2Triton(), Fa2Cuda()


class Fa2(Implementations[Fa2TritonConfig | Fa2CudaConfig]):
    triton, cuda = _TRITON, _CUDA
    name = "fa2"
    title = (
        "FlashAttention-2's decomposition: one CTA per output tile, never split (the faster of CUDA"
        " C++ and Triton)"
    )
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; this project's CUDA C++ and Triton kernels"
    config_types = (Fa2TritonConfig, Fa2CudaConfig)


KERNELS = (Fa2(), _TRITON, _CUDA)
