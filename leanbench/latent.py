"""Multi-head latent attention for your own code: `lean_mla_with_kvcache`."""

from __future__ import annotations

import math
from typing import Any

import torch

from leanbench.calls import values
from leanbench.calls.arguments import NO_NUMBER, check_types, flag, said
from leanbench.calls.call import Call, check_device, check_layouts, check_pages, whole_number
from leanbench.calls.empty import attend_nothing
from leanbench.calls.latent import attend_latent_traced, latent_call
from leanbench.calls.latent_launch import (
    LatentShapes,
    as_attention,
    check_heads,
    check_latent_out,
    latent_shapes,
)
from leanbench.calls.prepared import attend
from leanbench.calls.run import refuse_derivatives
from leanbench.calls.traced import is_traced
from leanbench.core.extras import Extras, fp8_name
from leanbench.core.kinds import SAME
from leanbench.kernels.mla import PAGE_TOKENS
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM


def lean_mla_with_kvcache(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int = VALUE_DIM,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a latent cache (MLA), on Hopper GPUs: all query heads attend to one row
    of 576 numbers a token, which is K, and whose first 512 numbers are V. Shapes are FlashMLA's.

    No kernel takes `q` in fp8, several KV heads, or pages of no multiple of 64 tokens. Such calls
    make `q` bf16, launch once for each KV head, and copy the whole capacity of the sequences in
    every call: for compatibility, not for speed.

    A batch, query tokens or a cache of none are taken as by `lean_attn_with_kvcache`.

    Args:
        q: (batch, q_len, q_heads, 576), bf16 or fp16, or fp8 beside a cache in fp8. Copied in every
            call where positions and heads do not lie in a row in memory.
        kv_cache: (batch, tokens, 576) or (batch, tokens, kv_heads, 576), with a `block_table`
            (pages, page_size, kv_heads, 576) or (pages, page_size, 576), best with one KV head and
            pages of a multiple of 64 tokens; in the dtype of `q`, or all 576 numbers in
            torch.float8_e4m3fn or float8_e5m2.
        cache_seqlens: tokens in use: one number, or (batch,) int32 on the same device. None: all.
            A sequence of length 0 gives output 0 and LSE -inf.
        block_table: (batch, pages of a sequence), int32: where each page is.
        softmax_scale: above 0; 576 ** -0.5 by default.
        head_dim_v: 512.
        q_descale: one number, or (batch, kv_heads), fp32, on the device of `q`: what fp8 numbers of
            `q` are multiplied by; None: 1. Ignored where `q` is not fp8.
        k_descale: like `q_descale`, above 0, for fp8 numbers of `kv_cache`, as K and as V. Ignored
            where `kv_cache` is not fp8.
        causal: True: the last of several query tokens sees the whole sequence, each one before it a
            token less. False: each sees all tokens.
        return_softmax_lse: also return the LSE, (batch, q_heads, q_len), fp32.
        out: (batch, q_len, q_heads, 512), where the output is written; None: a new tensor.

    Raises:
        NotImplementedError: a tensor requires a gradient or carries a tangent.
        TypeError: what is to be a tensor is none.
        ValueError: shapes, dtypes, strides or devices do not fit together.
        UserError: the tensors are not on a Hopper GPU, or NVRTC is missing.
    """
    check_types(q=q, kv_cache=kv_cache)
    given = {"block_table": block_table, "out": out}
    check_types(**{name: tensor for name, tensor in given.items() if tensor is not None})
    if isinstance(head_dim_v, torch.Tensor) or head_dim_v != VALUE_DIM:
        raise ValueError(f"head_dim_v is {head_dim_v}: only {VALUE_DIM} is supported, pass that")
    try:
        scale = None if softmax_scale is None else float(softmax_scale)
    except NO_NUMBER:
        scale = math.nan
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale is {said(softmax_scale)}: pass a number above 0")
    if not isinstance(causal, bool):
        causal = flag("causal", causal, "lean_mla_with_kvcache")
    if not isinstance(return_softmax_lse, bool):
        return_softmax_lse = flag("return_softmax_lse", return_softmax_lse, "lean_mla_with_kvcache")
    cache = kv_cache
    if block_table is not None and kv_cache.dim() == 3:
        cache = kv_cache.unsqueeze(2)
    lengths, length = cache_seqlens, None
    if not isinstance(lengths, torch.Tensor):
        lengths, length = None, whole_number(cache_seqlens)
    is_fp8 = fp8_name(kv_cache.dtype) != SAME
    if not is_fp8 or fp8_name(q.dtype) == SAME:
        q_descale = None
    call = latent_call(q, cache, lengths, length, block_table, out, scale, causal)
    if is_fp8 and k_descale is not None:
        k_descale = _scales("k_descale", k_descale, call)
        call = call._replace(extras=Extras(k_descale=k_descale))
    if q_descale is not None:
        q_descale = _scales("q_descale", q_descale, call)
    refuse_derivatives(call, *(() if q_descale is None else (q_descale,)))
    if is_fp8 and fp8_name(q.dtype) != SAME:
        call = call._replace(q=_in_bf16(q, q_descale))
    is_none = q.numel() == 0 or kv_cache.numel() == 0
    try:
        if is_none and q.shape[-1:] == kv_cache.shape[-1:] == (LATENT_DIM,):
            result, lse = attend_nothing(as_attention(call), return_softmax_lse)
        else:
            result, lse = _attend_by_head(call, return_softmax_lse)
    except LatentShapes:
        # Of the tensors as they were passed: a launch has one KV head.
        raise latent_shapes(q, kv_cache, block_table) from None
    except RuntimeError:
        check_layouts(call)
        raise
    return result if lse is None else (result, lse)


def _group(q: torch.Tensor, kv_heads: int) -> int:
    """Query heads of a KV head."""
    if q.shape[2] % kv_heads:
        raise ValueError(
            f"q has {q.shape[2]} heads, kv_cache {kv_heads}: expected a multiple of those"
        )
    return q.shape[2] // kv_heads


def _kv_heads(cache: torch.Tensor) -> int:
    return cache.shape[2] if cache.dim() == 4 else 1


def _scales(name: str, scales: Any, call: Call) -> torch.Tensor:
    """(1,), or (batch, kv_heads), at any strides."""
    if not isinstance(scales, torch.Tensor):
        raise ValueError(
            f"{name} is {scales!r}, on the host: pass a torch.float32 tensor of one number on the"
            " device of q"
        )
    check_device(name, scales, call.q)
    shape = (*call.q.shape[:1], _kv_heads(call.k_cache))
    fits = scales.dim() == 2 and all(
        own in (1, size) for own, size in zip(scales.shape, shape, strict=False)
    )
    if scales.dtype != torch.float32 or not (scales.numel() == 1 or fits):
        raise ValueError(
            f"{name} is {tuple(scales.shape)} {scales.dtype}: expected one number, or {shape}, in"
            " torch.float32"
        )
    if scales.numel() == 1:
        return scales if scales.dim() == 1 else scales.reshape(1)
    return scales.expand(shape)


def _in_bf16(q: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """As it is, or times a scale of `_scales`, each KV head's for its query heads."""
    if scale is None:
        return q.to(torch.bfloat16)
    if scale.dim() == 2 and q.dim() != 4:
        # Of no shape that is taken, as is said next.
        return q.to(torch.bfloat16)
    if scale.dim() == 2:
        scale = scale.repeat_interleave(_group(q, scale.shape[1]), dim=1)[:, None, :, None]
    return (q.float() * scale).to(torch.bfloat16)


def _attend_by_head(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A launch for each KV head, one for a cache that has no such dimension."""
    q, cache = call.q, call.k_cache
    kv_heads = _kv_heads(cache)
    if kv_heads < 2 or q.dim() != 4:
        return _attend(_with_whole_pages(call), with_lse)
    if cache.shape[3] != LATENT_DIM:
        raise latent_shapes(q, cache, call.block_table)
    group = _group(q, kv_heads)
    is_copied = call.block_table is not None and cache.shape[1] % PAGE_TOKENS
    if not is_copied:
        check_heads(cache)
    out = call.out
    if out is None:
        out = q.new_empty((*q.shape[:3], VALUE_DIM))
    else:
        check_latent_out(call, out)
    logs = []
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        # Positions and heads in a row.
        rows = q[:, :, own].contiguous() if q.shape[1] > 1 else q[:, :, own]
        latent = cache[:, :, head : head + 1]
        one = call._replace(q=rows, k_cache=latent, v_cache=latent, out=out[:, :, own])
        scale = call.all_extras.k_descale
        if scale is not None and scale.dim() == 2:
            one = one._replace(extras=Extras(k_descale=scale[:, head : head + 1]))
        logs.append(_attend(_with_whole_pages(one), with_lse)[1])
    return out, torch.cat(logs, dim=1) if with_lse else None


def _with_whole_pages(call: Call) -> Call:
    """Each sequence's pages copied one after the other where no kernel takes them."""
    cache, table = call.k_cache, call.block_table
    if table is None or cache.dim() != 4 or cache.shape[1] % PAGE_TOKENS == 0 or 0 in cache.shape:
        return call
    if fp8_name(cache.dtype) == SAME and cache.element_size() != 2:
        # Of no dtype that is taken, as is said next.
        return call
    check_pages(table, call.q, call.q.shape[0])
    if not is_traced(call.q, cache, cache) and values.are_read(cache):
        values.check_values(call)
    # What stands past a sequence's end may be no page.
    pages = table.clamp(0, cache.shape[0] - 1)
    # As bits: torch does not index every fp8.
    whole = cache.view(torch.int8 if cache.element_size() == 1 else torch.int16)[pages]
    whole = whole.view(cache.dtype).flatten(1, 2)
    return call._replace(k_cache=whole, v_cache=whole, block_table=None)


def _attend(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    run = attend_latent_traced if is_traced(call.q, call.k_cache, call.k_cache) else attend
    return run(call, with_lse)
