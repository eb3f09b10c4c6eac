"""Calls with `qv`, as FlashAttention-3's tests make them, against the fp64 reference over rows of K
and V one after the other.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from depth import diagonal
from every_kind import CONFIG, take_every_kind, take_latent_calls
from forms import assert_form, numbers, pages_of, plain_form
from leanbench.kernels.lean import LEAN

from leanbench import lean_attn_with_kvcache, query_values
from leanbench.calls import values

ROOM = 48
LENGTHS = (40, 17)
#: Columns of q and of qv: both together 576, of which the latent kernel is, 320 and 80.
DIMS = ((64, 512), (64, 256), (16, 64))


@pytest.fixture(autouse=True)
def prepared_for(monkeypatch):
    return take_every_kind(monkeypatch)


@pytest.fixture(autouse=True)
def latent(monkeypatch):
    """Calls that come to the latent kernel."""
    return take_latent_calls(monkeypatch)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def masks_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, fields of AttentionInputs)."""
    return {
        "all": ({}, {}),
        "causal": ({"causal": True}, {"causal": True}),
        "left": ({"window_size": (5, -1)}, {"window_left": 5}),
        "window": (
            {"window_size": torch.tensor([4, 1])},
            {"window_left": 4, "window_right": 1},
        ),
        "causal window": (
            {"causal": True, "window_size": (9, 0)},
            {"causal": True, "window_left": 9},
        ),
        "chunks": (
            {"causal": True, "attention_chunk": 7},
            {"causal": True, "attention_chunk": 7},
        ),
        "chunks of all": ({"attention_chunk": 7}, {"attention_chunk": 7}),
    }[name]


MASKS = ("all", "causal", "left", "window", "causal window", "chunks", "chunks of all")


@pytest.mark.parametrize(
    ("dims", "mask", "page_size", "kv_heads", "q_len", "leftpad", "batch_idx"),
    diagonal(DIMS, MASKS, (None, 1, 16), (1, 2), (1, 3), (False, True), (False, True), keep=9),
)
def test_every_mask(dims, mask, page_size, kv_heads, q_len, leftpad, batch_idx):
    (q_dim, v_dim), (arguments, fields) = dims, masks_of(mask)
    rows = 3 if batch_idx else 2
    k, v, table = rand(rows, ROOM, kv_heads, q_dim), rand(rows, ROOM, kv_heads, v_dim), None
    if page_size is not None:
        both, table = pages_of(torch.cat([k, v], -1), page_size)
        k, v = both[..., :q_dim].contiguous(), both[..., q_dim:].contiguous()
    q, qv = rand(2, q_len, 4, q_dim), rand(2, q_len, 4, v_dim)
    shared: dict[str, Any] = {
        "cache_seqlens": numbers(*LENGTHS),
        "block_table": table,
        "cache_leftpad": numbers(3, 15) if leftpad else None,
        "cache_batch_idx": numbers(2, 0) if batch_idx else None,
    }
    inputs = plain_form(q, k, v, qv, **shared, **fields)
    out = torch.full((*q.shape[:-1], v_dim), math.nan).bfloat16()
    result, lse = lean_attn_with_kvcache(
        q, k, v, qv=qv, out=out, return_softmax_lse=True, **shared, **arguments
    )
    assert result is out
    assert_form(inputs, (out, lse))
    alone = lean_attn_with_kvcache(q, k, v, qv=qv, **shared, **arguments)
    assert isinstance(alone, torch.Tensor)
    assert alone.equal(out)


@pytest.mark.parametrize(
    ("dims", "mask", "page_size", "rotary_dim", "interleaved", "leftpad", "batch_idx", "packed"),
    diagonal(
        DIMS,
        ("all", "causal", "window", "chunks"),
        (None, 1, 16),
        (0, 16, 64),
        (False, True),
        (False, True),
        (False, True),
        (False, True),
        keep=23,
    ),
)
def test_appending(dims, mask, page_size, rotary_dim, interleaved, leftpad, batch_idx, packed):
    (q_dim, v_dim), (arguments, fields) = dims, masks_of(mask)
    rotary_dim = min(rotary_dim, q_dim)
    rows = 3 if batch_idx else 2
    k, v, table = rand(rows, ROOM, 2, q_dim), rand(rows, ROOM, 2, v_dim), None
    if page_size is not None:
        both, table = pages_of(torch.cat([k, v], -1), page_size)
        k, v = both[..., :q_dim].contiguous(), both[..., q_dim:].contiguous()
    tokens = (5,) if packed else (2, 3)
    q, qv = rand(*tokens, 4, q_dim), rand(*tokens, 4, v_dim)
    new = (3,) if packed else (2, 2)
    k_new, v_new = rand(*new, 2, q_dim), rand(*new, 2, v_dim)
    shared: dict[str, Any] = {
        "cache_seqlens": numbers(*LENGTHS),
        "block_table": table,
        "cache_leftpad": numbers(3, 15) if leftpad else None,
        "cache_batch_idx": numbers(2, 0) if batch_idx else None,
    }
    if packed:
        starts = {"cu_seqlens_q": numbers(0, 2, 5), "cu_seqlens_k_new": numbers(0, 1, 3)}
        shared |= {**starts, "max_seqlen_q": 3}
    if rotary_dim:
        angles = torch.rand(ROOM, rotary_dim // 2) * 2 * math.pi
        tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
        shared |= {**tables, "rotary_interleaved": interleaved}
    own: dict[str, Any] = {"k_new": k_new, "v_new": v_new, **shared, **fields}
    inputs = plain_form(q, k.clone(), v.clone(), qv, **own)
    out = torch.full((*q.shape[:-1], v_dim), math.nan).bfloat16()
    result, lse = lean_attn_with_kvcache(
        q, k, v, k_new, v_new, qv=qv, out=out, return_softmax_lse=True, **shared, **arguments
    )
    assert result is out
    assert_form(inputs, (out, lse), (k, v))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("lengths", [30, None])
def test_lengths_on_the_host(dims, lengths):
    q_dim, v_dim = dims
    k, v = rand(2, ROOM, 1, q_dim), rand(2, ROOM, 1, v_dim)
    q, qv = rand(2, 2, 4, q_dim), rand(2, 2, 4, v_dim)
    context = ROOM if lengths is None else lengths
    for window in ((-1, -1), (3, 1)):
        left, right = window
        inputs = plain_form(q, k, v, qv, context=context, window_left=left, window_right=right)
        results = lean_attn_with_kvcache(
            q, k, v, qv=qv, cache_seqlens=lengths, window_size=window, return_softmax_lse=True
        )
        assert_form(inputs, results)
    if lengths is None:
        return
    # Two of the tokens are appended.
    k_new, v_new = rand(2, 2, 1, q_dim), rand(2, 2, 1, v_dim)
    inputs = plain_form(
        q, k.clone(), v.clone(), qv, context=context + 2, k_new=k_new, v_new=v_new, causal=True
    )
    results = lean_attn_with_kvcache(
        q, k, v, k_new, v_new, cache_seqlens=30, qv=qv, causal=True, return_softmax_lse=True
    )
    assert_form(inputs, results, (k, v))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale(dims, dtype):
    q_dim, v_dim = dims
    k, v = rand(1, ROOM, 1, q_dim, dtype=dtype), rand(1, ROOM, 1, v_dim, dtype=dtype)
    q, qv = rand(1, 1, 2, q_dim, dtype=dtype), rand(1, 1, 2, v_dim, dtype=dtype)
    for scale, expected in ((None, (q_dim + v_dim) ** -0.5), (0.02, 0.02)):
        inputs = plain_form(q, k, v, qv, scale=expected)
        results = lean_attn_with_kvcache(
            q, k, v, qv=qv, softmax_scale=scale, return_softmax_lse=True
        )
        assert_form(inputs, results)


def test_query_tokens_that_see_few_tokens_are_sequences_together(latent, monkeypatch):
    monkeypatch.setattr(query_values, "_COPIED_TOKENS", 2 * 2 * 4)
    k, v = rand(2, ROOM, 1, 64), rand(2, ROOM, 1, 512)
    q, qv = rand(2, 5, 4, 64), rand(2, 5, 4, 512)
    inputs = plain_form(q, k, v, qv, causal=True, window_left=3)
    results = lean_attn_with_kvcache(
        q, k, v, qv=qv, causal=True, window_size=(3, 0), return_softmax_lse=True
    )
    assert_form(inputs, results)
    # Two query tokens of two sequences are four sequences of at most four tokens.
    assert [call.k_cache.shape[:2] for call in latent] == [(4, 4), (4, 4), (2, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 15.0},
        {"sinks": torch.linspace(-1, 3, 4)},
        {"alibi_slopes": torch.linspace(0.1, 0.4, 4)},
        {"softmax_scale": -0.1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("v_dim", [256, 512])
def test_scores_of_other_kinds(options, v_dim, latent):
    k, v = rand(2, ROOM, 2, 64), rand(2, ROOM, 2, v_dim)
    q, qv = rand(2, 3, 4, 64), rand(2, 3, 4, v_dim)
    fields = {name: own for name, own in options.items() if name != "softmax_scale"}
    inputs = plain_form(q, k, v, qv, options.get("softmax_scale"), causal=True, **fields)
    results = lean_attn_with_kvcache(
        q, k, v, qv=qv, causal=True, return_softmax_lse=True, **options
    )
    assert_form(inputs, results)
    # The kernel of latent caches has none of them.
    assert latent == []


def test_columns_of_a_latent_cache_where_its_kernel_does_not_run(latent, prepared_for, monkeypatch):
    monkeypatch.setattr(query_values, "device_refusal", lambda q: "it runs on Hopper GPUs")
    k, v = rand(2, ROOM, 1, 64), rand(2, ROOM, 1, 512)
    q, qv = rand(2, 3, 4, 64), rand(2, 3, 4, 512)
    inputs = plain_form(q, k, v, qv, causal=True)
    results = lean_attn_with_kvcache(q, k, v, qv=qv, causal=True, return_softmax_lse=True)
    assert_form(inputs, results)
    assert latent == []
    assert prepared_for[0].k_cache.shape[-1] == 576


def test_outputs_and_views_that_are_not_aligned_are_copied():
    memory = rand(2 * ROOM * 576 + 1)[1:].view(2, ROOM, 1, 576)
    k, v = memory[..., 512:], memory[..., :512]
    q, qv = rand(2, 2, 4, 64), rand(2, 2, 4, 512)
    inputs = plain_form(q, k, v, qv)
    wide = torch.full((2, 2, 4, 515), math.nan).bfloat16()
    out = wide[..., 1:513]
    result, lse = lean_attn_with_kvcache(q, k, v, qv=qv, out=out, return_softmax_lse=True)
    assert result is out
    assert_form(inputs, (out, lse))
    assert wide[..., 0].isnan().all()
    assert wide[..., 513:].isnan().all()


@pytest.mark.parametrize("dims", DIMS)
def test_sizes_of_none(dims):
    q_dim, v_dim = dims
    for q_len, tokens in ((0, ROOM), (3, 0)):
        k, v = rand(2, tokens, 2, q_dim), rand(2, tokens, 2, v_dim)
        q, qv = rand(2, q_len, 4, q_dim), rand(2, q_len, 4, v_dim)
        out, lse = lean_attn_with_kvcache(q, k, v, qv=qv, return_softmax_lse=True)
        assert out.equal(torch.zeros(2, q_len, 4, v_dim).bfloat16())
        assert lse.equal(torch.full((2, 4, q_len), -math.inf))


@pytest.mark.parametrize(("dims", "mask"), diagonal(DIMS, ["causal", "window"], keep=2))
def test_torch_compile_takes_an_appending_call_whole(dims, mask):
    torch._dynamo.reset()
    (q_dim, v_dim), (arguments, fields) = dims, masks_of(mask)
    arguments = {**arguments, "window_size": (4, 1)} if mask == "window" else arguments
    k, v = rand(2, ROOM, 1, q_dim), rand(2, ROOM, 1, v_dim)
    q, qv = rand(2, 2, 4, q_dim), rand(2, 2, 4, v_dim)
    k_new, v_new = rand(2, 2, 1, q_dim), rand(2, 2, 1, v_dim)
    lengths = numbers(*LENGTHS)
    inputs = plain_form(
        q,
        k.clone(),
        v.clone(),
        qv,
        cache_seqlens=lengths,
        k_new=k_new,
        v_new=v_new,
        **fields,
    )

    def call(q: torch.Tensor) -> Any:
        out, lse = lean_attn_with_kvcache(
            q + 0,
            k,
            v,
            k_new,
            v_new,
            cache_seqlens=lengths,
            qv=qv,
            return_softmax_lse=True,
            **arguments,
        )
        return out * 2, lse

    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert_form(inputs, (out / 2, lse), (k, v))


@pytest.mark.parametrize("dims", DIMS)
def test_values_are_checked_before_anything_is_appended(dims, monkeypatch):
    monkeypatch.setattr(values, "CHECKS_VALUES", True)
    q_dim, v_dim = dims
    k, v = rand(2, ROOM, 1, q_dim), rand(2, ROOM, 1, v_dim)
    q, qv = rand(2, 2, 4, q_dim), rand(2, 2, 4, v_dim)
    new = rand(2, 2, 1, q_dim), rand(2, 2, 1, v_dim)
    before = k.clone()
    sentence = r"^cache_seqlens\[1\] is 47: expected 0 to 46, tokens, less those that are appended$"
    with pytest.raises(ValueError, match=sentence):
        lean_attn_with_kvcache(q, k, v, *new, cache_seqlens=numbers(3, 47), qv=qv)
    assert k.equal(before)
    lean_attn_with_kvcache(q, k, v, *new, cache_seqlens=numbers(3, 46), qv=qv)
    assert k[1, 46:].equal(new[0][1])


@pytest.mark.parametrize("dims", DIMS)
def test_a_launch_that_fails_has_appended_nothing(dims, monkeypatch, latent):
    def refuse(inputs: Any, config: Any) -> None:
        raise ValueError("too much shared memory")

    monkeypatch.setattr(LEAN, "relaunch", refuse)
    q_dim, v_dim = dims
    k, v, new = rand(2, ROOM, 1, q_dim), rand(2, ROOM, 1, v_dim), (rand(2, 1, 1, q_dim),)
    before = k.clone(), v.clone()
    with pytest.raises(ValueError, match="too much shared memory"):
        lean_attn_with_kvcache(
            rand(2, 1, 4, q_dim),
            k,
            v,
            *new,
            rand(2, 1, 1, v_dim),
            cache_seqlens=numbers(3, 7),
            qv=rand(2, 1, 4, v_dim),
            config=CONFIG,
        )
    assert k.equal(before[0])
    assert v.equal(before[1])


def test_a_traced_call_looks_for_no_compiler(monkeypatch, latent):
    def look(q: torch.Tensor) -> None:
        raise AssertionError("TorchDynamo cannot trace it")

    torch._dynamo.reset()
    k, v = rand(2, ROOM, 1, 64), rand(2, ROOM, 1, 512)
    q, qv = rand(2, 1, 4, 64), rand(2, 1, 4, 512)
    inputs = plain_form(q, k, v, qv)
    monkeypatch.setattr(query_values, "device_refusal", look)

    def call(q: torch.Tensor) -> Any:
        return lean_attn_with_kvcache(q + 0, k, v, qv=qv, return_softmax_lse=True)

    assert_form(inputs, torch.compile(call, fullgraph=True, backend="aot_eager")(q))
    assert len(latent) == 1


def calls_refused() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    k, v, q = rand(2, ROOM, 2, 64), rand(2, ROOM, 2, 512), rand(2, 1, 4, 64)
    call = {"q": q, "k_cache": k, "v_cache": v, "qv": rand(2, 1, 4, 512), "cache_seqlens": 3}
    fp8 = torch.float8_e4m3fn
    return {
        "of another shape": (
            {**call, "qv": call["qv"][:, :, :2]},
            ValueError,
            "qv is (2, 1, 2, 512) torch.bfloat16: expected (2, 1, 4, 512) torch.bfloat16, as q is,"
            " with the columns of v_cache",
        ),
        "no tensor": (
            {**call, "qv": 3},
            ValueError,
            "qv is 3: expected (2, 1, 4, 512) torch.bfloat16, as q is, with the columns of v_cache",
        ),
        "too many columns": (
            {
                **call,
                "q": rand(2, 1, 4, 128),
                "k_cache": rand(2, ROOM, 2, 128),
            },
            NotImplementedError,
            "lean_attn_with_kvcache does not support qv with head_dims 128 of q and 512 of v_cache:"
            " choose at most 576 together",
        ),
        "fp8": (
            {
                **call,
                "k_cache": k.to(fp8),
                "v_cache": v.to(fp8),
            },
            NotImplementedError,
            "lean_attn_with_kvcache does not support qv with fp8 caches: pass the latent cache"
            " whole to lean_mla_with_kvcache",
        ),
        "a gradient": (
            {**call, "qv": call["qv"].clone().requires_grad_()},
            NotImplementedError,
            "lean_attn_with_kvcache is for inference and has no gradient, but a tensor of the call"
            " requires one: call it under torch.no_grad()",
        ),
        "a scale of no number": (
            {**call, "softmax_scale": math.inf},
            ValueError,
            "softmax_scale is inf: expected a finite number, or None for head_dim ** -0.5",
        ),
        "no room": (
            {**call, "cache_seqlens": ROOM},
            ValueError,
            f"cache_seqlens {ROOM} and 1 appended tokens are outside the cache's 0 to {ROOM}"
            " tokens: append at most what there is room for",
        ),
        "no lengths": (
            {**call, "cache_seqlens": None},
            ValueError,
            "k and v are appended at cache_seqlens: pass that too",
        ),
    }


@pytest.mark.parametrize(
    ("call", "error", "sentence"), calls_refused().values(), ids=calls_refused()
)
def test_what_is_refused_is_so_before_anything_is_appended(call, error, sentence):
    call = {name: own.clone() if hasattr(own, "clone") else own for name, own in call.items()}
    if call["qv"] is not None and "a gradient" in sentence:
        call["qv"] = call["qv"].detach().requires_grad_()
    before = call["k_cache"].clone()
    k_dim, v_dim = call["k_cache"].shape[-1], call["v_cache"].shape[-1]
    new: dict[str, Any] = {"k": rand(2, 1, 2, k_dim), "v": rand(2, 1, 2, v_dim)}
    if sentence.endswith("lean_mla_with_kvcache"):
        new = {name: own.to(torch.float8_e4m3fn) for name, own in new.items()}
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        lean_attn_with_kvcache(**call, **new)
    assert torch.equal(call["k_cache"].float(), before.float())


@pytest.mark.parametrize("page_size", [1, 16])
def test_views_of_one_pool_are_not_copied(page_size):
    # As SGLang makes them: torch gives the dimension of one head strides of their own.
    pool = rand(64, 1, 576)
    k = pool[:, :, 512:].view(-1, page_size, 1, 64)
    v = pool[:, :, :512].view(-1, page_size, 1, 512)
    assert k.stride() != v.stride()
    latent_cache = query_values._latent(k, v)
    assert latent_cache.data_ptr() == pool.data_ptr()
    assert latent_cache.equal(pool.view(-1, page_size, 1, 576))
    # Views of two pools are.
    copied = query_values._latent(k, v.clone())
    assert copied.data_ptr() != pool.data_ptr()
    assert copied.equal(latent_cache)
