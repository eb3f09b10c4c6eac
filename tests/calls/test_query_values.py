"""Calls with `qv`, as FlashAttention-3's tests make them, against the fp64 reference over rows of K
and V one after the other.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from depth import diagonal
from forms import assert_form, numbers, pages_of, plain_form
from forms import rand as rand_half

from leanbench import lean_attn_with_kvcache
from leanbench.attention import checks
from leanbench.attention import qv as module

ROOM = 48
#: Columns of q and qv: 576 together, as of latent caches, 320 and 80.
DIMS = ((64, 512), (64, 256), (16, 64))
LATENT = DIMS[0]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 15.0},
    "sinks": {"sinks": torch.linspace(-1, 3, 4)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.4, 4)},
    "rows": {"cache_batch_idx": numbers(1, 0)},
}


pytestmark = pytest.mark.usefixtures("prepared_for", "latent")
rand = partial(rand_half, dtype=torch.bfloat16)


def tensors(dims: tuple[int, int], q_len: int = 2, kv_heads: int = 1) -> tuple[torch.Tensor, ...]:
    """q, k_cache, v_cache and qv; the caches are views of one."""
    cache, shape = rand(2, ROOM, kv_heads, sum(dims)), (2, q_len, 4)
    k, v = cache[..., dims[1] :], cache[..., : dims[1]]
    return rand(*shape, dims[0]), k, v, rand(*shape, dims[1])


def attend(q: Any, k: Any, v: Any, qv: Any, **options: Any) -> Any:
    return lean_attn_with_kvcache(q, k, v, qv=qv, return_softmax_lse=True, **options)


@pytest.mark.parametrize(
    ("dims", "case", "page_size", "kv_heads", "q_len"),
    diagonal(DIMS, list(CASES), (None, 1, 16), (1, 2), (1, 3), keep=9),
)
def test_it_is_attention_over_joined_rows(dims, case, page_size, kv_heads, q_len, latent):
    q, k, v, qv = tensors(dims, q_len, kv_heads)
    options = dict(CASES[case])
    table = None
    if page_size is not None:
        both, table = pages_of(torch.cat([v, k], -1), page_size)
        k, v = both[..., dims[1] :], both[..., : dims[1]]
    options |= {"cache_seqlens": numbers(40, 17), "block_table": table}
    inputs = plain_form(q, k, v, qv, **options)
    out = torch.full((*q.shape[:-1], dims[1]), math.nan).bfloat16()
    result, lse = attend(q, k, v, qv, out=out, **options)
    assert result is out
    assert_form(inputs, (out, lse))
    alone = lean_attn_with_kvcache(q, k, v, qv=qv, **options)
    assert isinstance(alone, torch.Tensor)
    assert alone.equal(out)
    # The kernel of latent caches has no other kinds.
    assert bool(latent) == (dims == LATENT and case in ("plain", "causal"))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("length", [30, None])
@pytest.mark.parametrize(("scale", "dtype"), [(None, torch.float16), (-0.02, torch.bfloat16)])
def test_lengths_and_scales_on_the_host(dims, length, scale, dtype):
    q, k, v, qv = (tensor.to(dtype) for tensor in tensors(dims))
    inputs = plain_form(q, k, v, qv, scale, context=length or ROOM)
    assert_form(inputs, attend(q, k, v, qv, cache_seqlens=length, softmax_scale=scale))


@pytest.mark.parametrize("dims", DIMS)
def test_packed_queries(dims):
    q, k, v, qv = tensors(dims)
    q, qv = q.flatten(0, 1)[:3], qv.flatten(0, 1)[:3]
    packed: dict[str, Any] = {"cu_seqlens_q": numbers(0, 1, 3), "max_seqlen_q": 2}
    options = {**packed, "causal": True, "cache_seqlens": numbers(40, 17)}
    assert_form(plain_form(q, k, v, qv, **options), attend(q, k, v, qv, **options))


def views_of_a_pool(page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut a pool as SGLang does: torch gives the dimension of one head strides of its own."""
    pool = rand(64, 1, 576)
    shape = (-1, page_size, 1)
    return pool, pool[:, :, 512:].view(*shape, 64), pool[:, :, :512].view(*shape, 512)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_views_of_one_cache_are_not_copied(page_size, latent):
    pool, k, v = views_of_a_pool(page_size)
    q, _, _, qv = tensors(LATENT)
    table = torch.arange(64 // page_size, dtype=torch.int32).expand(2, -1)
    attend(q, k, v, qv, cache_seqlens=17, block_table=table)
    assert latent[0].k_cache.data_ptr() == pool.data_ptr()


@pytest.mark.parametrize("change", ["two caches", "misaligned", "another GPU", "traced"])
def test_other_caches_are_copied_once(change, latent, prepared_for, monkeypatch):
    torch._dynamo.reset()
    q, k, v, qv = tensors(LATENT)
    call: Any = attend
    if change == "two caches":
        v = v.clone()
    elif change == "misaligned":
        memory = rand(2 * ROOM * 576 + 1)[1:].view(2, ROOM, 1, 576)
        k, v = memory[..., 512:], memory[..., :512]
    elif change == "another GPU":
        monkeypatch.setattr(module, "unavailable_reason", lambda q: "it runs on Hopper GPUs")
    else:
        call = torch.compile(attend, fullgraph=True, backend="aot_eager")
    wide = torch.full((2, 2, 4, 515), math.nan).bfloat16()
    out = wide[..., 1:513]
    inputs = plain_form(q, k, v, qv, causal=True)
    assert_form(inputs, (out, call(q, k, v, qv, causal=True, out=out)[1]))
    assert wide[..., [0, 513, 514]].isnan().all()
    assert latent == []
    assert prepared_for[0].k_cache.shape[-1] == 576


def test_an_unaligned_output_of_a_latent_cache_is_written(latent):
    q, k, v, qv = tensors(LATENT)
    wide = torch.full((2, 2, 4, 515), math.nan).bfloat16()
    result, lse = attend(q, k, v, qv, out=wide[..., 1:513])
    assert_form(plain_form(q, k, v, qv), (result, lse))
    assert wide[..., 1:513].equal(result)
    assert len(latent) == 1


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize(("q_len", "tokens"), [(0, ROOM), (3, 0)])
def test_empty_tensors(dims, q_len, tokens):
    q, k, v, qv = tensors(dims, q_len)
    out, lse = attend(q, k[:, :tokens], v[:, :tokens], qv)
    assert out.equal(torch.zeros(2, q_len, 4, dims[1]).bfloat16())
    assert lse.equal(torch.full((2, 4, q_len), -math.inf))


@pytest.mark.parametrize("dims", DIMS)
def test_values_are_checked(dims, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS_VALUES", True)
    q, k, v, qv = tensors(dims)
    with pytest.raises(ValueError, match=r"^cache_seqlens\[1\] is 49: expected 0 to 48"):
        attend(q, k, v, qv, cache_seqlens=numbers(3, 49))


@pytest.mark.deep
def test_torch_compile_takes_pages_of_other_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for page_size in (16, 32):
        q, _, _, qv = tensors(LATENT)
        _, k, v = views_of_a_pool(page_size)
        options = {"block_table": numbers(1, 0).expand(2, -1), "cache_seqlens": 30}
        expected = attend(q, k, v, qv, **options)
        for result, right in zip(compiled(q, k, v, qv, **options), expected, strict=True):
            torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "window_size": {"window_size": torch.tensor([4, 1])},
    "attention_chunk": {"attention_chunk": 8},
    "cache_leftpad": {"cache_leftpad": numbers(3, 5)},
    "k and v": {"k": rand(2, 1, 2, 64), "v": rand(2, 1, 2, 512), "cache_seqlens": 3},
    "fp8 caches": {
        f"{name}_cache": rand(2, ROOM, 2, dim).to(torch.float8_e4m3fn)
        for name, dim in (("k", 64), ("v", 512))
    },
    "head_dims 128 of q and 512": {"q": rand(2, 1, 4, 128), "k_cache": rand(2, ROOM, 2, 128)},
    "a gradient": {"qv": rand(2, 1, 4, 512).requires_grad_()},
}


def call_of(**options: Any) -> dict[str, Any]:
    q, k, v, qv = tensors(LATENT, q_len=1, kv_heads=2)
    return {"q": q, "k_cache": k, "v_cache": v, "qv": qv, **options}


@pytest.mark.parametrize(("name", "options"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_unsupported_calls(name, options, prepared_for, latent):
    call = call_of(**options)
    before = call["k_cache"].clone()
    with pytest.raises(NotImplementedError, match="gradient" if name == "a gradient" else name):
        lean_attn_with_kvcache(**call)
    assert call["k_cache"].float().equal(before.float())
    assert prepared_for == latent == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"qv": rand(2, 1, 2, 512)}, r"^qv is \(2, 1, 2, 512\) .*: expected \(2, 1, 4, 512\)"),
        ({"qv": 3}, r"^qv is 3: expected \(2, 1, 4, 512\) torch.bfloat16"),
        ({"qv": torch.empty(2, 1, 4, 512, device="meta").bfloat16()}, "^qv is on meta, q on cpu"),
        ({"softmax_scale": math.inf}, "^softmax_scale is inf"),
        ({"cache_seqlens": ROOM + 1}, f"^cache_seqlens {ROOM + 1} is outside"),
        ({"v_cache": rand(2, 40, 2, 512)}, r"v_cache \(2, 40, 2, 512\): expected"),
        ({"k_cache": rand(2, ROOM, 2, 0)}, rf"k_cache \(2, {ROOM}, 2, 0\), v_cache .*: expected"),
        ({"k_cache": rand(0)}, r"k_cache \(0,\), v_cache .*: expected"),
        ({"q": rand(2, 1, 4, 0)}, r"^q is \(2, 1, 4, 0\), k_cache .*: expected"),
    ],
)
def test_inconsistent_calls(options, words):
    with pytest.raises(ValueError, match=words):
        lean_attn_with_kvcache(**call_of(**options))
