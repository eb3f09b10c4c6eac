"""Libraries in their best mode: the fastest of several of their kernels, timed in every cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.kernels.libraries.cudnn_frontend import CudnnFrontend, CudnnFrontendLse
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
from leanbench.kernels.libraries.library import LibraryKernel
from leanbench.kernels.libraries.sdpa import Cudnn, CudnnLse

from leanbench.core.config import KernelConfig, word
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.core.inputs import AttentionInputs


class BestMode(LibraryKernel):
    """Selection among modes. The config's field `mode` names the kernel that runs."""

    #: The first is named in a message if no mode takes a problem.
    modes: tuple[LibraryKernel, ...]
    config_choice = "best"

    def unavailable_reason(self) -> str | None:
        return self._own([mode.unavailable_reason() for mode in self.modes])

    def library(self) -> str:
        available = [mode for mode in self.modes if mode.unavailable_reason() is None]
        return "; ".join(dict.fromkeys(mode.library() for mode in available))

    def refusal(self, problem: AttentionProblem) -> str | None:
        return self._own([mode.unsupported_reason(problem) for mode in self.modes])

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
        able = self.candidate_configs(problem, gpu)
        return able[0] if able else self._config(self.modes[0])

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return [
            self._config(mode) for mode in self.modes if mode.unsupported_reason(problem) is None
        ]

    def launches(self, copies: Sequence[AttentionInputs], config: Any) -> list[Callable[[], Any]]:
        return self._mode(config).launches(copies, None)

    def planner(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any] | None:
        return self._mode(config).planner(inputs, None)

    def _own(self, reasons: list[str | None]) -> str | None:
        """Return the first mode's reason under this kernel's name, or None if a mode takes it."""
        first = reasons[0]
        if first is None or None in reasons:
            return None
        return f"{self.name}{first.removeprefix(self.modes[0].name)}"

    def _config(self, mode: LibraryKernel) -> KernelConfig:
        return self.read_config({"mode": mode.name})

    def _mode(self, config: Any) -> LibraryKernel:
        return next(mode for mode in self.modes if mode.name == config.mode)


_CUDNN_MODES = (Cudnn(), CudnnLse(), CudnnFrontend(), CudnnFrontendLse())


@dataclass(frozen=True)
class CudnnMode(KernelConfig):
    """API through which cuDNN is called."""

    mode: str = word(*(mode.name for mode in _CUDNN_MODES))


class CudnnBest(BestMode):
    """cuDNN in its best mode. Only the output is checked: not every mode writes an LSE."""

    name = "cudnn_best"
    title = (
        "cuDNN's attention, the fastest of torch's call and its own front end's, each with and"
        " without the LSE, timed in every cell; the config names it"
    )
    source = "NVIDIA cuDNN, the version that torch loads"
    modes = _CUDNN_MODES
    head_dims = CudnnFrontend.head_dims
    max_q_len = CudnnFrontend.max_q_len
    axes = CudnnFrontend.axes
    lse_base = None
    config_types = (CudnnMode,)


#: The first takes any problem.
_FLASHINFER_MODES = (
    FlashInfer(),
    FlashInferCudaCores(),
    FlashInferPersistent(),
    FlashInferSingle(),
    FlashInferSingleCudaCores(),
)


@dataclass(frozen=True)
class FlashInferMode(KernelConfig):
    """Kernel of FlashInfer that runs."""

    mode: str = word(*(mode.name for mode in _FLASHINFER_MODES))


class FlashInferBest(BestMode, FlashInferKernel):
    name = "flashinfer_best"
    title = (
        "FlashInfer in the fastest of its modes that are right, timed in every cell; the config"
        " names it"
    )
    modes = _FLASHINFER_MODES
    axes = FlashInfer.axes
    config_types = (FlashInferMode,)
