"""Calls that are refused leave the caches as they were, and odd arguments get a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import sentences
from forms import INT32, half, numbers, rand
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.triton_kernel import LeanTriton

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.attention import checks
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


@pytest.mark.parametrize("head_dim", [32, 60])
def test_a_launch_that_is_refused_after_an_append_restores_the_caches(head_dim, monkeypatch):
    """A soft cap needs the CUDA C++ kernel; new tokens are written before the launch."""
    monkeypatch.setattr(LEAN, "axes", LeanTriton.axes, raising=False)
    k, v = (rand(5, 16, 2, head_dim) for _ in "kv")
    before, new = (k.clone(), v.clone()), half(3, 2, head_dim) + 1
    options: dict[str, Any] = {
        "cache_seqlens": numbers(3, 31),
        "block_table": numbers(4, 2, 0, 1).view(2, 2),
        "cu_seqlens_k_new": numbers(0, 2, 3),
    }
    q = rand(2, 1, 4, head_dim)
    with pytest.raises(NotImplementedError):
        lean_attn_with_kvcache(q, k, v, new, new, softcap=3.0, **options)
    assert (k.equal(before[0]), v.equal(before[1])) == (True, True)
    lean_attn_with_kvcache(q, k, v, new, new, **options)
    for cache in (k, v):
        assert cache[4, 3:5].eq(1).all()
        assert cache[1, 15].eq(1).all()


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


ODD: list[dict[str, Any]] = [
    {"softmax_scale": 10**400},
    {"softcap": 10**400},
    {"softcap": torch.zeros(2)},
    {"batch_invariant": np.array([True, False])},
    {"return_softmax_lse": "yes"},
    {"causal": np.array([True, False])},
    {"max_seqlen_q": True, "q": half(1, 4, 64), "cu_seqlens_q": numbers(0, 1)},
    {"q": half(1, 4, 64), "cu_seqlens_q": torch.tensor(0, dtype=INT32)},
    {"q": half(1, 4, 64), "cu_seqlens_q": numbers()},
    {
        "q": half(1, 4, 64),
        "cu_seqlens_q": numbers(0, 1),
        "max_seqlen_q": "one",
        "window_size": (3, 5),
    },
    {"k": half(3), "v": half(1, 1, 2, 64), "cache_seqlens": 3},
    {
        **dict.fromkeys("kv", half(1, 1, 2, 64)),
        **dict.fromkeys(("rotary_cos", "rotary_sin"), torch.tensor(1.0).half()),
        "cache_seqlens": 3,
    },
    {"attention_chunk": torch.tensor([4, 8])},
    {"attention_chunk": None},
    {"attention_chunk": 1 << 31},
    {"shared_prefix": np.array([16, 16])},
    {"shared_prefix": False},
    {"k": np.zeros((50, 50)), "v": half(1)},
    {"k": half(1, 0, 2, 64), "v": half(1, 0, 2, 64), "cache_seqlens": 3},
    {**dict.fromkeys("kv", half(1, 2, 64)), "cu_seqlens_k_new": [0, 1], "cache_seqlens": 3},
]
ODD_LATENT: list[dict[str, Any]] = [
    {"return_softmax_lse": [True]},
    {"head_dim_v": torch.tensor([512, 1])},
    {"head_dim_v": np.array([512, 1])},
    {"q": torch.tensor(1.0).bfloat16()},
    {"kv_cache": torch.tensor(1.0).bfloat16()},
    {
        "q": torch.zeros(1, 1, 4, 576).to(torch.float8_e4m3fn),
        "kv_cache": torch.zeros(1, 40, 0, 576).to(torch.float8_e4m3fn),
        "q_descale": torch.ones(1, 0),
    },
    {"softmax_scale": 10**400},
]


def test_odd_arguments_get_a_sentence(snapshot, latent):
    """The snapshot has the sentence of each."""
    cache = half(1, 40, 2, 64)
    call = {"q": half(1, 1, 4, 64), "k_cache": cache, "v_cache": cache.clone()}
    assert sentences(ValueError, [{**call, **options} for options in ODD]) == snapshot
    call = {
        "q": torch.zeros(1, 1, 4, 576).bfloat16(),
        "kv_cache": torch.zeros(1, 40, 576).bfloat16(),
    }
    calls = [{**call, **options} for options in ODD_LATENT]
    assert sentences(ValueError, calls, lean_mla_with_kvcache) == snapshot
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


@pytest.mark.parametrize("checks_values", [False, True])
def test_tensors_without_memory_are_refused(checks_values, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS_VALUES", checks_values)
    q, cache, lengths = half(2, 1, 4, 64), half(2, 40, 2, 64), numbers(3, 5)
    tensors = [tensor.to("meta") for tensor in (q, cache, cache, lengths)]
    with pytest.raises(UserError, match="on meta"):
        lean_attn_with_kvcache(*tensors[:3], cache_seqlens=tensors[3])
