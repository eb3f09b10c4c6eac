"""Calls of `lean_mla_with_kvcache`, as they are and as an operator of torch."""

from __future__ import annotations

import torch

from leanbench.calls.call import Call, check_layouts
from leanbench.calls.latent_launch import as_attention, check_latent, check_latent_out
from leanbench.calls.prepared import attend
from leanbench.core.extras import Extras, fp8_name
from leanbench.core.kinds import SAME


def latent_call(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    k_descale: torch.Tensor | None = None,
) -> Call:
    extras = None
    if k_descale is not None and fp8_name(kv_cache.dtype) != SAME:
        extras = Extras(k_descale=k_descale)
    return Call(
        q,
        kv_cache,
        kv_cache,
        cache_seqlens,
        length,
        block_table,
        out,
        softmax_scale,
        causal,
        extras=extras,
        latent=True,
    )


def attend_latent_traced(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if asked for, through an operator; errors as in leanbench.latent."""
    check_layouts(call)
    result, lse = torch.ops.leanbench.lean_mla_with_kvcache.default(
        call.q,
        call.k_cache,
        call.cache_seqlens,
        call.length,
        call.block_table,
        call.softmax_scale,
        call.causal,
        call.all_extras.k_descale,
    )
    if call.out is not None:
        check_latent_out(call, call.out)
        result = call.out.copy_(result)
    return result, lse if with_lse else None


def _operator(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    k_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = latent_call(
        q, kv_cache, cache_seqlens, length, block_table, None, softmax_scale, causal, k_descale
    )
    out, lse = attend(call, with_lse=True)
    assert lse is not None
    return out, lse


def _shapes(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    k_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = latent_call(
        q, kv_cache, cache_seqlens, length, block_table, None, softmax_scale, causal, k_descale
    )
    check_latent(call)
    call = as_attention(call)
    return q.new_empty(call.out_shape), q.new_empty(call.lse_shape, dtype=torch.float32)


_LIBRARY = torch.library.Library("leanbench", "FRAGMENT")
_LIBRARY.define(
    "lean_mla_with_kvcache(Tensor q, Tensor kv_cache, Tensor? cache_seqlens, SymInt? length,"
    " Tensor? block_table, float? softmax_scale, bool causal,"
    " Tensor? k_descale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("lean_mla_with_kvcache", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("leanbench::lean_mla_with_kvcache", _shapes, lib=_LIBRARY)
