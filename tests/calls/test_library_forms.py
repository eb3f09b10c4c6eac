"""Caches and calls laid out as the tests of FlashInfer, SGLang, FlashMLA and TensorRT-LLM's kernels
lay them out, at small sizes, against the fp64 reference.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from depth import diagonal
from every_kind import take_every_kind, take_latent_calls
from forms import INT32, assert_form, plain_form

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Calls that come to the latent kernel."""
    take_every_kind(monkeypatch)
    return take_latent_calls(monkeypatch)


def rand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def page_indices(lengths: list[int], page_size: int) -> tuple[list[list[int]], int]:
    """FlashInfer's and SGLang's list of pages of each sequence, in any order, and all there are."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
    pages = [order[first : first + count] for first, count in zip(starts, counts, strict=True)]
    return pages, len(order)


def block_table(pages: list[list[int]]) -> torch.Tensor:
    """What stands past a sequence's end is no page."""
    most = max(len(own) for own in pages)
    return numbers([own + [2**31 - 1] * (most - len(own)) for own in pages])  # pyright: ignore


def assert_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **fields: Any) -> None:
    """The call with what these fields of AttentionInputs ask for is right, in a poisoned output."""
    scale = fields.pop("scale", None)
    inputs = plain_form(q, k, v, scale=scale, **fields)
    left, right = fields.pop("window_left", -1), fields.pop("window_right", -1)
    options = {**fields, "window_size": (left, right), "softmax_scale": scale}
    out = inputs.out.clone()
    result, lse = lean_attn_with_kvcache(q, k, v, out=out, return_softmax_lse=True, **options)
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
        (None, E4M3),
        ("plain", "soft cap", "window", "ALiBi", "sinks"),
        keep=7,
    ),
)
def test_flashinfers_decode_over_pages(page_size, layout, heads, head_dim, kv_dtype, kind):
    """K and V of a page side by side; lengths by their last page's tokens."""
    lengths = [23, 1, 40]
    pages, total = page_indices(lengths, page_size)
    rows = (page_size, heads[1]) if layout == "NHD" else (heads[1], page_size)
    both = rand(total, 2, *rows, head_dim, dtype=kv_dtype or torch.float16)
    k, v = both.unbind(1)
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    last = [(length - 1) % page_size + 1 for length in lengths]
    counted = [(len(own) - 1) * page_size for own in pages]
    known = [whole + rest for whole, rest in zip(counted, last, strict=True)]
    assert known == lengths
    fields: dict[str, Any] = {
        "plain": {},
        "soft cap": {"softcap": 8.0},
        "window": {"window_left": 6},
        "ALiBi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, heads[0] + 1)},
        "sinks": {"sinks": torch.linspace(-2, 2, heads[0])},
    }[kind]
    q = rand(3, 1, heads[0], head_dim)
    assert_call(
        q,
        k,
        v,
        cache_seqlens=numbers(known),
        block_table=block_table(pages),
        causal=True,
        scale=0.2,
        **fields,
    )


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
    lengths = [own + 11 * place for place, own in enumerate(q_lens)]
    pages, total = page_indices(lengths, page_size)
    rows = (page_size, heads[1]) if layout == "NHD" else (heads[1], page_size)
    k, v = rand(total, *rows, 64), rand(total, *rows, 64)
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    starts = [sum(q_lens[:place]) for place in range(len(q_lens) + 1)]
    fields: dict[str, Any] = {
        "plain": {},
        "soft cap": {"softcap": 8.0},
        "window": {"window_left": 6},
        "ALiBi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, heads[0] + 1)},
    }[kind]
    assert_call(
        rand(starts[-1], heads[0], 64),
        k,
        v,
        cache_seqlens=numbers(lengths),
        block_table=block_table(pages),
        cu_seqlens_q=numbers(starts),
        max_seqlen_q=max(q_lens),
        causal=causal,
        **fields,
    )


@pytest.mark.parametrize(
    ("heads", "dims", "kind", "dtype"),
    diagonal(
        ((4, 4), (8, 2), (16, 1)),
        ((64, 64), (80, 80), (96, 96), (128, 64), (13, 13), (512, 512), (320, 256)),
        ("plain", "logit cap", "window"),
        (torch.bfloat16, torch.float16),
        keep=3,
    ),
)
def test_sglangs_decode_over_a_pool_of_tokens(heads, dims, kind, dtype):
    """Every token is a page: (tokens, kv_heads, head_dim), and a list of slots a request."""
    lengths = [9, 31]
    slots, total = page_indices(lengths, page_size=1)
    k_pool = rand(total, heads[1], dims[0], dtype=dtype)
    v_pool = rand(total, heads[1], dims[1], dtype=dtype)
    fields: dict[str, Any] = {
        "plain": {},
        "logit cap": {"softcap": 30.0},
        "window": {"window_left": 10},
    }[kind]
    assert_call(
        rand(2, 1, heads[0], dims[0], dtype=dtype),
        k_pool[:, None],
        v_pool[:, None],
        cache_seqlens=numbers(lengths),
        block_table=block_table(slots),
        **fields,
    )


def test_sglangs_decode_over_a_pool_of_latent_tokens():
    lengths = [9, 31]
    slots, total = page_indices(lengths, page_size=1)
    pool = rand(total, 1, 576, dtype=torch.bfloat16)
    latent_result(
        rand(2, 1, 16, 576, dtype=torch.bfloat16),
        pool[:, None],
        cache_seqlens=numbers(lengths),
        block_table=block_table(slots),
        scale=192**-0.5,
    )


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
    pages = 3
    table = torch.arange(3 * pages, dtype=INT32).view(3, pages)
    cache = rand(3 * pages, 64, 1, 576, dtype=dtype)
    for sequence, length in enumerate(lengths):
        cache.view(3, pages * 64, 1, 576)[sequence, length:] = math.nan
    lse = latent_result(
        rand(3, q_len, heads, 576, dtype=dtype),
        cache,
        cache_seqlens=numbers(lengths),
        block_table=table,
        causal=causal,
    )
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
    """A window of W tokens is W - 1 tokens before the query's own; one scale for Q, one for K and
    V.
    """
    lengths = [70, 33]
    pages, total = page_indices(lengths, page_size)
    rows = (page_size, 2) if layout == "NHD" else (2, page_size)
    cache_dtype = torch.bfloat16 if fp8 is None else E4M3
    k = rand(total, *rows, head_dim, dtype=cache_dtype)
    v = rand(total, *rows, head_dim, dtype=cache_dtype)
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    fields: dict[str, Any] = {
        "plain": {},
        "sinks": {"sinks": torch.rand(2 * group) * 5},
        "window": {"window_left": 16 - 1},
    }[kind]
    if fp8 is not None:
        kv_scale = torch.tensor([0.5]).expand(2, 2)
        fields |= {"k_descale": kv_scale, "v_descale": kv_scale}
    if fp8 == "all":
        fields["q_descale"] = torch.tensor([0.25]).expand(2, 2)
    assert_call(
        rand(2, 1, 2 * group, head_dim, dtype=E4M3 if fp8 == "all" else torch.bfloat16),
        k,
        v,
        cache_seqlens=numbers(lengths),
        block_table=block_table(pages),
        **fields,
    )


@pytest.mark.parametrize(
    ("page_size", "q_len", "heads", "fp8", "layout"),
    diagonal((32, 64), (1, 2, 4), (16, 128), (False, True), ("a dimension", "none"), keep=3),
)
def test_tensorrt_llms_mla_decode(page_size, q_len, heads, fp8, layout):
    """Scores by the scale of 128 + 64 columns, pages with a dimension for the one KV head or with
    none, q in the caches' dtype.
    """
    lengths, dtype = [70, 33], E4M3 if fp8 else torch.bfloat16
    pages, total = page_indices(lengths, page_size)
    cache = rand(total, page_size, 576, dtype=dtype)
    if layout == "a dimension":
        # (pages, 1, page_size, 576)
        cache = cache.unsqueeze(1).transpose(1, 2)
    latent_result(
        rand(2, q_len, heads, 576, dtype=dtype),
        cache,
        cache_seqlens=numbers(lengths),
        block_table=block_table(pages),
        causal=True,
        scale=192**-0.5,
        **({"k_descale": torch.ones(1), "q_descale": torch.ones(1, 1)} if fp8 else {}),
    )
