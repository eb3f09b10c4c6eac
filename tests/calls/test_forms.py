"""Forms of arguments that flash-attn's callers pass, each the same call as the plain form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import assert_right
from every_kind import PLAIN, called, take_every_kind

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.inputs import make_inputs


@pytest.fixture(autouse=True)
def prepared_for(monkeypatch):
    return take_every_kind(monkeypatch)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


@pytest.mark.parametrize(
    "window", [None, (None, None), (-1, None), (None, -1), (np.int64(-1), np.int64(-1))]
)
def test_no_window(window):
    inputs = make_inputs(PLAIN, "cpu")
    assert_right(inputs, *called(inputs, window_size=window))


def test_a_window_of_one_side():
    inputs = make_inputs(replace(PLAIN, window_left=7), "cpu")
    assert_right(inputs, *called(inputs, window_size=(7, None)))


@pytest.mark.parametrize("causal", [1, np.True_, torch.tensor(True), torch.tensor([1])])
def test_flags_of_other_types(causal):
    inputs = make_inputs(PLAIN, "cpu")
    assert_right(inputs, *called(inputs, causal=causal))


@pytest.mark.parametrize(
    ("causal", "error", "sentence"),
    [
        (torch.tensor([True, False]), NotImplementedError, r"causal of each sequence, .* \(2,\)"),
        ("yes", ValueError, "^causal is 'yes': expected True or False$"),
        (2, ValueError, "^causal is 2: expected True or False$"),
        (None, ValueError, "^causal is None: expected True or False$"),
    ],
)
def test_flags_that_are_none(causal, error, sentence):
    with pytest.raises(error, match=sentence):
        called(make_inputs(PLAIN, "cpu"), causal=causal)


@pytest.mark.parametrize("most", [None, 3, np.int64(3), 100])
def test_the_most_query_tokens_of_packed_ones(most):
    q, cache = rand(5, 4, 64), rand(2, 40, 2, 64)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    alone = [
        lean_attn_with_kvcache(own[None], cache[row : row + 1], cache[row : row + 1], causal=True)
        for row, own in enumerate(q.split([2, 3]))
    ]
    out = lean_attn_with_kvcache(
        q, cache, cache, causal=True, cu_seqlens_q=starts, max_seqlen_q=most
    )
    torch.testing.assert_close(out, torch.cat([own[0] for own in alone]))


def test_the_most_query_tokens_without_packed_ones_say_nothing():
    inputs = make_inputs(PLAIN, "cpu")
    assert_right(inputs, *called(inputs, max_seqlen_q=3))


@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (2, 1), (1, 2), (2,)], ids=lambda shape: f"{shape}"
)
def test_scales_that_expand(shape):
    inputs = make_inputs(replace(PLAIN, kv_dtype="e4m3", scaled=True), "cpu")
    scales = torch.rand(shape) + 0.5
    options: dict[str, Any] = {"v_descale": scales, "return_softmax_lse": True, "causal": True}
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    out, lse = lean_attn_with_kvcache(q, k, v, **options)
    whole, whole_lse = lean_attn_with_kvcache(
        q, k, v, **{**options, "v_descale": scales.expand(2, 2)}
    )
    assert out.equal(whole)
    assert lse.equal(whole_lse)
    bare, _ = lean_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    assert not out.equal(bare)


CACHE, TABLE = rand(2, 30, 2, 64), torch.zeros(2, 3, dtype=torch.int32)
NOTHING: dict[str, dict[str, Any]] = {
    "no cached tokens": {"q": rand(2, 3, 4, 64), "k_cache": rand(2, 0, 2, 64)},
    "no sequences": {"q": rand(0, 3, 4, 64), "k_cache": rand(0, 30, 2, 64)},
    "no sequences beside pages": {
        "q": rand(0, 3, 4, 64),
        "k_cache": CACHE,
        "block_table": TABLE[:0],
    },
    "no query tokens": {"q": rand(2, 0, 4, 64), "k_cache": CACHE},
    "no packed query tokens": {
        "q": rand(0, 4, 64),
        "k_cache": CACHE,
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.zeros(3, dtype=torch.int32),
    },
    "no pages": {"q": rand(2, 3, 4, 64), "k_cache": CACHE[:0], "block_table": TABLE},
}


@pytest.mark.parametrize("arguments", NOTHING.values(), ids=NOTHING)
def test_calls_of_nothing(arguments, prepared_for):
    arguments = {**arguments, "v_cache": arguments["k_cache"], "cache_seqlens": 0}
    out, lse = lean_attn_with_kvcache(**arguments, return_softmax_lse=True)
    q = arguments["q"]
    assert (out.shape, out.dtype) == (q.shape, torch.float16)
    assert out.eq(0).all()
    tokens_last = q.transpose(-3, -2).shape[:-1]
    assert lse.shape == tokens_last
    assert lse.eq(-math.inf).all()
    given = torch.full_like(out, math.nan)
    sinks = torch.arange(4.0)
    result, lse = lean_attn_with_kvcache(
        **arguments, return_softmax_lse=True, out=given, sinks=sinks
    )
    assert result is given
    assert given.eq(0).all()
    assert lse.equal(sinks[:, None].expand(tokens_last))
    assert not prepared_for


def test_sinks_of_nothing_are_checked():
    with pytest.raises(ValueError, match=r"^sinks is \(3,\) "):
        lean_attn_with_kvcache(
            rand(2, 0, 4, 64), CACHE, CACHE, sinks=torch.zeros(3), return_softmax_lse=True
        )


def test_nothing_that_tokens_are_appended_to_is_refused():
    new = rand(2, 1, 2, 64)
    with pytest.raises(ValueError, match="no size 0"):
        lean_attn_with_kvcache(rand(2, 0, 4, 64), CACHE, CACHE.clone(), new, new, cache_seqlens=0)
