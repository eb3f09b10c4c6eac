from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.axes import parse_problem
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES, AttentionProblem

GQA = AttentionProblem(batch=3, q_heads=32, kv_heads=8, context=1000, head_dim=128, q_len=2)
RAGGED = AttentionProblem(batch=3, q_heads=32, kv_heads=8, context=(1, 1000, 99), head_dim=128)


def test_figures_of_a_uniform_batch():
    assert (GQA.is_ragged, GQA.contexts, GQA.max_context, GQA.total_context) == (
        False,
        (1000,) * 3,
        1000,
        3000,
    )
    assert GQA.group_size == 4
    # K and V of 3000 tokens, 8 heads of 128 numbers of 2 bytes.
    assert GQA.kv_bytes == GQA.kv_allocated_bytes == 2 * 3000 * 8 * 128 * 2
    # 6 rows of 32 heads: 256 bytes of Q, as many of the output, 4 of the LSE.
    assert GQA.io_bytes == GQA.kv_bytes + 6 * 32 * (256 + 256 + 4)


def test_figures_of_a_ragged_batch():
    assert (RAGGED.is_ragged, RAGGED.contexts, RAGGED.max_context, RAGGED.total_context) == (
        True,
        (1, 1000, 99),
        1000,
        1100,
    )
    assert RAGGED.kv_bytes == 2 * 1100 * 8 * 128 * 2
    assert RAGGED.kv_allocated_bytes == 2 * 3000 * 8 * 128 * 2


def test_figures_of_a_paged_cache():
    paged = replace(RAGGED, page_size=64)
    assert paged.page_counts == (1, 16, 2)
    assert paged.kv_bytes == RAGGED.kv_bytes
    # Whole pages, and none for what a sequence does not have.
    assert paged.kv_allocated_bytes == 2 * 19 * 64 * 8 * 128 * 2


PLAIN = AttentionProblem(2, 8, 2, 100, 64)
TOKEN = 2 * 64 * 2 * 2  # bytes of K and V of a token


@pytest.mark.parametrize(
    ("kinds", "kv_bytes", "allocated", "io_bytes"),
    [
        ({}, 200 * TOKEN, 200 * TOKEN, 200 * TOKEN + 16 * 260),
        ({"window_left": 9}, 20 * TOKEN, 200 * TOKEN, 20 * TOKEN + 16 * 260),
        ({"window_left": 9, "q_len": 3}, 24 * TOKEN, 200 * TOKEN, 24 * TOKEN + 48 * 260),
        ({"window_left": 999}, 200 * TOKEN, 200 * TOKEN, 200 * TOKEN + 16 * 260),
        ({"window_left": 9, "q_lens": (1, 4)}, 23 * TOKEN, 200 * TOKEN, 23 * TOKEN + 40 * 260),
        # 18 and 37 tokens of padding.
        ({"leftpad": True}, 145 * TOKEN, 200 * TOKEN, 145 * TOKEN + 16 * 260),
        ({"batch_idx": True}, 200 * TOKEN, 300 * TOKEN, 200 * TOKEN + 16 * 260),
        ({"append": 3}, 200 * TOKEN, 200 * TOKEN, 206 * TOKEN + 16 * 260),
        ({"kv_dtype": "e4m3"}, 100 * TOKEN, 100 * TOKEN, 100 * TOKEN + 16 * 260),
        (
            {"kv_dtype": "e5m2", "q_dtype": "e4m3"},
            100 * TOKEN,
            100 * TOKEN,
            100 * TOKEN + 16 * 196,
        ),
        ({"v_head_dim": 32}, 150 * TOKEN, 150 * TOKEN, 150 * TOKEN + 16 * 196),
        # One KV head instead of two, and no V.
        (
            {"latent": True, "kv_heads": 1, "v_head_dim": 32, "kv_dtype": "e4m3"},
            25 * TOKEN,
            25 * TOKEN,
            25 * TOKEN + 16 * 196,
        ),
        (
            {"latent": True, "kv_heads": 1, "v_head_dim": 32},
            50 * TOKEN,
            50 * TOKEN,
            50 * TOKEN + 16 * 196,
        ),
    ],
)
def test_bytes_of_kinds(kinds, kv_bytes, allocated, io_bytes):
    problem = replace(PLAIN, **kinds)
    assert (problem.kv_bytes, problem.kv_allocated_bytes, problem.io_bytes) == (
        kv_bytes,
        allocated,
        io_bytes,
    )


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (
            {},
            "latent has one KV head for all query heads, kv_heads is 2: give heads 8/1",
        ),
        (
            {"kv_heads": 1, "v_head_dim": 72},
            "latent has V in the first columns of K, v_head_dim 72 is above head_dim 64: choose at"
            " most head_dim",
        ),
        (
            {"kv_heads": 1, "append": 1},
            "append 1 appends K and V, and latent has no V of its own: leave one of them out",
        ),
    ],
)
def test_what_no_latent_cache_has(kinds, sentence):
    with pytest.raises(UserError) as error:
        replace(PLAIN, latent=True, **kinds)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("kinds", "same"),
    [
        ({"causal": False, "window_right": 5}, {}),
        ({"q_len": 2, "window_right": 5}, {"q_len": 2}),
        ({"v_head_dim": 64}, {}),
        ({"rotary_interleaved": True}, {}),
        ({"q_lens": (3, 1), "q_len": 7}, {"q_lens": (3, 1)}),
    ],
)
def test_a_kind_is_written_in_one_way(kinds, same):
    assert replace(PLAIN, **kinds) == replace(PLAIN, **same)


def test_kinds_in_labels_and_json():
    kinds = {
        "q_lens": (1, 4),
        "causal": False,
        "window_left": 0,
        "window_right": 2,
        "softcap": 30.0,
        "sinks": True,
        "alibi": True,
        "leftpad": True,
        "batch_idx": True,
        "append": 2,
        "rotary_dim": 32,
        "rotary_interleaved": True,
        "v_head_dim": 32,
    }
    problem = replace(PLAIN, **kinds)
    assert problem.label == (
        "b2 h8/2 n100 d64 wl0 wr2 cap30 new2 rot32 dv32 ql1+4 fp16 HND noncausal sinks alibi"
        " leftpad batch-idx interleaved"
    )
    assert parse_problem(problem.label.split()) == problem
    assert AttentionProblem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
    assert problem.special == kinds
    fp8 = replace(PLAIN, kv_dtype="e5m2", q_dtype="e4m3")
    assert fp8.label == "b2 h8/2 n100 d64 kv-e5m2 q-e4m3 fp16 HND"
    assert parse_problem(fp8.label.split()) == fp8


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (AttentionProblem(1, 56, 56, 4096, 64), "b1 h56 n4096 d64 fp16 HND"),
        (GQA, "b3 h32/8 n1000 d128 q2 fp16 HND"),
        (RAGGED, "b3 h32/8 n1+1000+99 d128 fp16 HND"),
        (replace(RAGGED, batch=4, context=(9, 1, 7, 8)), "b4 h32/8 nragged9x25 d128 fp16 HND"),
        (
            replace(RAGGED, batch=5, context=(9, *(1,) * 4), capacity="4x"),
            "b5 h32/8 n9+1x4 d128 c36 fp16 HND",
        ),
        (
            AttentionProblem(2, 8, 8, 64, 64, capacity=100, lengths_on="device"),
            "b2 h8 n64 d64 c100 fp16 HND device",
        ),
        (AttentionProblem(2, 8, 1, 7, 80, "bf16", "NHD"), "b2 h8/1 n7 d80 bf16 NHD"),
        (AttentionProblem(1, 8, 8, 7, 80, page_size=16), "b1 h8 n7 d80 p16 fp16 HND"),
        (replace(GQA, page_size=256), "b3 h32/8 n1000 d128 q2 p256 fp16 HND"),
    ],
)
def test_labels(problem, label):
    assert problem.label == label


problems = st.builds(
    lambda kv_heads, group_size, contexts, ragged, *rest: AttentionProblem(
        len(contexts),
        kv_heads * group_size,
        kv_heads,
        tuple(contexts) if ragged else contexts[0],
        *rest,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(DTYPES),
    st.sampled_from(KV_LAYOUTS),
    st.integers(1, 16),
    st.sampled_from((None, *PAGE_SIZES)),
)


@given(problems)
def test_json_and_back(problem: AttentionProblem):
    back = AttentionProblem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert back == problem
    assert hash(back) == hash(problem)
    assert back.label == problem.label


def test_a_row_from_before_there_were_pages_is_read():
    assert "page_size" not in GQA.to_dict()
    before = {
        "batch": 3,
        "q_heads": 32,
        "kv_heads": 8,
        "context": 1000,
        "head_dim": 128,
        "q_len": 2,
    }
    assert AttentionProblem.from_dict(before) == GQA
    assert AttentionProblem.from_dict({**before, "page_size": 32}) == replace(GQA, page_size=32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 3.0}, "batch is no whole number"),
        ({"q_len": True}, "q_len is no whole number"),
        ({"context": [1, 2.5, 3]}, "context is no whole number"),
        ({"dtype": 16}, "dtype is no text"),
        ({"colour": 30.0, "taste": 7}, "no axis is called colour, taste"),
    ],
)
def test_fields_of_another_kind_are_no_problem(fields, words):
    with pytest.raises(TypeError) as error:
        AttentionProblem.from_dict({**GQA.to_dict(), **fields})
    assert str(error.value) == words


@given(problems)
def test_bytes_are_bounded(problem: AttentionProblem):
    most = problem.kv_bytes * problem.batch
    if problem.page_size is not None:
        most = problem.kv_bytes * problem.page_size
    assert problem.kv_bytes <= problem.kv_allocated_bytes <= most
    assert problem.io_bytes > problem.kv_bytes


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("batch", 0, Reason.BELOW_MINIMUM),
        ("q_heads", -8, Reason.BELOW_MINIMUM),
        ("kv_heads", 0, Reason.BELOW_MINIMUM),
        ("q_len", 0, Reason.BELOW_MINIMUM),
        ("page_size", 0, Reason.BELOW_MINIMUM),
        ("head_dim", 76, Reason.NOT_A_MULTIPLE),
        ("dtype", "fp32", Reason.UNSUPPORTED),
        ("kv_layout", "hnd", Reason.UNSUPPORTED),
        ("window_left", -2, Reason.BELOW_MINIMUM),
        ("softcap", -1.0, Reason.NOT_POSITIVE),
        ("sinks", 1, Reason.UNSUPPORTED),
    ],
)
def test_invalid_fields(name, value, reason):
    good: dict[str, Any] = {"batch": 2, "q_heads": 8, "kv_heads": 2, "context": 10, "head_dim": 64}
    with pytest.raises(InvalidValue) as caught:
        AttentionProblem(**{**good, name: value})
    error = caught.value
    assert (error.name, error.value, error.reason) == (name, value, reason)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"kv_heads": 3},
            "q_heads 8 is not a multiple of kv_heads 3: .* choose kv_heads that divides q_heads",
        ),
        ({"kv_heads": 16}, "q_heads 8 is not a multiple of kv_heads 16"),
        (
            {"context": (10,)},
            "1 context lengths were given for a batch of 2: give one per sequence",
        ),
        ({"context": ()}, "0 context lengths were given for a batch of 2"),
        ({"context": 0}, "context 0 is below 1: decode attends to at least one cached token"),
        ({"context": (10, -3)}, "context -3 is below 1"),
        ({"append": 11}, "append 11 is above the shortest context, 10 tokens with the appended"),
        ({"rotary_dim": 16}, "rotary_dim 16 rotates appended tokens, but append is none"),
        ({"rotary_dim": 80, "append": 1}, "rotary_dim 80 is above head_dim 64"),
        ({"rotary_dim": 16, "append": 1, "kv_dtype": "e4m3"}, "rotary_dim 16 rotates fp16 and"),
        ({"batch_idx": True, "page_size": 16}, "batch_idx picks rows of a contiguous cache"),
        ({"q_dtype": "e4m3"}, "q_dtype e4m3 needs an fp8 KV cache"),
        ({"q_lens": (1, 2, 3)}, "3 query lengths were given for a batch of 2"),
        ({"q_lens": (1, 0)}, r"q_lens \(1, 0\) is no number of tokens for each sequence"),
    ],
)
def test_bad_input_is_one_sentence(fields, sentence):
    good: dict[str, Any] = {"batch": 2, "q_heads": 8, "kv_heads": 2, "context": 10, "head_dim": 64}
    AttentionProblem(**good)
    with pytest.raises(UserError, match=f"^{sentence}"):
        AttentionProblem(**{**good, **fields})
