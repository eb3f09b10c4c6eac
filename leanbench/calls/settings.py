"""The launch settings that a call runs with when it brings none."""

from __future__ import annotations

from leanbench.calls.call import DTYPE_NAMES
from leanbench.configs.lookup import Choice, choose
from leanbench.core.config import KernelConfig
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.launch import spec_of
from leanbench.kernels.lean import LEAN

#: Lengths between two multiples of this share their settings, and a launch: a sequence that grows
#: token by token finds both prepared.
LENGTHS_TOGETHER = 64


def settings_of(inputs: AttentionInputs, batch_invariant: bool) -> Choice:
    """The settings for these tensors, whatever numbers they hold."""
    problem, spec = _problem_of(inputs), spec_of(inputs.q.device)
    if batch_invariant:
        why = "these settings do not depend on the rest of the batch"
        return Choice(LEAN.batch_invariant_config(problem, spec), "heuristic", why)
    return choose(LEAN, problem, spec, uniform=inputs.cache_seqlens is None)


def heuristic_of(inputs: AttentionInputs) -> KernelConfig:
    """The settings for these tensors where tuned ones do not run."""
    return LEAN.default_config(_problem_of(inputs), spec_of(inputs.q.device))


def lengths_with(length: int) -> range:
    """The lengths that share their settings with `length`: itself alone where it is a multiple of
    `LENGTHS_TOGETHER`, or those between two of them.
    """
    whole, rest = divmod(length, LENGTHS_TOGETHER)
    first = whole * LENGTHS_TOGETHER
    return range(first + 1, first + LENGTHS_TOGETHER) if rest else range(length, length + 1)


def _problem_of(inputs: AttentionInputs) -> AttentionProblem:
    batch, q_len, q_heads, head_dim = inputs.q.shape
    _, token_stride, head_stride, _ = inputs.k_cache.stride()
    context = inputs.context
    if inputs.cache_seqlens is None:
        # The longest that shares these settings.
        context = lengths_with(context)[-1]
    return AttentionProblem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=inputs.kv_heads,
        context=max(1, context),
        head_dim=head_dim,
        dtype=DTYPE_NAMES[inputs.q.dtype],
        # HND: a head's tokens lie next to each other.
        kv_layout="HND" if head_stride > token_stride else "NHD",
        q_len=q_len,
        page_size=inputs.page_size,
    )
