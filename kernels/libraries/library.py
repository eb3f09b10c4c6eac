"""What the adapters of libraries share."""

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


class LibraryKernel(Kernel):
    """A library's kernel behind the library's own launch settings."""

    decomposition = "other"
    is_peer = True
    #: The modules it is imported from, and what installs them.
    modules: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    #: The distribution whose version decides what runs, and the versions whose signatures the
    #: adapter was written for.
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
        """As `prepare_all`, of a single call."""
        return self.prepare_all([inputs], config)[0]

    def prepare_all(
        self, copies: Sequence[AttentionInputs], config: KernelConfig | None
    ) -> list[Callable[[], Any]]:
        """Calls the first: libraries compile and plan in the first call of a shape.

        Raises:
            UserError: the installed version lacks a function, or takes other arguments.
        """
        try:
            launches = self.launches(copies, config)
            launches[0]()
        except (ImportError, AttributeError, TypeError, OSError) as error:
            raise UserError(self._misfit(error)) from error
        return launches

    def prepare_planned(self, inputs: AttentionInputs, config: Any, plan: Any) -> Callable[[], Any]:
        """A launch that is not called yet, for a CUDA graph would keep the call; `plan` is None for
        a kernel that plans nothing.
        """
        return self.launches([inputs], config)[0]

    def launches(self, copies: Sequence[AttentionInputs], config: Any) -> list[Callable[[], Any]]:
        """What `prepare_all` hands out, not yet called; of a kernel that makes something once for
        all copies, by a method of its own.
        """
        return [self.launch(inputs, config) for inputs in copies]

    def launch(self, inputs: AttentionInputs, config: Any) -> Callable[[], Any]:
        """One of them, of a kernel whose copies share nothing."""
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
    """The handle of the stream that launches go to; 0, the default one's, without a GPU."""
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def lengths(inputs: AttentionInputs) -> torch.Tensor:
    """(batch,), int32, before the call, also where all are the same."""
    import torch

    if inputs.cache_seqlens is not None:
        return inputs.cache_seqlens
    return torch.full(
        (inputs.batch,),
        inputs.context - inputs.new_tokens,
        dtype=torch.int32,
        device=inputs.q.device,
    )
