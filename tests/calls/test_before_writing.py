"""Calls that are refused leave the caches as they were, and odd arguments get a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forms import INT32, half, numbers

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.attention.compat import Rows
from leanbench.core.errors import UserError

pytestmark = pytest.mark.usefixtures("prepared_for", "latent")
Q, NEW = half(2, 1, 4, 64) + 1, half(2, 1, 2, 64) + 1


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        # Traced.
        (
            {"q": torch.nn.Parameter(Q, requires_grad=False), "out": half(2, 1, 4, 32)},
            ValueError,
            r"out is \(2, 1, 4, 32\)",
        ),
        ({"out": half(2, 1, 4, 64).requires_grad_()}, NotImplementedError, "has no gradient"),
        ({}, UserError, "the tensors are on cpu"),
    ],
)
def test_a_refused_append_writes_nothing(arguments, error, sentence, monkeypatch):
    if error is UserError:
        monkeypatch.delenv("TRITON_INTERPRET")
    caches = {"k_cache": half(2, 40, 2, 64), "v_cache": half(2, 40, 2, 64)}
    call = {"q": Q, **caches, "k": NEW, "v": NEW, "cache_seqlens": 3, **arguments}
    with pytest.raises(error, match=sentence):
        lean_attn_with_kvcache(**call)
    assert not caches["k_cache"].any()
    assert not caches["v_cache"].any()


def test_pages_past_the_end_are_not_followed_where_nothing_is_appended():
    k, v = torch.randn(3, 4, 1, 64).half(), torch.randn(3, 4, 1, 64).half()
    before, q, new = (k.clone(), v.clone()), torch.randn(1, 1, 2, 64).half(), half(1, 1, 64)
    table = numbers(0, 2**31 - 1).view(1, 2)
    options: dict[str, Any] = {"cache_seqlens": numbers(4), "block_table": table}
    out = lean_attn_with_kvcache(q, k, v, new, new, cu_seqlens_k_new=numbers(0, 0), **options)
    torch.testing.assert_close(out, lean_attn_with_kvcache(q, k, v, **options))
    assert (k.equal(before[0]), v.equal(before[1])) == (True, True)


@pytest.mark.parametrize("most", [1, 3, 4])
def test_query_tokens_beyond_the_most_are_left_unwritten(most):
    starts, out, lse = numbers(0, 3, 7), half(7, 2, 8) + 5, torch.full((2, 7), 5.0)
    rows = Rows(starts, 7, most)
    q = torch.arange(7.0)[:, None, None].expand(7, 2, 8).half()
    rows.pack(rows.unpack(q), torch.ones(2, 2, most), out, lse)
    places = [*range(3), *range(4)]
    is_written = torch.tensor(
        [own - place <= most for own, place in zip([3] * 3 + [4] * 4, places, strict=True)]
    )
    assert out[is_written].equal(q[is_written])
    assert out[~is_written].eq(5).all()
    assert lse.eq(torch.where(is_written, 1.0, 5.0)).all()


def test_heads_of_a_latent_cache_that_are_not_aligned_are_refused_before_any_launch(latent):
    memory = torch.zeros(2 * (40 * 576 + 8), dtype=torch.bfloat16)
    cache = memory.as_strided((1, 40, 2, 576), (2 * (40 * 576 + 8), 576, 40 * 576 + 1, 1))
    with pytest.raises(ValueError, match="from head to head"):
        lean_mla_with_kvcache(torch.randn(1, 1, 4, 576).bfloat16(), cache, numbers(9))
    assert not latent


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"softmax_scale": 10**400}, "softmax_scale is of type int: expected a number"),
        ({"softcap": 10**400}, "softcap is of type int: expected 0 for none"),
        ({"softcap": torch.zeros(2)}, "softcap is tensor"),
        ({"batch_invariant": np.array([True, False])}, "batch_invariant is array"),
        ({"return_softmax_lse": "yes"}, "return_softmax_lse is 'yes': expected True or False"),
        ({"causal": np.array([True, False])}, "causal is array"),
        ({"max_seqlen_q": True, "cu_seqlens_q": numbers(0, 1)}, "max_seqlen_q is True"),
        ({"cu_seqlens_q": torch.tensor(0, dtype=INT32)}, r"cu_seqlens_q is \(\): expected"),
        ({"k": np.zeros((50, 50)), "v": half(1)}, "k is of type ndarray: expected a tensor"),
        (
            {"k": half(1, 0, 2, 64), "v": half(1, 0, 2, 64), "cache_seqlens": 3},
            r"k is \(1, 0, 2, 64\), which has a size 0: leave k and v out",
        ),
        (
            {**dict.fromkeys("kv", half(1, 2, 64)), "cu_seqlens_k_new": [0, 1], "cache_seqlens": 3},
            r"cu_seqlens_k_new is \[0, 1\]: expected a tensor",
        ),
    ],
)
def test_odd_arguments_get_a_sentence(options, sentence):
    packed = "cu_seqlens_q" in options
    q, cache = half(1, 4, 64) if packed else half(1, 1, 4, 64), half(1, 40, 2, 64)
    with pytest.raises(ValueError, match=sentence) as caught:
        lean_attn_with_kvcache(q, cache, cache.clone(), **options)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"return_softmax_lse": [True]}, r"return_softmax_lse is \[True\]: expected True or False"),
        ({"head_dim_v": torch.tensor([512, 1])}, "only 512 is supported"),
        ({"softmax_scale": 10**400}, "softmax_scale is of type int: pass a number above 0"),
    ],
)
def test_odd_arguments_of_latent_calls_get_one_too(options, sentence, latent):
    q, cache = torch.zeros(1, 1, 4, 576).bfloat16(), torch.zeros(1, 40, 576).bfloat16()
    with pytest.raises(ValueError, match=sentence):
        lean_mla_with_kvcache(q, cache, **options)
    assert not latent


@pytest.mark.parametrize("is_latent", [False, True])
def test_rows_of_a_block_table_two_billion_numbers_apart_are_refused(is_latent):
    """On the device `meta`, which has no memory."""
    table = torch.empty(1, dtype=INT32, device="meta").as_strided((2, 3), (1 << 31, 1))
    columns = 576 if is_latent else 64
    q = torch.empty(2, 1, 4, columns, dtype=torch.float16, device="meta")
    cache = torch.empty(6, 64, 1, columns, dtype=torch.float16, device="meta")
    caches = (cache,) if is_latent else (cache, cache)
    call: Any = lean_mla_with_kvcache if is_latent else lean_attn_with_kvcache
    with pytest.raises(ValueError, match="block_table steps by 2147483648 numbers from row to row"):
        call(q, *caches, cache_seqlens=9, block_table=table)
