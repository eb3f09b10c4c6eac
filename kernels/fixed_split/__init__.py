"""FlashDecoding: every output tile in the same number of equal splits, merged by a second kernel
(Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.kernels.fixed_split.configs import (
    FixedSplitConfig,
    candidates,
    heuristic,
    split_counts,
)
from leanbench.kernels.launch import TritonLaunch
from leanbench.kernels.triton_kernel import TritonKernel

from leanbench.core.decomposition import Schedule, TileGrid, fixed_split
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class FixedSplit(TritonKernel[FixedSplitConfig]):
    name = "fixed_split"
    title = (
        "FlashDecoding's decomposition: equal splits and a second kernel that merges them (Triton)"
    )
    decomposition = "fixed_split"
    source = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; this project's Triton kernel"

    config_types = (FixedSplitConfig,)
    axes = TritonKernel.axes | {"window_left", "softcap"}

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FixedSplitConfig:
        return heuristic(problem, gpu)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[FixedSplitConfig]:
        return list(dict.fromkeys([heuristic(problem, gpu), *candidates(problem, gpu)]))

    def schedule(
        self, problem: AttentionProblem, config: FixedSplitConfig, gpu: GpuSpec
    ) -> Schedule:
        return fixed_split(TileGrid.of(problem, config.tile_tokens), config.splits)

    def launches(
        self, inputs: AttentionInputs, config: FixedSplitConfig
    ) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fixed_split.triton import launches

        return launches(inputs, config)


class FixedSplitOracle(FixedSplit):
    """FlashDecoding with its fastest split count, measured: no library's heuristic does better."""

    name = "fixed_split_oracle"
    title = "fixed_split with the fastest of all split counts worth measuring, timed in every cell"
    config_choice = "best"

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[FixedSplitConfig]:
        default = self.default_config(problem, gpu)
        counts = split_counts(problem, default.tile_tokens, gpu)
        return list(
            dict.fromkeys([default, *(replace(default, splits=splits) for splits in counts)])
        )


KERNELS = (FixedSplit(), FixedSplitOracle())
