"""Caches and calls laid out as the tests of FlashInfer, SGLang, FlashMLA and TensorRT-LLM's kernels
lay them out, at small sizes, against the fp64 reference.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from depth import diagonal
from forms import INT32, assert_form, numbers, plain_form, rand

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache

pytestmark = pytest.mark.usefixtures("prepared_for", "latent")
E4M3 = torch.float8_e4m3fn


def pages_of(lengths: list[int], page_size: int) -> tuple[dict[str, Any], int]:
    """Return lengths and a block table with pages in any order, and the number of all pages.

    What stands past a sequence's end is no page.
    """
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2)
    table = torch.full((len(lengths), max(counts)), 2**31 - 1, dtype=INT32)
    for row, own in zip(table, order.split([*counts, 2]), strict=False):
        row[: len(own)] = own
    return {"cache_seqlens": numbers(*lengths), "block_table": table}, len(order)


def caches_of(
    total: int,
    page_size: int,
    layout: str,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return pages of K and V."""
    if layout == "HND":
        return [rand(total, kv_heads, page_size, d, dtype=dtype).transpose(1, 2) for d in dims]
    return [rand(total, page_size, kv_heads, dim, dtype=dtype) for dim in dims]


def kind_of(kind: str, q_heads: int) -> dict[str, Any]:
    return {
        "plain": {},
        "soft cap": {"softcap": 8.0},
        "window": {"window_left": 6},
        "ALiBi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, q_heads + 1)},
        "sinks": {"sinks": torch.linspace(-2, 2, q_heads)},
    }[kind]


def assert_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **fields: Any) -> None:
    """The call with what these fields of AttentionInputs ask for is right, in a poisoned output."""
    scale = fields.pop("scale", None)
    inputs = plain_form(q, k, v, scale=scale, **fields)
    fields["window_size"] = (fields.pop("window_left", -1), fields.pop("window_right", -1))
    out = inputs.out.clone()
    options = {"softmax_scale": scale, "out": out, "return_softmax_lse": True, **fields}
    result, lse = lean_attn_with_kvcache(q, k, v, **options)
    assert result is out
    assert_form(inputs, (out, lse))


def latent_result(q: torch.Tensor, cache: torch.Tensor, **fields: Any) -> torch.Tensor:
    """The LSE of a call over a latent cache that is right."""
    scale = fields.pop("scale", None)
    flat = cache if cache.dim() == 4 else cache.unsqueeze(2)
    own = dict(fields)
    if "k_descale" in own:
        # A cache has one scale, as K and as V.
        own["k_descale"] = own["v_descale"] = own["k_descale"].expand(len(q), 1)
        own["q_descale"] = own["q_descale"].expand(len(q), 1)
    inputs = plain_form(q, flat, flat[..., :512], scale=scale, **own)
    out = inputs.out.clone()
    result, lse = lean_mla_with_kvcache(
        q, cache, softmax_scale=scale, out=out, return_softmax_lse=True, **fields
    )
    assert result is out
    assert_form(inputs, (out, lse))
    return lse


@pytest.mark.parametrize(
    ("page_size", "layout", "heads", "head_dim", "kv_dtype", "kind"),
    diagonal(
        (1, 5, 8, 16),
        ("NHD", "HND"),
        ((4, 4), (8, 2)),
        (64, 128),
        (torch.float16, E4M3),
        ("plain", "soft cap", "window", "ALiBi", "sinks"),
        keep=7,
    ),
)
def test_flashinfers_decode_over_pages(page_size, layout, heads, head_dim, kv_dtype, kind):
    """K and V of a page side by side."""
    pages, total = pages_of([23, 1, 40], page_size)
    both = caches_of(2 * total, page_size, layout, heads[1], (head_dim, head_dim), kv_dtype)[0]
    k, v = both.unflatten(0, (total, 2)).unbind(1)
    q = rand(3, 1, heads[0], head_dim)
    assert_call(q, k, v, causal=True, scale=0.2, **pages, **kind_of(kind, heads[0]))


@pytest.mark.parametrize(
    ("page_size", "layout", "heads", "causal", "q_lens", "kind"),
    diagonal(
        (1, 5, 16),
        ("NHD", "HND"),
        ((4, 4), (8, 2)),
        (False, True),
        ((7, 1, 3), (5, 5, 5), (1, 9, 17)),
        ("plain", "soft cap", "window", "ALiBi"),
        keep=5,
    ),
)
def test_flashinfers_prefill_over_pages(page_size, layout, heads, causal, q_lens, kind):
    """Packed queries by `qo_indptr`; their tokens are in the pages already."""
    pages, total = pages_of([own + 11 * place for place, own in enumerate(q_lens)], page_size)
    k, v = caches_of(total, page_size, layout, heads[1], (64, 64), torch.float16)
    starts = numbers(*accumulate(q_lens, initial=0))
    packed = {"cu_seqlens_q": starts, "max_seqlen_q": max(q_lens), "causal": causal}
    q = rand(sum(q_lens), heads[0], 64)
    assert_call(q, k, v, **packed, **pages, **kind_of(kind, heads[0]))


@pytest.mark.parametrize(
    ("heads", "dims", "kind", "dtype"),
    diagonal(
        ((4, 4), (8, 2), (16, 1)),
        ((64, 64), (80, 80), (96, 96), (128, 64), (13, 13), (512, 512), (320, 256)),
        ("plain", "soft cap", "window"),
        (torch.bfloat16, torch.float16),
        keep=3,
    ),
)
def test_sglangs_decode_over_a_pool_of_tokens(heads, dims, kind, dtype):
    """Every token is a page, and a request has a list of slots."""
    pages, total = pages_of([9, 31], page_size=1)
    k, v = caches_of(total, 1, "NHD", heads[1], dims, dtype)
    q = rand(2, 1, heads[0], dims[0], dtype=dtype)
    assert_call(q, k, v, **pages, **kind_of(kind, heads[0]))


def test_sglangs_decode_over_a_pool_of_latent_tokens():
    pages, total = pages_of([9, 31], page_size=1)
    q, pool = (rand(*shape, 576, dtype=torch.bfloat16) for shape in ((2, 1, 16), (total, 1, 1)))
    latent_result(q, pool, scale=192**-0.5, **pages)


@pytest.mark.parametrize(
    ("heads", "q_len", "causal", "varlen", "dtype"),
    diagonal(
        (16, 32, 64, 128),
        (1, 2),
        (False, True),
        (False, True),
        (torch.bfloat16, torch.float16),
        keep=4,
    ),
)
def test_flash_mlas_decode(heads, q_len, causal, varlen, dtype):
    """Pages of 64 tokens in order, NaN past the sequences' ends; lengths that differ have a
    sequence of none: its LSE is -inf here and +inf in FlashMLA.
    """
    lengths = [130, 64, 0] if varlen else [96, 96, 96]
    table = torch.arange(9, dtype=INT32).view(3, 3)
    cache = rand(9, 64, 1, 576, dtype=dtype)
    for sequence, length in enumerate(lengths):
        cache.view(3, 192, 1, 576)[sequence, length:] = math.nan
    q, options = rand(3, q_len, heads, 576, dtype=dtype), {"causal": causal, "block_table": table}
    lse = latent_result(q, cache, cache_seqlens=numbers(*lengths), **options)
    assert lse.shape == (3, heads, q_len)
    if varlen:
        assert lse[2].eq(-math.inf).all()


@pytest.mark.parametrize(
    ("page_size", "layout", "group", "head_dim", "fp8", "kind"),
    diagonal(
        (16, 32, 64),
        ("NHD", "HND"),
        (1, 4, 8),
        (64, 128, 256),
        (None, "caches", "all"),
        ("plain", "sinks", "window"),
        keep=11,
    ),
)
def test_xqas_decode(page_size, layout, group, head_dim, fp8, kind):
    """One scale for Q, one for K and V."""
    pages, total = pages_of([70, 33], page_size)
    dtype = torch.bfloat16 if fp8 is None else E4M3
    k, v = caches_of(total, page_size, layout, 2, (head_dim, head_dim), dtype)
    fields = {**pages, **kind_of(kind, 2 * group)}
    if fp8 is not None:
        fields |= dict.fromkeys(("k_descale", "v_descale"), torch.tensor([0.5]).expand(2, 2))
    if fp8 == "all":
        fields["q_descale"] = torch.tensor([0.25]).expand(2, 2)
    q = rand(2, 1, 2 * group, head_dim, dtype=E4M3 if fp8 == "all" else torch.bfloat16)
    assert_call(q, k, v, **fields)


@pytest.mark.parametrize(
    ("page_size", "q_len", "heads", "fp8", "layout"),
    diagonal((32, 64), (1, 2, 4), (16, 128), (False, True), ("a dimension", "none"), keep=3),
)
def test_tensorrt_llms_mla_decode(page_size, q_len, heads, fp8, layout):
    """Scores by the scale of 128 + 64 columns, pages with a dimension for the one KV head or with
    none, q in the caches' dtype.
    """
    pages, total = pages_of([70, 33], page_size)
    cache = rand(total, page_size, 576, dtype=E4M3 if fp8 else torch.bfloat16)
    if layout == "a dimension":
        # (pages, 1, page_size, 576)
        cache = cache.unsqueeze(1).transpose(1, 2)
    scales = {"k_descale": torch.ones(1), "q_descale": torch.ones(1, 1)} if fp8 else {}
    q = rand(2, q_len, heads, 576, dtype=cache.dtype)
    latent_result(q, cache, causal=True, scale=192**-0.5, **pages, **scales)
