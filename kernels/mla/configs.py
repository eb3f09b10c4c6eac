"""What a caller may choose of a launch of mla.cu."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.core.config import KernelConfig, number, switch


@dataclass(frozen=True)
class MlaConfig(KernelConfig):
    """Launch settings of lean_mla."""

    #: Work ranges are no shorter than this many stages of 64 tokens, unless the context is.
    min_tiles_per_cta: int = number(1, 64)
    #: The grid is rounded down to a multiple of the output tiles, so that no work range crosses
    #: from one to the next.
    align_grid: bool = switch()
