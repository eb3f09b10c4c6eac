"""Why a kernel cannot be the attention of a whole model."""

from __future__ import annotations

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem


def refusal(kernel: Kernel, problem: AttentionProblem, request: str | KernelConfig) -> str | None:
    """One sentence, or None."""
    if request == "best":
        return (
            f"{kernel.name} would be timed with each of its settings, which whole models are not:"
            " choose --configs default or heuristic, and a kernel that is not always the best of"
            " several"
        )
    return kernel.unsupported_reason(problem)
