"""FlashDecoding: every output tile in the same number of equal splits, merged by a second kernel
(Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.kernels.configs import SHARED_RESERVE_KB, shared_kb, stages_that_fit
from leanbench.kernels.launch import TritonKernel, TritonLaunch

from leanbench.core.decomposition import Schedule, TileGrid, fixed_split, fixed_split_heuristic
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import KernelConfig

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: (tile_tokens, num_warps, num_stages) that `--configs best` tries with every split count.
_TILES = ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 8, 2))


class FixedSplit(TritonKernel):
    name = "fixed_split"
    title = (
        "FlashDecoding's decomposition: equal splits and a second kernel that merges them (Triton)"
    )
    decomposition = "fixed_split"
    source = "Dao, Haziza, Massa, Sizov 2023, Flash-Decoding; this project's Triton kernel"

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        # The fastest on an H200 over 24 problems, each with its best split count.
        tile_tokens, stages = (128, 3) if problem.head_dim <= 64 else (64, 4)
        stages = stages_that_fit(problem, tile_tokens, stages, gpu)
        config = KernelConfig(tile_tokens, num_warps=4, num_stages=stages)
        return replace(config, splits=self._heuristic_splits(problem, config, gpu))

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        candidates = [self.default_config(problem, gpu)]
        for tile_tokens, num_warps, num_stages in _TILES:
            if stages_that_fit(problem, tile_tokens, num_stages, gpu) < num_stages:
                continue
            for splits in split_counts(problem, tile_tokens, gpu):
                candidates.append(KernelConfig(tile_tokens, num_warps, num_stages, splits=splits))
        return list(dict.fromkeys(candidates))

    def schedule(
        self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec
    ) -> Schedule:
        assert config is not None
        assert config.splits is not None
        return fixed_split(TileGrid.of(problem, config.tile_tokens), config.splits)

    def launches(self, inputs: AttentionInputs, config: KernelConfig) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fixed_split.triton import launches

        return launches(inputs, config)

    @staticmethod
    def _heuristic_splits(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> int:
        tiles = TileGrid.of(problem, config.tile_tokens)
        cta_kb = shared_kb(problem, config.tile_tokens, config.num_stages, gpu) + SHARED_RESERVE_KB
        resident = max(1, int(gpu.shared_kb_per_sm / cta_kb))
        return fixed_split_heuristic(tiles.output_tiles, gpu.sms * resident, max(tiles.lean_tiles))


class FixedSplitOracle(FixedSplit):
    """Whatever heuristic a library has for its split count, it does no better than this."""

    name = "fixed_split_oracle"
    title = "fixed_split with the fastest of all split counts worth measuring, timed in every cell"
    config_choice = "best"

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        default = self.default_config(problem, gpu)
        counts = split_counts(problem, default.tile_tokens, gpu)
        return list(
            dict.fromkeys([default, *(replace(default, splits=splits) for splits in counts)])
        )


def split_counts(problem: AttentionProblem, tile_tokens: int, gpu: GpuSpec) -> list[int]:
    """Split counts worth measuring: 1, and those that make from half a wave to eight waves
    of CTAs.
    """
    tiles = TileGrid.of(problem, tile_tokens)
    counts = {1}
    for waves in (0.5, 1, 1.5, 2, 3, 4, 6, 8):
        splits = int(gpu.sms * waves / tiles.output_tiles)
        counts.update((splits, splits + 1))
    return sorted(splits for splits in counts if 1 <= splits <= min(128, max(tiles.lean_tiles)))


KERNELS = (FixedSplit(), FixedSplitOracle())
