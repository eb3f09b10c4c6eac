"""Features of a problem: a calibration names those of the rows that it was compared with."""

from __future__ import annotations

from leanbench.core.axes import AXES
from leanbench.core.kinds import SAME
from leanbench.core.problem import AttentionProblem

#: Axes whose values, whatever they are, make another build of a kernel.
_MASKS = ("window_left", "causal", "softcap", "sinks", "alibi", "leftpad", "batch_idx")


def features(problem: AttentionProblem) -> tuple[str, ...]:
    """What else than its size makes a kernel take another way through its code, in words."""
    return (
        f"head_dim {problem.head_dim}",
        f"kv_layout {problem.kv_layout}",
        f"q_len {problem.q_len}",
        "a contiguous cache" if problem.page_size is None else "a paged cache",
        f"lengths on the {problem.lengths_on}",
        *(AXES[name].title for name in _MASKS if name in problem.special),
        *(("an fp8 cache",) if problem.kv_dtype != SAME else ()),
    )
