"""Forms of arguments that flash-attn's callers pass, each the same call as the plain form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import assert_right
from every_kind import PLAIN, called
from forms import assert_read_as_is, gapped, numbers, rand

from leanbench import get_scheduler_metadata
from leanbench.attention import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.core.inputs import make_inputs

pytestmark = pytest.mark.usefixtures("prepared_for")


BOTH_SIDES = {"causal": False, "window_left": 7, "window_right": 1}
METADATA = get_scheduler_metadata(2, 3, 40, 4, 2, 64, torch.float16, headdim_v=64, page_size=None)
#: Fields of a problem, and the arguments for it.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({}, {"window_size": window}) for window in (None, (None, None), (-1, None), (None, -1))),
    ({}, {"window_size": (np.int64(-1), np.int64(-1))}),
    ({"window_left": 7}, {"window_size": (7, None)}),
    (BOTH_SIDES, {"window_size": [7, 1]}),
    (BOTH_SIDES, {"window_size": np.array([7, 1])}),
    (BOTH_SIDES, {"window_size": torch.tensor([7, 1])}),
    ({"attention_chunk": 16}, {"attention_chunk": np.int64(16)}),
    *(({}, {"causal": flag}) for flag in (1, np.True_, torch.tensor(True), torch.tensor([1]))),
    # Without packed queries.
    ({}, {"max_seqlen_q": 3}),
    ({}, {"scheduler_metadata": METADATA, "num_splits": 3}),
    ({}, {"scheduler_metadata": torch.full((9,), -1, dtype=torch.int32), "pack_gqa": True}),
]


@pytest.mark.parametrize(("fields", "options"), FORMS, ids=[str(options) for _, options in FORMS])
def test_arguments_in_other_forms(fields, options):
    inputs = make_inputs(replace(PLAIN, **fields), "cpu")
    assert_right(inputs, *called(inputs, **options))


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
    starts = numbers(0, 2, 5)
    alone = [
        lean_attn_with_kvcache(own[None], cache[row : row + 1], cache[row : row + 1], causal=True)
        for row, own in enumerate(q.split([2, 3]))
    ]
    options: Any = {"causal": True, "cu_seqlens_q": starts, "max_seqlen_q": most}
    out = lean_attn_with_kvcache(q, cache, cache, **options)
    torch.testing.assert_close(out, torch.cat([own[0] for own in alone]))


@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (2, 1), (1, 2), (2,)], ids=lambda shape: f"{shape}"
)
def test_scales_that_expand(shape):
    inputs = make_inputs(replace(PLAIN, kv_dtype="e4m3", scaled=True), "cpu")
    scales = torch.rand(shape) + 0.5
    options: dict[str, Any] = {"v_descale": scales, "return_softmax_lse": True, "causal": True}
    q, k, v = inputs.q, inputs.k_cache, inputs.v_cache
    out, lse = lean_attn_with_kvcache(q, k, v, **options)
    expanded = {**options, "v_descale": scales.expand(2, 2)}
    whole, whole_lse = lean_attn_with_kvcache(q, k, v, **expanded)
    assert out.equal(whole)
    assert lse.equal(whole_lse)
    bare, _ = lean_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    assert not out.equal(bare)


#: A kind of call, and its tensors that numbers stand between.
SCATTERED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q": ({}, ("q",)),
    "lengths": ({"lengths_on": "device"}, ("cache_seqlens",)),
    "all of a window": ({"window_left": 7, "lengths_on": "device"}, ("q", "cache_seqlens")),
    "sinks": ({"sinks": True}, ("sinks",)),
    "ALiBi": ({"alibi": True}, ("alibi_slopes",)),
    "padding": ({"leftpad": True, "lengths_on": "device"}, ("cache_leftpad", "cache_seqlens")),
    "rows of the cache": ({"batch_idx": True}, ("cache_batch_idx",)),
    "pages": ({"page_size": 16, "context": (40, 17)}, ("block_table", "cache_seqlens")),
    "packed": ({"q_lens": (1, 4)}, ("q", "cu_seqlens_q")),
    "appended": ({"append": 2}, ("k_new", "v_new")),
    "appended to pages": (
        {"append": 2, "page_size": 16, "context": (40, 17)},
        ("k_new", "block_table"),
    ),
    "rotated": (
        {"append": 3, "rotary_dim": 32},
        ("q", "k_new", "v_new", "rotary_cos", "rotary_sin"),
    ),
    "fp8 throughout": ({"kv_dtype": "e5m2", "q_dtype": "e4m3", "dtype": "bf16"}, ("q",)),
    "packed rows alone": ({"q_lens": (1, 4), "sinks": True}, ("q", "sinks", "cu_seqlens_q")),
}


@pytest.mark.parametrize(("kinds", "names"), SCATTERED.values(), ids=SCATTERED)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_numbers_between_numbers(kinds, names, batch_invariant, prepared_for):
    options = {"batch_invariant": True, "config": None} if batch_invariant else {}
    for _ in range(2):
        inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
        odd = replace(inputs, **{name: gapped(getattr(inputs, name)) for name in names})
        assert_right(odd, *called(odd, **options))
    (inputs,) = prepared_for
    assert_read_as_is(inputs)


def test_torch_compile_takes_numbers_between_numbers():
    torch._dynamo.reset()
    kinds, names = SCATTERED["rotated"]
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
    odd = replace(inputs, **{name: gapped(getattr(inputs, name)) for name in names})
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    assert_right(odd, *compiled(odd))


@pytest.mark.parametrize("head_dim", [576, 160])
def test_torch_compile_takes_latent_caches_of_any_sizes(head_dim, latent):
    torch._dynamo.reset()
    compiled = torch.compile(
        lean_mla_with_kvcache, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for batch in (2, 3):
        q, cache = rand(batch, 2, 4, head_dim), rand(batch, 30, head_dim)
        out, expected = (
            function(q, cache, 17, causal=True) for function in (compiled, lean_mla_with_kvcache)
        )
        assert torch.equal(torch.as_tensor(out), torch.as_tensor(expected))


def test_caches_with_numbers_between_numbers_are_refused():
    """Reject them as flash-attn does: they would be copied whole in every call."""
    inputs = make_inputs(PLAIN, "cpu")
    for name in ("k_cache", "v_cache"):
        odd = replace(inputs, **{name: gapped(getattr(inputs, name))})
        with pytest.raises(ValueError, match=r"^the last strides of the caches are .* stride 1$"):
            called(odd)


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
        "cu_seqlens_q": numbers(0, 0, 0),
    },
    "no pages": {"q": rand(2, 3, 4, 64), "k_cache": CACHE[:0], "block_table": TABLE},
}


@pytest.mark.parametrize("arguments", NOTHING.values(), ids=NOTHING)
def test_calls_of_nothing(arguments, prepared_for):
    arguments = {**arguments, "v_cache": arguments["k_cache"], "cache_seqlens": 0}
    arguments["return_softmax_lse"] = True
    out, lse = lean_attn_with_kvcache(**arguments)
    q = arguments["q"]
    assert (out.shape, out.dtype) == (q.shape, torch.float16)
    assert out.eq(0).all()
    tokens_last = q.transpose(-3, -2).shape[:-1]
    assert lse.shape == tokens_last
    assert lse.eq(-math.inf).all()
    given, sinks = torch.full_like(out, math.nan), torch.arange(4.0)
    result, lse = lean_attn_with_kvcache(**arguments, out=given, sinks=sinks)
    assert result is given
    assert given.eq(0).all()
    assert lse.equal(sinks[:, None].expand(tokens_last))
    assert not prepared_for


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("lengths", [31, numbers()], ids=["host", "device"])
def test_no_sequences_with_a_block_table_are_like_none_without(columns, lengths):
    """A table of no sequences has any width, and a length is nobody's."""
    q, cache, table = rand(0, 3, 4, 64), rand(2, 16, 2, 64), TABLE[:0, :columns]
    options = {"cache_seqlens": lengths, "return_softmax_lse": True}
    latent, of_latent = rand(2, 64, 1, 576), rand(0, 3, 16, 576)
    paged = [
        *lean_attn_with_kvcache(q, cache, cache, block_table=table, **options),
        *lean_mla_with_kvcache(of_latent, latent, block_table=table, **options),
    ]
    plain = [
        *lean_attn_with_kvcache(q, cache[:0], cache[:0], **options),
        *lean_mla_with_kvcache(of_latent, latent[:0], **options),
    ]
    assert [result.shape for result in paged] == [result.shape for result in plain]
    assert [result.shape[0] for result in paged] == [0] * 4


def test_calls_of_nothing_are_checked():
    q, new, k, v = rand(2, 0, 4, 64), rand(2, 1, 2, 64), CACHE.clone(), CACHE.clone()
    with pytest.raises(ValueError, match=r"^sinks is \(3,\) "):
        lean_attn_with_kvcache(q, k, v, sinks=torch.zeros(3), return_softmax_lse=True)
    with pytest.raises(ValueError, match="no size 0"):
        lean_attn_with_kvcache(q, k, v, new, new, cache_seqlens=0)
