"""Contiguous caches that are larger than a call: rows that no sequence has, and rotary tables that
are shorter than they.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forms import half, numbers, rand

from leanbench.attention import checks, lean_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("prepared_for", "latent")
ROOM, LENGTHS = 30, numbers(9, 17)


def caches(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of two sequences, with NaN in all rows that are not theirs."""
    k, v = rand(rows, ROOM, 2, 64), rand(rows, ROOM, 2, 64)
    k[2:], v[2:] = math.nan, math.nan
    return k, v
    k[2:], v[2:] = math.nan, math.nan
    return k, v


@pytest.mark.parametrize("checks_values", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"cache_seqlens": 9},
        {"cache_seqlens": LENGTHS},
        {"cache_seqlens": LENGTHS, "k": rand(2, 3, 2, 64), "v": rand(2, 3, 2, 64)},
        {"cache_seqlens": LENGTHS, "window_size": (5, 0), "cache_leftpad": LENGTHS // 4},
        {"cache_seqlens": 9, "qv": rand(2, 3, 4, 64)},
        {},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_rows_past_the_batch_are_not_read(options, checks_values, prepared_for, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS_VALUES", checks_values)
    k, v = caches(5)
    q = rand(2, 3, 4, 64)
    own_k, own_v = k[:2].clone(), v[:2].clone()
    options = {"causal": True, "return_softmax_lse": True, **options}
    expected = lean_attn_with_kvcache(q, own_k, own_v, **options)
    for _ in range(2):
        out, lse = lean_attn_with_kvcache(q, k, v, **options)
        assert not out.isnan().any()
        assert out.equal(expected[0])
        assert lse.equal(expected[1])
    # What is appended is the caller's.
    assert k[:2].equal(own_k)
    assert v[:2].equal(own_v)
    assert k[2:].isnan().all()
    assert prepared_for[-1].k_cache.shape[0] == 2


def test_rows_past_the_batch_under_torch_compile_and_of_no_query_tokens():
    torch._dynamo.reset()
    k, v = caches(5)
    q, new = rand(2, 3, 4, 64), rand(2, 3, 2, 64)
    own_k, own_v = k[:2].clone(), v[:2].clone()
    expected = lean_attn_with_kvcache(q, own_k, own_v, new, new, cache_seqlens=LENGTHS)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return lean_attn_with_kvcache(q, k, v, new, new, cache_seqlens=LENGTHS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v).equal(expected)
    assert k[:2].equal(own_k)
    none = lean_attn_with_kvcache(q[:, :0], k, v, cache_seqlens=LENGTHS)
    assert isinstance(none, torch.Tensor)
    assert none.shape == (2, 0, 4, 64)


def test_packed_queries_have_every_row():
    k, v = caches(5)
    packed: Any = {"cu_seqlens_q": numbers(0, 3, 6), "max_seqlen_q": 3}
    with pytest.raises(ValueError, match=r"cu_seqlens_q has 3 numbers, k_cache .* has 5 sequences"):
        lean_attn_with_kvcache(half(6, 4, 64), k, v, **packed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lengths", [9, LENGTHS], ids=["host", "device"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_tables_shorter_than_the_cache(lengths, interleaved, is_compiled):
    torch._dynamo.reset()
    k, v = rand(2, ROOM, 2, 64), rand(2, ROOM, 2, 64)
    q, new_k, new_v = rand(2, 3, 4, 64), rand(2, 3, 2, 64), rand(2, 3, 2, 64)
    angles = torch.randn(ROOM, 16)
    cos, sin = angles.cos().half(), angles.sin().half()

    def call(rows: int) -> tuple[torch.Tensor, ...]:
        own_k, own_v = k.clone(), v.clone()

        def attend(own_k: torch.Tensor, own_v: torch.Tensor) -> Any:
            return lean_attn_with_kvcache(
                *(q, own_k, own_v, new_k, new_v, cos[:rows], sin[:rows]),
                cache_seqlens=lengths,
                causal=True,
                rotary_interleaved=interleaved,
            )

        if is_compiled:
            attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        return attend(own_k, own_v), own_k, own_v

    whole, short = call(ROOM), call(20)
    # Rounded once more by torch's operators than by the kernel's own rotation.
    for one, other in zip(whole, short, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert not short[1].equal(k)
