"""Problems as typed: what is understood, and that anything else is one sentence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leanbench.core.axes import parse_problem
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES, AttentionProblem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["h56", "n64k", "d64"], AttentionProblem(1, 56, 56, 65536, 64)),
        (["d64 n64k", "h56"], AttentionProblem(1, 56, 56, 65536, 64)),
        (["b4 h32/8 n4096 d128 bf16 NHD"], AttentionProblem(4, 32, 8, 4096, 128, "bf16", "NHD")),
        (
            ["H32/8", "N1M", "D128", "BF16", "nhd"],
            AttentionProblem(1, 32, 8, 1 << 20, 128, "bf16", "NHD"),
        ),
        (["h8", "n1k+300+64k", "d64"], AttentionProblem(3, 8, 8, (1024, 300, 65536), 64)),
        (["b3", "h8", "n7+7+7", "d64"], AttentionProblem(3, 8, 8, 7, 64)),
        (["h8", "n1k+16x2", "d64"], AttentionProblem(3, 8, 8, (1024, 16, 16), 64)),
        (
            ["h8", "n4k", "d64", "c4x", "device"],
            AttentionProblem(1, 8, 8, 4096, 64, capacity=16384, lengths_on="device"),
        ),
        (["h8", "n4k", "d64", "q2"], AttentionProblem(1, 8, 8, 4096, 64, q_len=2)),
        (["P64", "h8", "n4k", "d64"], AttentionProblem(1, 8, 8, 4096, 64, page_size=64)),
    ],
)
def test_words_in_any_order(words, problem):
    assert parse_problem(words) == problem


@pytest.mark.parametrize(
    ("words", "name", "value", "reason", "limit"),
    [
        ("", "problem", "", Reason.NEEDS, "h (heads) and n (context) and d (head_dim)"),
        ("h8 d64", "problem", "h8 d64", Reason.NEEDS, "n (context)"),
        ("h8 n4k d64 d128", "head_dim", "128", Reason.CONFLICT, "'64'"),
        ("h8 n4k d64 fp16 bf16", "dtype", "bf16", Reason.CONFLICT, "'fp16'"),
        *(
            (f"h8 n4k d64 {word}", "problem word", word, Reason.SYNTAX, None)
            for word in ("fp32", "heads", "p")
        ),
        ("h8,16 n4k d64", "heads", "8,16", Reason.TOO_MANY_VALUES, 1),
        ("h8 n1k:4k:x2 d64", "context", "1k:4k:x2", Reason.TOO_MANY_VALUES, 1),
        ("h8 n4k d64 p16,32", "page_size", "16,32", Reason.TOO_MANY_VALUES, 1),
        ("h8 n d64", "context", "", Reason.EMPTY_ENTRY, None),
        ("h8 n1k++2k d64", "context", "1k++2k", Reason.SYNTAX, None),
        ("b16 h8 nragged64x99 d64", "context", "ragged64x99", Reason.SYNTAX, None),
        ("b2 h8 n1k+2k+3k d64", "number of context lengths", 3, Reason.NOT_ONE_EACH, 2),
        ("h8 n4k d100", "head_dim", 100, Reason.NOT_A_MULTIPLE, 8),
        ("h32/5 n4k d64", "heads", "32/5", Reason.UNEVEN_HEADS, None),
        ("h8 n0 d64", "context", "0", Reason.BELOW_MINIMUM, 1),
        ("h8 n-5 d64", "context", "-5", Reason.BELOW_MINIMUM, 1),
        ("b2m h8 n1 d64", "batch", "2m", Reason.ABOVE_MAXIMUM, 2**20),
    ],
)
def test_invalid_words(words, name, value, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        parse_problem(words.split())
    error = caught.value
    assert (error.name, error.value, error.reason, error.limit) == (name, value, reason, limit)


@given(
    st.integers(1, 500),
    st.integers(1, 200),
    st.integers(1, 16),
    st.integers(1, 2**31 - 1),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(DTYPES),
    st.sampled_from(KV_LAYOUTS),
    st.integers(1, 16),
    st.sampled_from((None, *PAGE_SIZES)),
    st.randoms(use_true_random=False),
)
def test_a_label_is_read_back(
    batch, kv_heads, group, context, head_dim, dtype, kv_layout, q_len, page_size, random
):
    problem = AttentionProblem(
        batch, kv_heads * group, kv_heads, context, head_dim, dtype, kv_layout, q_len, page_size
    )
    assert parse_problem([problem.label]) == problem
    words = problem.label.split()
    random.shuffle(words)
    assert parse_problem(words) == problem


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=20))
def test_a_length_per_sequence(lengths):
    problem = parse_problem(["h8", f"n{'+'.join(map(str, lengths))}", "d64"])
    assert (problem.batch, problem.contexts) == (len(lengths), tuple(lengths))


_near_words = st.from_regex(r"[bhndqpBHN]?[0-9km/+:,x.-]{0,8}", fullmatch=True) | st.text(
    max_size=12
)


@given(
    st.lists(_near_words, max_size=8).map(lambda words: ["h8 n4k d64", *words])
    | st.lists(_near_words, max_size=8)
)
@example(["h1 n1 d64", "b2147483647"])
@example(["h2147483647/2147483647 n2147483647 d256"])
def test_any_words_are_a_problem_or_a_user_error(words):
    with contextlib.suppress(UserError):
        parse_problem(words)
