"""What the adapters of libraries share."""

from __future__ import annotations

from importlib.util import find_spec

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig


class LibraryKernel(Kernel):
    """A library's kernel behind the library's own launch settings."""

    decomposition = "other"
    #: The modules it is imported from, and what installs them.
    modules: tuple[str, ...] = ("torch",)
    install: str = "pip install torch"
    head_dims: tuple[int, ...]
    #: What else it can do.
    takes_ragged: bool = False
    takes_pages: bool = False
    takes_several_queries: bool = False

    def unavailable_reason(self) -> str | None:
        missing = [module for module in self.modules if find_spec(module) is None]
        if not missing:
            return None
        return f"{self.name} is not installed here (no module {', '.join(missing)}): {self.install}"

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        if problem.head_dim not in self.head_dims:
            known = ", ".join(map(str, self.head_dims))
            return f"{self.name} has no kernel for head_dim {problem.head_dim}, choose from {known}"
        if problem.q_len > 1 and not self.takes_several_queries:
            return f"{self.name} decodes one query token per sequence, this problem has q_len {problem.q_len}"
        if problem.page_size is not None and not self.takes_pages:
            return f"{self.name} takes no paged cache, this problem has page_size {problem.page_size}: leave it out"
        if problem.is_ragged and not self.takes_ragged:
            return f"{self.name} takes no ragged batch, all sequences must have the same context"
        return self.unavailable_reason()

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        return None
