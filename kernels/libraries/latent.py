"""Common code of adapters for latent caches: 576 columns; the first 512 are V."""

from __future__ import annotations

from leanbench.core.problem import AttentionProblem

VALUE_DIM = 512
HEAD_DIMS = (576,)


def latent_refusal(kernel: str, problem: AttentionProblem) -> str | None:
    """Return why a problem's cache is not of this kind, or None."""
    if problem.latent and problem.value_dim == VALUE_DIM:
        return None
    return (
        f"{kernel} takes latent caches with v_head_dim {VALUE_DIM} alone: give latent and"
        f" v_head_dim {VALUE_DIM}"
    )
