"""What a caller may choose of a launch of mla.cu."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.core.config import KernelConfig, number, optional_number, switch


@dataclass(frozen=True)
class MlaConfig(KernelConfig):
    """Launch settings of lean_mla."""

    #: Work ranges are no shorter than this many stages of 64 tokens, unless the context is.
    min_tiles_per_cta: int = number(1, 64)
    #: No work range crosses from an output tile to the next, unless the SMs that this leaves
    #: without work cost more than partials do.
    align_grid: bool = switch()
    #: CTAs that have the same rows and tokens, and a share of the output's columns each: scores are
    #: computed as often, and each merges so much less. 1 for caches in fp8.
    column_groups: int = optional_number(1, 4, unused=1, power_of_two=True)
