"""The launch settings of the FlashAttention-2 decomposition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from leanbench.kernels.configs import stages_that_fit

from leanbench.core.config import TileConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem


@dataclass(frozen=True)
class Fa2Config(TileConfig):
    """A LeanTile, warps and stages."""


def heuristic(problem: AttentionProblem, gpu: GpuSpec) -> Fa2Config:
    """The fastest on an H200 over 24 problems: a lone CTA wants its whole SM's shared memory in
    flight.
    """
    tile_tokens, stages = (256, 4) if problem.head_dim <= 64 else (128, 3)
    if problem.head_dim > 128:
        tile_tokens = 64
    return Fa2Config(tile_tokens, 4, stages_that_fit(problem, tile_tokens, stages, gpu))


def candidates(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Fa2Config]:
    """LeanTile, warps and stages worth trying: those whose stages fit."""
    for tile_tokens, num_stages, num_warps in product((64, 128, 256), (2, 3, 4, 6), (4, 8)):
        if stages_that_fit(problem, tile_tokens, num_stages, gpu) == num_stages:
            yield Fa2Config(tile_tokens, num_warps, num_stages)
