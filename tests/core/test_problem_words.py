"""Problems as typed: what is understood, and that anything else is one sentence."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leanbench.core.axes import parse_problem
from leanbench.core.errors import InvalidValue, Reason, UserError
from leanbench.core.problem import AttentionProblem


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
        ("h8 n d64", "context", "", Reason.EMPTY_ENTRY, None),
        ("h8 n1k++2k d64", "context", "1k++2k", Reason.SYNTAX, None),
        ("b16 h8 nragged64x99 d64", "context", "ragged64x99", Reason.SYNTAX, None),
        ("b2 h8 n1k+2k+3k d64", "number of context lengths", 3, Reason.NOT_ONE_EACH, 2),
        ("h8 n4k d100", "head_dim", 100, Reason.NOT_A_MULTIPLE, 8),
        ("b2m h8 n1 d64", "batch", "2m", Reason.ABOVE_MAXIMUM, 2**20),
    ],
)
def test_invalid_words(words, name, value, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        parse_problem(words.split())
    error = caught.value
    assert (error.name, error.value, error.reason, error.limit) == (name, value, reason, limit)


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
