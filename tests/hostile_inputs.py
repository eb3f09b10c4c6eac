"""Inputs that a kernel must survive: lengths outside of the cache, finite scores at the end of
fp32's range, equal scores of any size, NaN and infinities in K and V.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.grid import set_equal_scores
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

#: Lengths beyond both ends of any cache, as in freed or uninitialized memory.
WILD_LENGTHS = (2**31 - 1, -5, 1 << 30, 33, -(2**31))


def wild_lengths(device: str, page_size: int | None) -> AttentionInputs:
    """Return sequences with lengths below 0 or past a cache of 96 tokens."""
    problem = AttentionProblem(5, 4, 2, 96, 64, page_size=page_size)
    lengths = torch.tensor(WILD_LENGTHS, dtype=torch.int32, device=device)
    return replace(make_inputs(problem, device), cache_seqlens=lengths)


def very_low_scores(device: str) -> AttentionInputs:
    """Return inputs with finite scores of -1.4e32 and one of -7e31; the output is its token's V."""
    inputs = make_inputs(AttentionProblem(1, 4, 2, 500, 64, "bf16"), device)
    inputs.q.fill_(3e15)
    inputs.k_cache.fill_(-6e15)
    inputs.k_cache[:, 137] = -3e15
    return inputs


#: q k of every token. 1e9 is below, 1e10 above the size at which products are rounded first.
EQUAL_SCORES = (1e9, 1e10, 1e12, -1e12, 1e30, -1e30)


def equal_scores(problem: AttentionProblem, device: str, score: float) -> AttentionInputs:
    """Return inputs with equal scores; the output is the mean of V."""
    inputs = make_inputs(problem, device)
    set_equal_scores(inputs, score)
    return inputs


def steep_scores(problem: AttentionProblem, device: str) -> AttentionInputs:
    """Return inputs in fp16 with scores of 2^27, and 16 more in the second half of a context.

    There, scores of 15 and 16 above the running maximum are indistinguishable.
    """
    inputs = make_inputs(problem, device)
    first = inputs.value_dim if inputs.latent else 0
    inputs.q.zero_()
    inputs.q[..., first], inputs.q[..., first + 1] = 2**14, 1
    inputs.k_cache[..., first:] = 0
    inputs.k_cache[..., first] = 2**13
    inputs.k_cache[:, inputs.context // 2 :, :, first + 1] = 16
    return replace(inputs, softmax_scale=math.log(2))


def nan_in_k(device: str, token: int) -> AttentionInputs:
    """Return inputs with NaN in K of one token of KV head 0, but not of KV head 1."""
    inputs = make_inputs(AttentionProblem(1, 4, 2, 500, 64), device)
    inputs.k_cache[0, token, 0] = math.nan
    return inputs


def assert_nan_of_kv_head_0(inputs: AttentionInputs) -> None:
    """Check that output and LSE are NaN only for query heads of KV head 0."""
    group = inputs.group_size
    assert inputs.out[:, :, :group].isnan().all()
    assert inputs.lse[:, :group].isnan().all()
    assert inputs.out[:, :, group:].isfinite().all()
    assert inputs.lse[:, group:].isfinite().all()


def inf_in_last_token(
    problem: AttentionProblem, device: str, cache: str
) -> tuple[AttentionInputs, AttentionInputs]:
    """Return inputs with infinities in `cache`, k_cache or v_cache, and inputs without, attended.

    They are in KV head 0 of the last token of the first sequence, which only its last query token
    sees.
    """
    inputs = make_inputs(problem, device, 1)
    expected = replace(inputs, out=inputs.out.clone(), lse=inputs.lse.clone())
    attend_all(expected)
    infinite = getattr(inputs, cache).clone()
    infinite[0, problem.contexts[0] - 1, 0] = math.inf
    return replace(inputs, **{cache: infinite}), expected


def assert_hidden(inputs: AttentionInputs, expected: AttentionInputs, cache: str) -> None:
    """Check what the infinities of `inf_in_last_token` must not change.

    In V, they may make other query tokens of the sequence's KV head NaN: 0 times infinity.
    """
    head, last = slice(inputs.group_size), slice(None) if cache == "v_cache" else slice(-1, None)
    for call in (inputs, expected):
        call.out[0, last, head] = 0
        if cache == "k_cache":
            call.lse[0, head, -1] = 0
    torch.testing.assert_close(inputs.out, expected.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(inputs.lse, expected.lse, atol=1e-3, rtol=1e-3)


def values_of_two_sizes(problem: AttentionProblem, device: str) -> AttentionInputs:
    """Return inputs of a latent cache with V of 1e30 in half of its columns, of 1e-30 in the other.

    Scores depend on the other columns of K alone.
    """
    inputs = make_inputs(problem, device, seed=1)
    inputs.q[..., : inputs.value_dim] = 0
    half = inputs.value_dim // 2
    inputs.k_cache[..., :half] *= 1e30
    inputs.k_cache[..., half : inputs.value_dim] *= 1e-30
    return inputs


def error_by_halves(inputs: AttentionInputs) -> float:
    """Return the larger relative error of the output's halves of columns, against fp64."""
    expected = replace(
        inputs, out=inputs.out.double(), lse=torch.empty_like(inputs.lse, dtype=torch.float64)
    )
    attend_all(expected)
    return max(
        float((own.double() - right).norm() / right.norm())
        for own, right in zip(inputs.out.chunk(2, -1), expected.out.chunk(2, -1), strict=True)
    )
