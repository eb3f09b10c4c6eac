"""Calls with `qv`: FlashAttention-3's form of attention over a latent cache, whose K and V are two
views of it.
"""

from __future__ import annotations

from typing import Any

import torch

from leanbench.calls.traced import is_traced
from leanbench.calls.unpacking import Rows
from leanbench.core.extras import fp8_name
from leanbench.core.kinds import SAME
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM
from leanbench.latent import lean_mla_with_kvcache

_ROPE_DIM = LATENT_DIM - VALUE_DIM


def attend_with_qv(
    q: torch.Tensor,
    qv: Any,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None,
    block_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    softmax_scale: float | None,
    causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of scores q k + qv v; shapes as in leanbench.attention, `qv` as `q` with 512
    columns; `max_seqlen_q` is given with `cu_seqlens_q`.

    Raises:
        NotImplementedError: head_dims are not those of a latent cache, or the caches are in fp8.
        ValueError: `qv` does not fit the other tensors.
    """
    if not isinstance(qv, torch.Tensor) or qv.shape[:-1] != q.shape[:-1] or qv.dtype != q.dtype:
        given = f"{tuple(qv.shape)} {qv.dtype}" if isinstance(qv, torch.Tensor) else repr(qv)
        raise ValueError(f"qv is {given}: expected {(*q.shape[:-1], VALUE_DIM)} {q.dtype}, as q is")
    dims = (q.shape[-1], k_cache.shape[-1], qv.shape[-1], v_cache.shape[-1])
    if dims != (_ROPE_DIM, _ROPE_DIM, VALUE_DIM, VALUE_DIM):
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support qv with head_dims {dims} of q, k_cache, qv"
            f" and v_cache: choose {_ROPE_DIM}, {_ROPE_DIM}, {VALUE_DIM} and {VALUE_DIM}"
        )
    if fp8_name(k_cache.dtype) != SAME:
        raise NotImplementedError(
            "lean_attn_with_kvcache does not support qv with fp8 caches: pass the latent cache"
            " whole to lean_mla_with_kvcache"
        )
    whole = torch.cat([qv, q], dim=-1)
    rows = None
    if cu_seqlens_q is not None:
        assert max_seqlen_q is not None
        rows = Rows(cu_seqlens_q, whole.shape[0], max_seqlen_q)
        whole = rows.unpack(whole)
    result, lse = lean_mla_with_kvcache(
        whole,
        _latent(k_cache, v_cache),
        cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        return_softmax_lse=True,
        out=None if rows is not None else out,
    )
    if rows is None:
        return result, lse
    if out is None:
        out = q.new_empty((*q.shape[:-1], VALUE_DIM))
    packed_lse = lse.new_empty((q.shape[1], q.shape[0]))
    rows.pack(result, lse, out, packed_lse)
    return out, packed_lse


def _latent(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """(*, 576): the cache whose views these are, or a copy of both."""
    if (
        not is_traced(k_cache, k_cache, v_cache)
        and k_cache.shape[:-1] == v_cache.shape[:-1]
        and k_cache.stride() == v_cache.stride()
        and k_cache.data_ptr() == v_cache.data_ptr() + VALUE_DIM * v_cache.element_size()
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    ):
        return v_cache.as_strided((*v_cache.shape[:-1], LATENT_DIM), v_cache.stride())
    return torch.cat([v_cache, k_cache], dim=-1)
