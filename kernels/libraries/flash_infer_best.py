"""FlashInfer in its best mode."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.kernels.libraries.best_mode import BestMode
from leanbench.kernels.libraries.flash_infer import (
    FlashInfer,
    FlashInferCudaCores,
    FlashInferKernel,
    FlashInferPersistent,
)
from leanbench.kernels.libraries.flash_infer_single import (
    FlashInferSingle,
    FlashInferSingleCudaCores,
)

from leanbench.core.config import KernelConfig, word

#: The first takes any problem.
_MODES = (
    FlashInfer(),
    FlashInferCudaCores(),
    FlashInferPersistent(),
    FlashInferSingle(),
    FlashInferSingleCudaCores(),
)


@dataclass(frozen=True)
class FlashInferMode(KernelConfig):
    """Kernel of FlashInfer that runs."""

    mode: str = word(*(mode.name for mode in _MODES))


class FlashInferBest(BestMode, FlashInferKernel):
    name = "flashinfer_best"
    title = (
        "FlashInfer in the fastest of its modes that are right, timed in every cell; the config"
        " names it"
    )
    modes = _MODES
    axes = FlashInfer.axes
    config_types = (FlashInferMode,)
