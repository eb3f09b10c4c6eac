"""Why a kernel cannot be the attention of a whole model."""

from __future__ import annotations

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.decode import BOUND


def refusal(kernel: Kernel, problem: AttentionProblem, request: str | KernelConfig) -> str | None:
    """One sentence, or None."""
    if request == "best":
        return (
            f"{kernel.name} would be timed with each of its settings, which whole models are not:"
            " choose --configs default or heuristic, and a kernel that is not always the best of"
            " several"
        )
    model = problem.model
    if kernel.name == BOUND and model is not None and problem.max_context <= model.max_positions:
        # It attends to nothing, whatever the layers' attention is.
        return None
    return kernel.unsupported_reason(problem)
