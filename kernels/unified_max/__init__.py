"""FlashDecoding++'s softmax (Hong et al., 2023, arXiv 2311.01282, section 3).

All parts of all rows share one maximum, so no part waits for it. A part with scores outside the
exact range is recomputed as in FlashDecoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.kernels.fixed_split import FixedSplitTriton
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.launch import TritonLaunch

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class UnifiedMax(FixedSplitTriton):
    """The splits, launches and merge of `fixed_split` with a unified maximum, for comparison."""

    name = "unified_max"
    title = (
        "FlashDecoding++'s softmax in fixed_split: a unified maximum, parts out of its range"
        " computed again (Triton)"
    )
    source = "Hong et al. 2023, arXiv 2311.01282; this project's Triton kernel"

    def launches(
        self, inputs: AttentionInputs, config: FixedSplitTritonConfig
    ) -> tuple[TritonLaunch, ...]:
        from leanbench.kernels.fixed_split.triton import split_launches

        return split_launches(inputs, config, unified=True)


KERNELS = (UnifiedMax(),)
