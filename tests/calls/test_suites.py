"""Calls as the tests of flash-attn, FlashAttention-3, vLLM and FlashInfer make them: none is
refused. Over tensors without memory: what is asked for, not what comes out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from depth import DEEP
from every_kind import launch_nothing

from leanbench.attention import lean_attn_with_kvcache, qv

#: Calls of a suite, drawn from its parametrisations.
CALLS = 3000 if DEEP else 100
E4M3 = torch.float8_e4m3fn
#: (query tokens, tokens of the cache) of flash-attn's and FlashAttention-3's.
SIZES = (
    *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20_000)),
    *((1, 131_072), (16, 131_072), (128, 128), (256, 512), (2048, 3577)),
)
FLAG = (False, True)
#: Of FlashAttention-3, where they may differ from K's; with 64 columns it has `qv` then, here
#: without the arguments that do not combine with it.
V_DIMS = {32: (256, 512), 64: (256, 512), 160: (128,), 192: (128,)}
KV_HEADS = {"mha": 6, "mqa": 1, "gqa": 3}

Arguments = dict[str, Any]


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def combinations(draw: random.Random, *values: Any) -> Iterator[list[Any]]:
    """Values of each parameter, without end."""
    while True:
        yield [draw.choice([*own]) for own in values]


def flash_attn_2(draw: random.Random) -> Iterator[Arguments]:
    """tests/test_flash_attn.py::test_flash_attn_kvcache; `local` with any windows."""
    for combination in combinations(
        draw,
        *((32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256), SIZES, KV_HEADS, (0, 1), FLAG),
        *(FLAG, FLAG, FLAG, FLAG, (0.0, 0.5, 1.0), FLAG, (None, 256, 512), FLAG, FLAG),
    ):
        d, (q_len, tokens), mha, splits, new_kv, *rest = combination
        alibi, local, causal, same, fraction, interleaved, page, leftpad, batch_idx = rest
        skipped = (q_len > tokens and new_kv) or (not new_kv and fraction > 0)
        if skipped or (page is not None and (leftpad or batch_idx)):
            continue
        yield {
            **_caches((d, d), q_len, tokens, KV_HEADS[mha], page, batch_idx, 2, torch.float16),
            **_appended(new_kv, (d, d), q_len, tokens, KV_HEADS[mha], same, fraction, 2, draw),
            "cache_leftpad": int32(2) if leftpad else None,
            "causal": causal,
            "window_size": _window(local, tokens, draw),
            "rotary_interleaved": interleaved,
            "alibi_slopes": meta(2, 6, dtype=torch.float32) if alibi else None,
            "num_splits": splits,
        }


def flash_attn_3(draw: random.Random) -> Iterator[Arguments]:
    """hopper/test_flash_attn.py::test_flash_attn_kvcache, with each head_dim that it names."""
    masks = ((False, False), (True, False), (False, True))
    for combination in combinations(
        draw,
        *((torch.bfloat16, E4M3), (32, 59, 64, 96, 128, 160, 192, 256), SIZES, KV_HEADS),
        *(FLAG, masks, FLAG, FLAG, (0.0, 0.5, 1.0), (None, 1, 4, 128), FLAG, FLAG, FLAG),
    ):
        dtype, d, (q_len, tokens), mha, new_kv, (causal, local), same, *rest = combination
        interleaved, fraction, page, leftpad, batch_idx, varlen = rest
        skipped = (q_len > tokens and new_kv) or (not new_kv and fraction > 0)
        if skipped or (page is not None and tokens % page):
            continue
        dv, heads = d, KV_HEADS[mha]
        if d in V_DIMS and dtype != E4M3 and draw.random() < 0.5:
            dv = draw.choice(V_DIMS[d])
        call = {
            **_caches((d, dv), q_len, tokens, heads, page, batch_idx, 5, dtype),
            **_appended(new_kv, (d, dv), q_len, tokens, heads, same, fraction, 5, draw, dtype),
            "cache_leftpad": int32(5) if leftpad else None,
            "rotary_seqlens": int32(5),
            "causal": causal,
            "window_size": _window(local, tokens, draw),
            "attention_chunk": draw.choice((0, draw.randint(1, 2 * tokens))) * (causal or local),
            "rotary_interleaved": interleaved,
            "scheduler_metadata": draw.choice((None, int32(9))),
            "num_splits": draw.choice((0, 1, 3)),
        }
        call["page_table"] = call.pop("block_table")
        unmasked = not (local or call["attention_chunk"] or leftpad)
        if d == 64 and dv >= 256 and unmasked and not new_kv:
            call["qv"] = meta(5, q_len, 6, dv, dtype=dtype)
        if varlen:
            total = 5 * q_len - draw.randint(0, 4)
            call["q"] = meta(total, 6, d, dtype=dtype)
            if "qv" in call:
                call["qv"] = meta(total, 6, dv, dtype=dtype)
            call["cu_seqlens_q"], call["max_seqlen_q"] = int32(6), q_len
            if new_kv:
                call["k"], call["v"] = call["k"].flatten(0, 1), call["v"].flatten(0, 1)
                call["cu_seqlens_k_new"] = int32(6)
        yield call


def triton_decode(draw: random.Random) -> Iterator[Arguments]:
    """vLLM's tests/kernels/attention/test_triton_decode_attention.py, and SGLang's
    test_triton_attention_kernels.py, which has the last line.
    """
    sizes = (
        *(((32, kv), d, v_dim) for kv in (8, 32) for d in (128, 192, 576) for v_dim in (128, 512)),
        *(((4, 2), 80, 80), ((4, 4), 13, 13), ((16, 1), 64, 64), ((64, 1), 13, 13)),
        *(((128, 1), 80, 80), ((128, 2), 512, 512), ((128, 1), 576, 512)),
    )
    for ((q_heads, kv_heads), d, v_dim), batch, page in combinations(
        draw, sizes, (2, 3, 5), (1, 16)
    ):
        yield {
            "q": meta(batch, 1, q_heads, d, dtype=torch.bfloat16),
            "k_cache": meta(16_384 // page, page, kv_heads, d, dtype=torch.bfloat16),
            "v_cache": meta(16_384 // page, page, kv_heads, v_dim, dtype=torch.bfloat16),
            "cache_seqlens": int32(batch),
            "block_table": int32(batch, -(-1027 // page)),
            "softmax_scale": d**-0.5,
        }


def vllm(draw: random.Random) -> Iterator[Arguments]:
    """tests/kernels/attention/test_flash_attn.py, packed queries and single ones."""
    for heads, d, page, window, dtype, cap, queries, fp8, out in combinations(
        draw,
        *(((4, 4), (8, 2), (16, 2)), (40, 72, 80, 128, 256), (16, 32), (None, 256)),
        *((torch.float16, torch.bfloat16), (0.0, 10.0, 50.0), ((1, 5, 129), (1, 1, 1), None)),
        *(FLAG, FLAG),
    ):
        q_dtype = E4M3 if fp8 else dtype
        q = meta(3, 1, heads[0], d, dtype=q_dtype)
        packed: Arguments = {}
        if queries is not None:
            q = meta(sum(queries), heads[0], d, dtype=q_dtype)
            packed = {"cu_seqlens_q": int32(4), "max_seqlen_q": max(queries)}
        cache = meta(2048, page, heads[1], d, dtype=q_dtype)
        scales = meta(3, heads[1], dtype=torch.float32) if fp8 else None
        yield {
            **packed,
            "q": q,
            "k_cache": cache,
            "v_cache": cache,
            "cache_seqlens": int32(3),
            "block_table": int32(3, 2016 // page),
            "softmax_scale": d**-0.5,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": cap,
            "out": torch.empty_like(q, dtype=torch.bfloat16 if fp8 else dtype) if out else None,
            **{f"{name}_descale": scales for name in ("q", "k", "v")},
        }


def flashinfer(draw: random.Random) -> Iterator[Arguments]:
    """tests/attention/test_batch_decode_kernels.py, which rotates nothing here."""
    for batch, tokens, page, heads, d, layout, dtype, kv_dtype, q_len in combinations(
        draw,
        *((12, 17, 128), (54, 97, 512, 2048, 16_384), (1, 8, 16), (4, 32), (128, 256, 512)),
        *(("NHD", "HND"), (torch.float16, torch.bfloat16), (None, E4M3), (1, 2, 3)),
    ):
        pages = -(-tokens // page)
        sizes = (page, 4) if layout == "NHD" else (4, page)
        k_cache, v_cache = meta(batch * pages, 2, *sizes, d, dtype=kv_dtype or dtype).unbind(1)
        if layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        yield {
            "q": meta(batch, q_len, heads, d, dtype=dtype),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "cache_seqlens": int32(batch),
            "block_table": int32(batch, pages),
            "causal": True,
        }


def _caches(
    dims: tuple[int, int], q_len: int, tokens: int, kv_heads: int, page: int | None,
    batch_idx: bool, batch: int, dtype: torch.dtype,
) -> Arguments:  # fmt: skip
    rows = 2 * batch if batch_idx else batch
    pages = -(-tokens // page) if page else 0
    first = (3 * rows * pages, page) if page else (rows, tokens)
    return {
        "q": meta(batch, q_len, 6, dims[0], dtype=dtype),
        "k_cache": meta(*first, kv_heads, dims[0], dtype=dtype),
        "v_cache": meta(*first, kv_heads, dims[1], dtype=dtype),
        "cache_seqlens": int32(batch),
        "cache_batch_idx": int32(batch) if batch_idx else None,
        "block_table": int32(rows, 3 * pages) if page else None,
    }


def _appended(
    new_kv: bool, dims: tuple[int, int], q_len: int, tokens: int, kv_heads: int, same: bool,
    fraction: float, batch: int, draw: random.Random, dtype: torch.dtype = torch.float16,
) -> Arguments:  # fmt: skip
    if not new_kv:
        return {"k": None, "v": None}
    new, table = q_len if same else draw.randint(1, q_len), None
    if rotary_dim := int(fraction * dims[0]) // 16 * 16:
        table = meta(3 * batch * (tokens + 512), rotary_dim // 2, dtype=dtype)
    k, v = (meta(batch, new, kv_heads, dim, dtype=dtype) for dim in dims)
    return {"k": k, "v": v, "rotary_cos": table, "rotary_sin": table}


def _window(local: bool, tokens: int, draw: random.Random) -> tuple[int, int]:
    return (draw.randrange(tokens), draw.randrange(tokens)) if local else (-1, -1)


@pytest.mark.parametrize("suite", [flash_attn_2, flash_attn_3, vllm, triton_decode, flashinfer])
def test_no_call_of_the_libraries_suites_is_refused(suite, monkeypatch):
    launch_nothing(monkeypatch)
    monkeypatch.setattr(qv, "unavailable_reason", lambda q: None)
    refused: Counter[str] = Counter()
    for arguments in islice(suite(random.Random(0)), CALLS):
        try:
            out, lse = lean_attn_with_kvcache(**arguments, return_softmax_lse=True)
        except (NotImplementedError, ValueError) as refusal:
            refused[str(refusal)] += 1
            continue
        q, v_cache = arguments["q"], arguments["v_cache"]
        assert out.shape == (*q.shape[:-1], v_cache.shape[-1])
        assert lse.numel() == q.numel() // q.shape[-1]
    assert not refused
