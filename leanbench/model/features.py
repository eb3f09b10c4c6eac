"""Features of a problem: a calibration names those of the rows that it was compared with."""

from __future__ import annotations

from leanbench.core.problem import AttentionProblem


def features(problem: AttentionProblem) -> tuple[str, ...]:
    """What else than its size makes a kernel take another way through its code, in words."""
    return (
        f"head_dim {problem.head_dim}",
        f"kv_layout {problem.kv_layout}",
        f"q_len {problem.q_len}",
        "a contiguous cache" if problem.page_size is None else "a paged cache",
        f"lengths on the {problem.lengths_on}",
    )
