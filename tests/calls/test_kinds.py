"""Calls of every kind: what reaches the kernel, in which shapes it answers, and what is refused."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import assert_right, compiled, sentences
from every_kind import CONFIG, KINDS, PLAIN, called
from forms import half, numbers
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.triton_kernel import LeanTriton
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from leanbench.attention import lean_attn_with_kvcache
from leanbench.attention.operator import append_operator
from leanbench.check.launches import ApiCall, api_arguments
from leanbench.core.extras import kinds_of
from leanbench.core.inputs import make_inputs

pytestmark = pytest.mark.usefixtures("prepared_for")


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths_on", ["host", "device"])
def test_every_kind_reaches_the_kernel_at_first_and_again(kinds, lengths_on, prepared_for):
    problem = replace(PLAIN, **{"lengths_on": lengths_on, **kinds})
    for _ in range(2):
        inputs = make_inputs(problem, "cpu")
        out, lse = called(inputs)
        assert (out.shape, out.dtype) == (inputs.out.shape, inputs.out.dtype)
        assert (lse.shape, lse.dtype) == (inputs.lse.shape, torch.float32)
        assert_right(inputs, out, lse)
    assert len(prepared_for) == 1
    asked = kinds_of(make_inputs(problem, "cpu"))
    assert kinds_of(prepared_for[0]) == asked
    assert asked != kinds_of(make_inputs(PLAIN, "cpu"))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_an_unsupported_kind_is_refused_before_anything_is_written(
    kinds, prepared_for, monkeypatch
):
    monkeypatch.setattr(LEAN, "axes", LeanTriton.axes, raising=False)
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
    before = inputs.k_cache.float()
    with pytest.raises(NotImplementedError):
        called(inputs)
    assert inputs.k_cache.float().equal(before)
    assert prepared_for == []


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_launch_of_check_and_sweeps_is_the_call(kinds):
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
    launch = ApiCall(inputs, config=CONFIG)
    launch()
    assert_right(inputs, launch.results.out, launch.results.lse)
    assert launch.results.out is inputs.out


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_torch_compile_takes_every_kind_whole(kinds):
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu", seed=7)
    assert_right(inputs, *compiled(called)(inputs))


def test_the_operator_that_appends_changes_the_caches_and_no_other_does(prepared_for):
    assert append_operator._schema.is_mutable
    with FakeTensorMode():
        q, cache, new = (
            torch.empty(2, tokens, heads, 64, dtype=torch.bfloat16, device="cuda")
            for tokens, heads in ((1, 8), (90, 2), (1, 2))
        )
        out = lean_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=5, softcap=3.0)
        assert isinstance(out, torch.Tensor)
        assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert prepared_for == []


def test_positions_are_flash_attns():
    names = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
        " block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes"
        " num_splits return_softmax_lse"
    ).split()
    parameters = inspect.signature(lean_attn_with_kvcache).parameters
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [name for name, own in parameters.items() if own.kind == positional] == names
    assert parameters["rotary_interleaved"].default is True
    assert parameters["window_size"].default == (-1, -1)


@pytest.mark.parametrize(
    ("kinds", "given", "same"),
    [
        ({"sinks": True}, "sinks", "learnable_sink"),
        ({"page_size": 16}, "block_table", "page_table"),
    ],
)
def test_other_names(kinds, given, same):
    inputs = make_inputs(replace(PLAIN, **kinds), "cpu")
    expected, _ = called(inputs)
    arguments = api_arguments(inputs)
    value = arguments.pop(given)
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache)
    out, _ = lean_attn_with_kvcache(*tensors, **arguments, **{same: value}, config=CONFIG)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=f"^{given} and {same} are two names of one argument: "):
        lean_attn_with_kvcache(*tensors, **arguments, **{same: value, given: value})


def test_what_asks_for_nothing_is_a_plain_call(prepared_for):
    inputs = make_inputs(PLAIN, "cpu")
    called(inputs)
    for nothing in (
        {"window_size": (-1, 3)},  # causal
        {"window_size": [-5, -1], "softcap": 0},
        {"softcap": -1.0},
        {"k_descale": torch.ones(2, 2)},  # the cache is fp16
    ):
        called(inputs, **nothing)
    assert len(prepared_for) == 1


@pytest.mark.parametrize("length", [5, numbers(5, 30)])
def test_a_token_a_step_shares_a_launch(length, prepared_for):
    inputs = make_inputs(replace(PLAIN, q_len=1, append=1, capacity=60), "cpu")
    for step in range(4):
        now = length + step
        own: dict[str, Any] = {"cache_seqlens": now, "context": 60}
        if isinstance(now, int):
            own = {"cache_seqlens": None, "context": now + 1}
        stepped = replace(inputs, **own)
        assert_right(stepped, *called(stepped, cache_seqlens=now))
    assert len(prepared_for) == 1


Q, CACHE, NEW = half(2, 1, 8, 64), half(2, 30, 4, 64), half(2, 3, 4, 64)
FP8 = {"k_cache": CACHE.to(torch.float8_e4m3fn), "v_cache": CACHE.to(torch.float8_e4m3fn)}
#: Six pages for two sequences.
PAGES = {"k_cache": half(6, 16, 4, 64), "v_cache": half(6, 16, 4, 64)}
FP8_PAGES = {name: own.to(torch.float8_e4m3fn) for name, own in PAGES.items()}
for of in (PAGES, FP8_PAGES):
    of["block_table"] = torch.zeros(2, 3, dtype=torch.int32)


def page_scales(k: Any, v: Any = None) -> dict[str, Any]:
    return {**FP8_PAGES, "k_page_descale": k, "v_page_descale": k if v is None else v}


APPEND = {"k": NEW, "v": NEW, "cache_seqlens": 20}
TABLES = {"rotary_cos": half(30, 16), "rotary_sin": half(30, 16)}
PACKED = {"q": half(5, 8, 64), "cu_seqlens_q": numbers(0, 2, 5), "max_seqlen_q": 3}
E4M3, FP16 = "torch.float8_e4m3fn", "torch.float16"
#: The snapshot has the sentence of each: the argument, its value and the limit.
WRONG: list[dict[str, Any]] = [
    {"sinks": torch.zeros(4)},
    {"sinks": numbers(*range(8))},
    {"sinks": torch.zeros(8, device="meta")},
    {"sinks": 1.0},
    {"alibi_slopes": half(8)},
    {**FP8, "k_descale": 0.5},
    {**FP8, "v_descale": torch.ones(2, 8)},
    {**FP8, "v_descale": torch.ones(2, 4, device="meta")},
    {**FP8_PAGES, "k_descale": torch.ones(6, 4)},
    page_scales(0.5),
    page_scales(torch.ones(2, 4)),
    page_scales(torch.ones(6), half(6)),
    *({**FP8_PAGES, f"{own}_page_descale": torch.ones(6)} for own, other in ("kv", "vk")),
    {**page_scales(torch.ones(2)), **FP8, "block_table": None},
    {**page_scales(torch.ones(6)), **PAGES},
    {"q": Q.to(torch.float8_e4m3fn)},
    {name: CACHE.to(torch.float8_e4m3fnuz) for name in ("k_cache", "v_cache")},
    {"k": NEW, "cache_seqlens": 3},
    {"k": NEW, "v": NEW},
    {**APPEND, "k": half(2, 3, 8, 64)},
    {**APPEND, "v": half(2, 2, 4, 64)},
    {**APPEND, "v": NEW.bfloat16()},
    {**APPEND, "cache_seqlens": 28},
    {"k": half(2, 31, 4, 64), "v": half(2, 31, 4, 64), "cache_seqlens": numbers(0, 0)},
    {**APPEND, "cache_seqlens": 28, "block_table": torch.zeros(2, 1, dtype=torch.int32)},
    {"attention_chunk": 0.5},
    {"attention_chunk": -4},
    {"softmax_scale": math.nan},
    {"softmax_scale": math.inf},
    TABLES,
    {**APPEND, "rotary_cos": half(30, 16)},
    {**APPEND, "cu_seqlens_k_new": numbers(0, 1, 3)},
    {**APPEND, "cu_seqlens_k_new": numbers(0, 3)},
    {**APPEND, **TABLES, "rotary_seqlens": numbers(0)},
    {**APPEND, **TABLES, "rotary_cos": half(19, 16), "cache_seqlens": 17},
    {**APPEND, "rotary_cos": half(30, 12), "rotary_sin": half(30, 12)},
    {**APPEND, **TABLES, "rotary_sin": half(40, 16)},
    {"cache_batch_idx": numbers(0)},
    {"cache_leftpad": numbers(0, 1).long()},
    {**PAGES, "block_table": PAGES["block_table"][:1].expand(2, -1), **APPEND},
    {**APPEND, "v_cache": CACHE[:1].expand(2, -1, -1, -1)},
    {**PACKED, "max_seqlen_q": torch.tensor(3)},
    {**PACKED, "max_seqlen_q": 0},
    {**PACKED, "cu_seqlens_q": numbers(0, 2, 5).long()},
    {**PACKED, "cu_seqlens_q": numbers(0, 2, 5).to("meta")},
    {**PACKED, "q": Q},
    {"window_size": 128},
    {"window_size": (1.5, 0)},
    {"softcap": math.nan},
    {"softcap": math.inf},
    {"softcap": 10001.0},
]


def test_inconsistent_arguments(prepared_for, snapshot):
    call = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}
    assert sentences(ValueError, [{**call, **arguments} for arguments in WRONG]) == snapshot
    assert prepared_for == []


def test_what_flash_attention_3_does_not_read_is_not_read_here(prepared_for):
    unread: dict[str, Any] = {"cu_seqlens_k_new": numbers(0, 1, 2), "rotary_seqlens": numbers(5, 5)}
    lean_attn_with_kvcache(Q, CACHE, CACHE, **unread, config=CONFIG)
    assert prepared_for[0].cu_seqlens_k_new is None
    assert prepared_for[0].rotary_seqlens is None


def test_appending_before_the_cache_is_refused_where_a_launch_is_prepared(prepared_for):
    new, k, v = half(2, 5, 4, 64), CACHE.clone(), CACHE.clone()
    lean_attn_with_kvcache(Q, k, v, new, new, cache_seqlens=2, config=CONFIG)
    before = k.clone()
    # The 7 and 3 tokens with the appended ones would share a launch.
    with pytest.raises(ValueError, match=r"^cache_seqlens -2 and 5 appended tokens are outside"):
        lean_attn_with_kvcache(Q, k, v, new, new, cache_seqlens=-2, config=CONFIG)
    assert torch.equal(k, before)
    assert len(prepared_for) == 1


def test_a_window_above_the_length_is_right():
    for length in (0, 1, 5, 40):
        inputs = replace(make_inputs(replace(PLAIN, window_left=30), "cpu"), context=length)
        assert_right(inputs, *called(inputs))


def test_a_window_as_wide_as_the_cache_is_none(prepared_for):
    """Without a causal mask it decides by which positions Q is rotated, as in flash-attn."""
    problem = replace(PLAIN, causal=False, append=2, rotary_dim=32)
    for window in ((40, 40), (39, 40), (-1, 100)):
        inputs = make_inputs(problem, "cpu")
        out, lse = called(inputs, window_size=window)
        assert_right(replace(inputs, window_left=39 if window[0] == 39 else -1), out, lse)
    assert [own.window_left for own in prepared_for] == [-1, 39]


def test_windows_that_change_are_compiled_once():
    torch._dynamo.reset()
    inputs = make_inputs(replace(PLAIN, context=40), "cpu")
    compiled = CompileCounter()

    @torch.compile(fullgraph=True, backend=compiled)
    def windowed(left: int) -> Any:
        return called(inputs, window_size=(left, 0))

    for left in (3, 5, 9, 21, 30):
        assert_right(replace(inputs, window_left=left), *windowed(left))
    # For the first one's number, then for any.
    assert compiled.frame_count == 2


def test_a_window_as_wide_as_a_short_cache_still_hides_tokens(prepared_for):
    """30 query tokens end with the 8 cached ones: the first stand before all of them."""
    problem = replace(PLAIN, context=8, capacity=8, q_len=30, causal=False, window_right=10)
    inputs = make_inputs(problem, "cpu")
    assert_right(inputs, *called(inputs))
    assert prepared_for[0].window_right == 10


def test_a_value_head_dim_that_no_kernel_takes_is_refused_first(prepared_for):
    wide = torch.zeros(2, 30, 4, 1024, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=r"a v_cache of head_dim 1024 yet: choose"):
        lean_attn_with_kvcache(Q, CACHE, wide, NEW, cache_seqlens=20, sinks=torch.zeros(3))
    assert prepared_for == []
