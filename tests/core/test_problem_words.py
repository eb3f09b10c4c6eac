"""Problems as typed: what is understood, and that anything else is one sentence."""

from __future__ import annotations

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
def test_words_in_any_order(words: list[str], problem: AttentionProblem) -> None:
    assert parse_problem(words) == problem


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "",
            "the problem has no h (heads) and no n (context) and no d (head_dim): write for"
            " example h32/8 n4096 d128",
        ),
        ("h8 d64", "the problem has no n (context): write for example"),
        ("h8 n4k d64 d128", "head_dim is given twice, as '64' and '128': leave one of them out"),
        ("h8 n4k d64 fp16 bf16", "dtype is given twice"),
        ("h8 n4k d64 fp32", "problem word 'fp32' is not understood, write for example h32/8"),
        ("h8 n4k d64 heads", "problem word 'heads' is not understood"),
        ("h8,16 n4k d64", "heads has 2 values, a problem has one"),
        ("h8 n1k:4k:x2 d64", "context has 3 values, a problem has one"),
        ("h8 n d64", "context has an empty entry"),
        (
            "h8 n1k++2k d64",
            "context '1k++2k' lacks a number beside + or x, write",
        ),
        (
            "b16 h8 nragged65536x262144 d64",
            "does not say how long each sequence is: write a length for each, such as",
        ),
        (
            "b2 h8 n1k+2k+3k d64",
            "3 context lengths were given for a batch of 2: give one per sequence",
        ),
        ("h8 n4k d64 p16,32", "page_size has 2 values, a problem has one"),
        ("h8 n4k d64 p", "problem word 'p' is not understood"),
    ],
)
def test_bad_words_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_problem(words.split())
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        ("h8 n4k d100", "head_dim", Reason.NOT_A_MULTIPLE),
        ("h32/5 n4k d64", "heads", Reason.UNEVEN_HEADS),
        ("h8 n0 d64", "context", Reason.BELOW_MINIMUM),
        ("h8 n-5 d64", "context", Reason.BELOW_MINIMUM),
        ("b2m h8 n1 d64", "batch", Reason.ABOVE_MAXIMUM),
    ],
)
def test_invalid_values(words: str, name: str, reason: Reason) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_problem(words.split())
    assert (caught.value.name, caught.value.reason) == (name, reason)


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
) -> None:
    problem = AttentionProblem(
        batch, kv_heads * group, kv_heads, context, head_dim, dtype, kv_layout, q_len, page_size
    )
    assert parse_problem([problem.label]) == problem
    words = problem.label.split()
    random.shuffle(words)
    assert parse_problem(words) == problem


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=20))
def test_a_length_per_sequence(lengths: list[int]) -> None:
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
def test_anything_is_a_problem_or_a_sentence(words: list[str]) -> None:
    sentence = refusal(words)
    assert sentence is None or (sentence and "\n" not in sentence)


def refusal(words: list[str]) -> str | None:
    """The sentence, or None for a problem; anything else is raised."""
    try:
        parse_problem(words)
    except UserError as error:
        return str(error)
    return None
