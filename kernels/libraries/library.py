"""Common base of library adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Maximum of query tokens of libraries that prefill whole prompts, here: their own is higher.
MAX_PROMPT = 1 << 16


class LibraryKernel(Kernel):
    """A library's kernel with the library's own launch settings."""

    decomposition = "other"
    is_peer = True
    #: Modules to import, and the command that installs them.
    modules: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    #: Distribution with the kernel's code, and the version supported by the adapter.
    distribution: str = "torch"
    written_for: str = "2.13"
    axes = Kernel.axes | {"capacity"}

    def unavailable_reason(self) -> str | None:
        missing = [module for module in self.modules if find_spec(module) is None]
        if not missing:
            return None
        return f"{self.name} is not installed here (no module {', '.join(missing)}): {self.install}"

    def library(self) -> str:
        return f"{self.distribution} {installed_version(self.distribution)}"

    def refusal(self, problem: AttentionProblem) -> str | None:
        return self.unavailable_reason()

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        return None

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        """Prepare a single call; see `prepare_all`."""
        return self.prepare_all([inputs], config)[0]

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: KernelConfig | None
    ) -> list[Callable[[], Any]]:
        """Prepare all copies and call the first.

        Libraries compile and plan in the first call of a shape.

        Raises:
            UserError: the installed version lacks a function or takes other arguments.
        """
        try:
            launches = self.launches(copies, config)
            launches[0]()
        except (ImportError, AttributeError, TypeError, OSError) as error:
            raise UserError(self._misfit(error)) from error
        return launches

    def prepare_planned(self, inputs: AttentionInputs, config: Any, plan: Any) -> Callable[[], Any]:
        """Prepare a launch without calling it, because a CUDA graph would record the call.

        `plan` is None for kernels without a plan.
        """
        return self.launches([inputs], config)[0]

    def launches(self, copies: Sequence[AttentionInputs], config: Any) -> list[Callable[[], Any]]:
        """Return a launch per copy. Override it to share work between copies."""
        return [self.launch(inputs, config) for inputs in copies]

    def launch(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        """Return one launch. Override it if copies share nothing."""
        raise NotImplementedError(f"{self.name} makes its launches together")

    def _misfit(self, error: Exception) -> str:
        reason = (str(error).splitlines() or [""])[0]
        return (
            f"{self.name} cannot call {self.library()} ({type(error).__name__}:"
            f" {reason}): it was written for {self.written_for}, install that or leave"
            f" {self.name} out"
        )


def installed_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream; without a GPU 0, the default stream."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def lengths(inputs: AttentionInputs) -> torch.Tensor:
    """Return the lengths before the call, (batch,), int32, also if all are equal."""
    import torch

    if inputs.cache_seqlens is not None:
        return inputs.cache_seqlens
    return torch.full(
        (inputs.batch,),
        inputs.context - inputs.new_tokens,
        dtype=torch.int32,
        device=inputs.q.device,
    )
