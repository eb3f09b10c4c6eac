"""The launch settings that a call runs with when it brings none."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from leanbench.configs.lookup import Choice, choose
from leanbench.core.config import KernelConfig
from leanbench.core.extras import kinds_of
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.launch import problem_of, spec_of
from leanbench.kernels.lean import LEAN, LEAN_CUDA

#: Lengths between two multiples of this share their settings, and a launch: a sequence that grows
#: token by token finds both prepared.
LENGTHS_TOGETHER = 64


def settings_of(
    inputs: AttentionInputs, problem: AttentionProblem, batch_invariant: bool
) -> Choice:
    """The settings for these tensors, whatever numbers they hold.

    Args:
        problem: `shared_problem` of them.
    """
    spec, kernel = spec_of(inputs.q.device), _kernel_of(inputs)
    if batch_invariant:
        why = "these settings do not depend on the rest of the batch"
        return Choice(kernel.batch_invariant_config(problem, spec), "heuristic", why)
    return choose(kernel, problem, spec, uniform=inputs.cache_seqlens is None)


def all_but_capacity(inputs: AttentionInputs) -> Hashable:
    """What the settings in CUDA C++ for lengths on the device follow from: all that these tensors
    ask for but their capacity. It takes less host time than a problem.
    """
    k_cache = inputs.k_cache
    _, token_stride, head_stride, _ = k_cache.stride()
    return (
        inputs.q.device,
        inputs.out.dtype,
        inputs.batch,
        inputs.q_heads,
        inputs.q_len,
        k_cache.shape[2:],
        inputs.page_size,
        head_stride > token_stride,
        inputs.peers is None,
        *kinds_of(inputs).values(),
    )


def heuristic_of(inputs: AttentionInputs, problem: AttentionProblem) -> KernelConfig:
    """The settings for these tensors where tuned ones do not run; `problem` as of `settings_of`."""
    return _kernel_of(inputs).default_config(problem, spec_of(inputs.q.device))


def _kernel_of(inputs: AttentionInputs) -> Kernel[Any]:
    """CUDA C++ alone merges the partials of several GPUs."""
    return LEAN if inputs.peers is None else LEAN_CUDA


def lengths_with(length: int) -> range:
    """The lengths that share their settings with `length`: itself alone where it is a multiple of
    `LENGTHS_TOGETHER`, or those between two of them.
    """
    whole, rest = divmod(length, LENGTHS_TOGETHER)
    first = whole * LENGTHS_TOGETHER
    return range(first + 1, first + LENGTHS_TOGETHER) if rest else range(length, length + 1)


def shared_problem(inputs: AttentionInputs) -> AttentionProblem:
    """What these tensors ask for, with the longest of the lengths that share their settings."""
    if inputs.cache_seqlens is not None:
        return problem_of(inputs)
    longest = lengths_with(inputs.context)[-1]
    return problem_of(inputs, longest)
