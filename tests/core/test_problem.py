import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.axes import parse_problem
from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, PAGE_SIZES, AttentionProblem

GQA = AttentionProblem(batch=3, q_heads=32, kv_heads=8, context=1000, head_dim=128, q_len=2)
RAGGED = AttentionProblem(batch=3, q_heads=32, kv_heads=8, context=(1, 1000, 99), head_dim=128)


def test_figures_of_batches_and_caches():
    assert (GQA.contexts, GQA.max_context, GQA.total_context) == ((1000,) * 3, 1000, 3000)
    assert GQA.group_size == 4
    # K and V of 3000 tokens, 8 heads of 128 numbers of 2 bytes.
    assert GQA.kv_bytes == GQA.kv_allocated_bytes == 2 * 3000 * 8 * 128 * 2
    # 6 rows of 32 heads: 256 bytes of Q, as many of the output, 4 of the LSE.
    assert GQA.io_bytes == GQA.kv_bytes + 6 * 32 * (256 + 256 + 4)
    assert (RAGGED.max_context, RAGGED.total_context) == (1000, 1100)
    assert RAGGED.contexts == (1, 1000, 99)
    assert RAGGED.kv_bytes == 2 * 1100 * 8 * 128 * 2
    assert RAGGED.kv_allocated_bytes == 2 * 3000 * 8 * 128 * 2
    paged = replace(RAGGED, page_size=64)
    assert paged.page_counts == (1, 16, 2)
    assert paged.kv_bytes == RAGGED.kv_bytes
    # Whole pages, and none for what a sequence does not have.
    assert paged.kv_allocated_bytes == 2 * 19 * 64 * 8 * 128 * 2


PLAIN = AttentionProblem(2, 8, 2, 100, 64)
MANY = replace(RAGGED, batch=5, context=(9, *(1,) * 4))
TOKEN = 2 * 64 * 2 * 2  # bytes of K and V of a token
E5M2_E4M3 = {"kv_dtype": "e5m2", "q_dtype": "e4m3"}
LATENT = {"latent": True, "kv_heads": 1, "v_head_dim": 32}
#: 128 numbers in e4m3, their scale, and 16 columns in bf16.
ROW_SCALES = {
    "latent": True,
    "kv_heads": 1,
    "head_dim": 144,
    "v_head_dim": 128,
    "dtype": "bf16",
    "kv_dtype": "e4m3",
    "page_size": 1,
    "row_scales": True,
}


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
        (E5M2_E4M3, 100 * TOKEN, 100 * TOKEN, 100 * TOKEN + 16 * 196),
        ({"v_head_dim": 32}, 150 * TOKEN, 150 * TOKEN, 150 * TOKEN + 16 * 196),
        # One KV head instead of two, and no V.
        (LATENT | {"kv_dtype": "e4m3"}, 25 * TOKEN, 25 * TOKEN, 25 * TOKEN + 16 * 196),
        (LATENT, 50 * TOKEN, 50 * TOKEN, 50 * TOKEN + 16 * 196),
        (ROW_SCALES, 200 * 164, 200 * 164, 200 * 164 + 16 * 548),
        ({"select": 30}, 60 * TOKEN, 200 * TOKEN, 60 * TOKEN + 16 * 260),
        ({"select": "3x10"}, 60 * TOKEN, 200 * TOKEN, 60 * TOKEN + 16 * 260),
        ({"select": 101}, 200 * TOKEN, 200 * TOKEN, 200 * TOKEN + 16 * 260),
        (
            {"shared_prefix": 60, "page_size": 15},
            *(140 * TOKEN, 150 * TOKEN, 140 * TOKEN + 16 * 260),
        ),
    ],
)
def test_bytes_of_kinds(kinds, kv_bytes, allocated, io_bytes):
    problem = replace(PLAIN, **kinds)
    assert problem.kv_bytes == kv_bytes
    assert problem.kv_allocated_bytes == allocated
    assert problem.io_bytes == io_bytes


def test_a_call_of_chosen_tokens_is_one_of_a_cache_of_them():
    problem = replace(PLAIN, batch=3, context=(7, 100, 30), select=30)
    seen = replace(PLAIN, batch=3, context=(7, 30, 30), page_size=1, lengths_on="device")
    assert problem.seen == seen.seen == seen
    assert problem.known_to_host == seen.known_to_host
    short = replace(PLAIN, select=128)
    assert short.seen == replace(PLAIN, page_size=1, capacity=128)
    assert short.known_to_host == replace(PLAIN, page_size=1)
    blocks = replace(PLAIN, select="3x10")
    assert blocks.seen == replace(PLAIN, context=30, page_size=10)


def test_the_tokens_after_a_shared_prefix_are_a_problem_of_their_own():
    problem = replace(PLAIN, batch=3, context=(64, 100, 65), page_size=16, shared_prefix=64)
    own = replace(PLAIN, batch=3, context=(1, 36, 1), page_size=16)
    assert (problem.own, own.own) == (own, own)
    assert problem.pages == 4 + 0 + 3 + 1
    roomy = replace(problem, capacity=160)
    assert roomy.own == replace(own, capacity=96)


@pytest.mark.parametrize(
    ("kinds", "same"),
    [
        ({"causal": False, "window_right": 5}, {}),
        ({"q_len": 2, "window_right": 5}, {"q_len": 2}),
        ({"v_head_dim": 64}, {}),
        ({"rotary_interleaved": True}, {}),
        ({"q_lens": (3, 1), "q_len": 7}, {"q_lens": (3, 1)}),
        ({"select": 9, "page_size": 1}, {"select": 9}),
        ({"select": "2x16", "page_size": 16}, {"select": "2x16"}),
    ],
)
def test_a_kind_is_written_in_one_way(kinds, same):
    assert replace(PLAIN, **kinds) == replace(PLAIN, **same)


def test_kinds_in_labels_and_json():
    kinds = {"q_lens": (1, 4), "causal": False, "window_left": 0, "window_right": 2}
    kinds |= {"softcap": 30.0, "append": 2, "rotary_dim": 32, "v_head_dim": 32}
    kinds |= dict.fromkeys(("sinks", "alibi", "leftpad", "batch_idx", "rotary_interleaved"), True)
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
        (replace(MANY, capacity="4x"), "b5 h32/8 n9+1x4 d128 c36 fp16 HND"),
        (replace(GQA, lengths_on="device"), "b3 h32/8 n1000 d128 q2 fp16 HND device"),
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


@given(problems, st.randoms(use_true_random=False))
def test_json_and_labels_are_read_back(problem, random):
    if not problem.is_ragged:
        words = problem.label.split()
        assert parse_problem(words) == problem
        random.shuffle(words)
        assert parse_problem(words) == problem
    back = AttentionProblem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert back == problem
    assert hash(back) == hash(problem)
    assert back.label == problem.label


def test_a_row_from_before_there_were_pages_is_read():
    assert "page_size" not in GQA.to_dict()
    before = {"batch": 3, "q_heads": 32, "kv_heads": 8, "context": 1000}
    before |= {"head_dim": 128, "q_len": 2}
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
def test_bytes_are_bounded(problem):
    most = problem.kv_bytes * problem.batch
    if problem.page_size is not None:
        most = problem.kv_bytes * problem.page_size
    assert problem.kv_bytes <= problem.kv_allocated_bytes <= most
    assert problem.io_bytes > problem.kv_bytes


INVALID = [
    ({"batch": 0}, "batch", Reason.BELOW_MINIMUM, 1),
    ({"q_heads": -8}, "q_heads", Reason.BELOW_MINIMUM, 1),
    ({"kv_heads": 0}, "kv_heads", Reason.BELOW_MINIMUM, 1),
    ({"kv_heads": 3}, "q_heads", Reason.NOT_A_MULTIPLE, 3),
    ({"kv_heads": 16}, "q_heads", Reason.NOT_A_MULTIPLE, 16),
    ({"q_len": 0}, "q_len", Reason.BELOW_MINIMUM, 1),
    ({"page_size": 0}, "page_size", Reason.BELOW_MINIMUM, 1),
    ({"head_dim": 76}, "head_dim", Reason.NOT_A_MULTIPLE, 8),
    ({"dtype": "fp32"}, "dtype", Reason.UNSUPPORTED, None),
    ({"kv_layout": "hnd"}, "kv_layout", Reason.UNSUPPORTED, None),
    ({"window_left": -2}, "window_left", Reason.BELOW_MINIMUM, 0),
    ({"softcap": -1.0}, "softcap", Reason.NOT_POSITIVE, None),
    ({"sinks": 1}, "sinks", Reason.UNSUPPORTED, None),
    ({"context": (10,)}, "number of context lengths", Reason.NOT_ONE_EACH, 2),
    ({"context": ()}, "number of context lengths", Reason.NOT_ONE_EACH, 2),
    ({"context": 0}, "context", Reason.BELOW_MINIMUM, 1),
    ({"context": (100, -3)}, "context", Reason.BELOW_MINIMUM, 1),
    (
        {"context": 2**31 - 1, "batch": 2**20, "kv_heads": 8},
        "K and V bytes",
        Reason.ABOVE_MAXIMUM,
        2**60,
    ),
    ({"append": 101}, "append", Reason.ABOVE_MAXIMUM, 100),
    ({"rotary_dim": 16}, "rotary_dim", Reason.NEEDS, "appended tokens"),
    ({"rotary_dim": 80, "append": 1}, "rotary_dim", Reason.ABOVE_MAXIMUM, 64),
    (
        {"rotary_dim": 16, "append": 1, "kv_dtype": "e4m3"},
        "rotary_dim",
        Reason.CONFLICT,
        "kv_dtype e4m3",
    ),
    ({"batch_idx": True, "page_size": 16}, "batch_idx", Reason.CONFLICT, "page_size 16"),
    ({"q_dtype": "e4m3"}, "q_dtype", Reason.NEEDS, "an fp8 KV cache"),
    ({"page_scales": "page", "page_size": 16}, "page_scales", Reason.NEEDS, "fp8 pages"),
    ({"page_scales": "page", "kv_dtype": "e4m3"}, "page_scales", Reason.NEEDS, "fp8 pages"),
    ({"q_lens": (1, 2, 3)}, "number of query lengths", Reason.NOT_ONE_EACH, 2),
    ({"q_lens": (1, 0)}, "q_lens", Reason.BELOW_MINIMUM, 1),
    ({"latent": True}, "kv_heads", Reason.ABOVE_MAXIMUM, 1),
    ({"latent": True, "kv_heads": 1, "v_head_dim": 72}, "v_head_dim", Reason.ABOVE_MAXIMUM, 64),
    ({"latent": True, "kv_heads": 1, "append": 1}, "append", Reason.CONFLICT, "latent"),
    *(
        ({"select": 9, name: value}, name, Reason.CONFLICT, "select 9")
        for name, value in (("page_size", 64), ("q_len", 2), ("capacity", 200), ("window_left", 5))
    ),
    ({"select": "2x16", "page_size": 32}, "page_size", Reason.CONFLICT, "select 2x16"),
    ({"select": "2x16", "latent": True, "kv_heads": 1}, "latent", Reason.CONFLICT, "select 2x16"),
    (ROW_SCALES | {"latent": False}, "row_scales", Reason.NEEDS, "latent True"),
    (ROW_SCALES | {"kv_dtype": "e5m2"}, "row_scales", Reason.NEEDS, "kv_dtype e4m3"),
    (ROW_SCALES | {"page_size": None}, "row_scales", Reason.NEEDS, "a table of pages"),
    (ROW_SCALES | {"v_head_dim": 64}, "v_head_dim", Reason.NOT_A_MULTIPLE, 128),
    ({"shared_prefix": 16}, "shared_prefix", Reason.NEEDS, "a paged cache"),
    ({"shared_prefix": 20, "page_size": 16}, "shared_prefix", Reason.NOT_A_MULTIPLE, 16),
    ({"shared_prefix": 112, "page_size": 16}, "shared_prefix", Reason.ABOVE_MAXIMUM, 100),
    (
        {"shared_prefix": 99, "page_size": 9, "q_len": 3},
        *("shared_prefix", Reason.ABOVE_MAXIMUM, 98),
    ),
    (
        {"shared_prefix": 64, "page_size": 16, "window_left": 5},
        *("window_left", Reason.CONFLICT, "shared_prefix 64"),
    ),
    ({"parallel": "tp:3"}, "kv_heads", Reason.NOT_A_MULTIPLE, 3),
    ({"parallel": "cp:2", "context": (100, 1)}, "context", Reason.BELOW_MINIMUM, 2),
]


@pytest.mark.parametrize(("fields", "name", "reason", "limit"), INVALID)
def test_invalid_fields(fields, name, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        replace(PLAIN, **fields)
    error = caught.value
    assert (error.name, error.reason, error.limit) == (name, reason, limit)


def test_messages(snapshot):
    messages = []
    for fields, *_ in INVALID:
        with pytest.raises(InvalidValue) as caught:
            replace(PLAIN, **fields)
        messages.append(str(caught.value))
    assert "\n".join(messages) == snapshot
