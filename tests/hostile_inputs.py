"""Inputs that a kernel must survive: lengths outside of the cache, finite scores at the end of
fp32's range, NaN in K.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

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
