"""Launch settings of mla.cu."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.kernels.lean.configs import BuildKey

from leanbench.core.config import KernelConfig, number, optional_number, switch


@dataclass(frozen=True)
class MlaConfig(KernelConfig):
    #: Minimum stages (64 tokens) of a work range, unless the context is shorter.
    min_tiles_per_cta: int = number(1, 64)
    #: Prevent work ranges from crossing output tiles, unless the SMs left idle cost more than
    #: partials.
    align_grid: bool = switch()
    #: CTAs with the same rows and tokens, each with a share of the output's columns. Each computes
    #: all scores and merges only its columns. Caches in fp8 require 1.
    column_groups: int = optional_number(1, 4, unused=1, power_of_two=True)

    @property
    def build_key(self) -> BuildKey:
        return BuildKey("cuda", (self.column_groups,))
