"""FlashInfer in its best mode: the fastest of its kernels, timed in every cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs

#: FlashInfer's kernels by name, the one for any problem first.
_MODES = {
    mode.name: mode
    for mode in (
        FlashInfer(),
        FlashInferCudaCores(),
        FlashInferPersistent(),
        FlashInferSingle(),
        FlashInferSingleCudaCores(),
    )
}


@dataclass(frozen=True)
class FlashInferMode(KernelConfig):
    """Which of FlashInfer's kernels runs."""

    mode: str = word(*_MODES)


class FlashInferBest(FlashInferKernel):
    name = "flashinfer_best"
    title = "FlashInfer in the fastest of its modes, timed in every cell; the config names it"
    axes = FlashInfer.axes
    config_types = (FlashInferMode,)
    config_choice = "best"

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> FlashInferMode:
        return FlashInferMode(FlashInfer.name)

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[FlashInferMode]:
        return [
            FlashInferMode(name)
            for name, mode in _MODES.items()
            if mode.unsupported_reason(problem) is None
        ]

    def launch(self, inputs: AttentionInputs, config: FlashInferMode) -> Callable[[], Any]:
        return _MODES[config.mode].launch(inputs, None)

    def planner(self, inputs: AttentionInputs, config: FlashInferMode) -> Callable[[], Any] | None:
        return _MODES[config.mode].planner(inputs, None)
