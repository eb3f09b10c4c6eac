"""What the adapters of kernels for latent caches share: caches of 576 columns, of which V is the
first 512.
"""

from __future__ import annotations

from leanbench.core.problem import AttentionProblem

VALUE_DIM = 512
HEAD_DIMS = (576,)


def latent_refusal(kernel: str, problem: AttentionProblem) -> str | None:
    """One sentence on a problem whose cache is not of this kind, or None."""
    if problem.latent and problem.value_dim == VALUE_DIM:
        return None
    return (
        f"{kernel} takes latent caches with v_head_dim {VALUE_DIM} alone: give latent and"
        f" v_head_dim {VALUE_DIM}"
    )
