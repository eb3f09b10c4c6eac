"""FlashDecoding: equal splits, the same number for every output tile (Dao et al., 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.kernels.fixed_split import configs, cuda_configs
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig, split_counts
from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig
from leanbench.kernels.launch import TritonLaunch
from leanbench.kernels.lean.cuda_masks import as_seen
from leanbench.kernels.lean.cuda_splits import EqualSplitsCuda
from leanbench.kernels.lean.implementations import Implementations
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.decomposition import Schedule, TileGrid, fixed_split
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class FixedSplitTriton(TritonKernel[FixedSplitTritonConfig]):
    name = "fixed_split_triton"
    title = (
        "FlashDecoding's decomposition: equal splits and a second kernel that merges them (Triton)"
    )
    decomposition = "fixed_split"
    source = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; this project's Triton kernel"

    config_types = (FixedSplitTritonConfig,)
    axes = TritonKernel.axes | {"window_left", "softcap"}

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
        if problem.lengths_on == "device":
            return self.any_length_config(problem.known_to_host, gpu)
        return configs.heuristic(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitTritonConfig:
        return configs.any_length(problem, gpu)

    def candidate_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> list[FixedSplitTritonConfig]:
        return list(
            dict.fromkeys([self.default_config(problem, gpu), *configs.candidates(problem, gpu)])
        )

    def schedule(
        self, problem: AttentionProblem, config: FixedSplitTritonConfig, gpu: GpuSpec
    ) -> Schedule:
        return fixed_split(TileGrid.of(problem, config.tile_tokens), config.splits)

    def launches(
        self, inputs: AttentionInputs, config: FixedSplitTritonConfig
    ) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fixed_split.triton import launches

        return launches(inputs, config)


class FixedSplitCuda(EqualSplitsCuda[FixedSplitCudaConfig]):
    name = "fixed_split_cuda"
    title = (
        "FlashDecoding's decomposition on the copies, arithmetic and merge of lean_cuda: equal"
        " splits, merged in the same launch (CUDA C++)"
    )
    decomposition = "fixed_split"
    source = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; this project's CUDA C++ kernel"
    config_types = (FixedSplitCudaConfig,)

    def host_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
        return cuda_configs.cuda_heuristic(problem, gpu)

    def any_length_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitCudaConfig:
        return cuda_configs.any_length_heuristic(as_seen(problem), gpu)

    def tuning_space(self, problem: AttentionProblem, gpu: GpuSpec) -> list[FixedSplitCudaConfig]:
        return list(cuda_configs.cuda_candidates(as_seen(problem), gpu))


_TRITON, _CUDA = FixedSplitTriton(), FixedSplitCuda()


class FixedSplit(Implementations[FixedSplitTritonConfig | FixedSplitCudaConfig]):
    triton, cuda = _TRITON, _CUDA
    name = "fixed_split"
    title = (
        "FlashDecoding's decomposition: equal splits (the faster of CUDA C++, which merges in the"
        " same launch, and Triton, which merges in a second one)"
    )
    decomposition = "fixed_split"
    source = (
        "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; this project's CUDA C++ and Triton kernels"
    )
    config_types = (FixedSplitTritonConfig, FixedSplitCudaConfig)


class FixedSplitOracle(FixedSplit):
    """FlashDecoding with the fastest measured split count, an upper bound for split heuristics."""

    name = "fixed_split_oracle"
    title = "fixed_split with the fastest of all split counts worth measuring, timed in every cell"
    config_choice = "best"

    def candidate_configs(
        self, problem: AttentionProblem, gpu: GpuSpec
    ) -> list[FixedSplitTritonConfig | FixedSplitCudaConfig]:
        default = self.default_config(problem, gpu)
        tiles = TileGrid.of(problem, default.tile_tokens)
        if not isinstance(default, FixedSplitCudaConfig):
            counts = split_counts(tiles, gpu)
            return list(dict.fromkeys([default, *(replace(default, splits=n) for n in counts)]))
        of_ctas_and_clusters = (
            replace(default, cluster_size=cluster, splits=splits)
            for cluster in sorted({1, default.cluster_size})
            for splits in split_counts(tiles, gpu, cluster)
        )
        return list(dict.fromkeys([default, *of_ctas_and_clusters]))


KERNELS = (FixedSplit(), _TRITON, _CUDA, FixedSplitOracle())
