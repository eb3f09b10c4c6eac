"""Calls with `qv`: scores are q k + qv v, FlashAttention-3's form of latent attention.

Over two views of one latent cache, the call is one of `lean_mla_with_kvcache`. Otherwise it is a
plain call over copies of the caches: for compatibility, not for speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from leanbench.attention.call import Call
from leanbench.attention.checks import (
    check_consistency,
    check_device,
    check_layouts,
    check_length,
    check_tensors,
    check_values,
    reads_values,
)
from leanbench.attention.compat import Rows, is_aligned, padded_dim
from leanbench.attention.mla import lean_mla_with_kvcache
from leanbench.attention.mla_launch import unavailable_reason
from leanbench.attention.run import check_no_derivatives, is_traced, run
from leanbench.core.extras import fp8_name
from leanbench.core.kinds import SAME
from leanbench.kernels.lean.cuda_kernel import HEAD_DIMS
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM


def attend_with_qv(call: Call, qv: Any, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if requested, of scores q k + qv v.

    Args:
        qv: Like `q`, with the columns of `v_cache`.

    Raises:
        NotImplementedError: The call is unsupported.
        ValueError: The tensors are inconsistent.
    """
    check_layouts(call, qv=qv)
    call = call.without_spare_rows()
    _check(call, qv)
    if call.softmax_scale is None:
        call = call._replace(softmax_scale=(call.q.shape[-1] + qv.shape[-1]) ** -0.5)
    latent = _latent_cache(call)
    if latent is not None:
        return _attend_latent(call, latent, torch.cat([qv, call.q], dim=-1), with_lse)
    columns = padded_dim(call.q.shape[-1] + qv.shape[-1], call.k_cache)
    k_cache = _concat_padded(call.k_cache, call.v_cache, columns)
    return run(call._replace(q=_concat_padded(call.q, qv, columns), k_cache=k_cache), with_lse)


def _check(call: Call, qv: Any) -> None:
    check_tensors(call)
    q, extras = call.q, call.all_extras
    expected = (*q.shape[:-1], *call.v_cache.shape[-1:])
    if not isinstance(qv, torch.Tensor) or qv.shape != expected or qv.dtype != q.dtype:
        given = f"{tuple(qv.shape)} {qv.dtype}" if isinstance(qv, torch.Tensor) else repr(qv)
        raise ValueError(
            f"qv is {given}: expected {tuple(expected)} {q.dtype}, as q is, with the columns of"
            " v_cache"
        )
    check_device("qv", qv, q)
    check_no_derivatives(call, qv)
    features = {
        "window_size": max(extras.window_left, extras.window_right) >= 0,
        "attention_chunk": extras.attention_chunk > 0,
        "cache_leftpad": extras.cache_leftpad is not None,
        "k and v": extras.k_new is not None or extras.v_new is not None,
        "a block_table of each KV head": call.has_table_of_heads,
    }
    unsupported = [name for name, is_set in features.items() if is_set]
    reason = None
    if fp8_name(call.k_cache.dtype) != SAME:
        reason = "with fp8 caches: pass the latent cache whole to lean_mla_with_kvcache"
    elif q.shape[-1] + qv.shape[-1] > max(HEAD_DIMS):
        dims = f"{q.shape[-1]} of q and {qv.shape[-1]} of v_cache"
        reason = f"with head_dims {dims}: choose at most {max(HEAD_DIMS)} together"
    elif unsupported:
        reason = (
            f"together with {', '.join(unsupported)}: instead of qv, concatenate q with qv and"
            " k_cache with v_cache"
        )
    if reason:
        raise NotImplementedError(f"lean_attn_with_kvcache does not support qv {reason}")
    has_numbers = q.numel() and call.k_cache.numel()
    columns, rows = call.k_cache.shape[-1:], call.k_cache.shape[:-1]
    if has_numbers or columns != q.shape[-1:] or rows != call.v_cache.shape[:-1]:
        check_consistency(call)
    if has_numbers and not is_traced(*call[:3]):
        check_length(call)
        if reads_values(q):
            check_values(call)


def _latent_cache(call: Call) -> torch.Tensor | None:
    """Return the cache (..., 576) if K and V are its views and its kernel supports the call."""
    k_cache, v_cache, scale = call.k_cache, call.v_cache, call.softmax_scale
    extras = call.all_extras._replace(cu_seqlens_q=None, max_seqlen_q=None)
    if (
        is_traced(*call[:3])
        or (k_cache.shape[-1], v_cache.shape[-1]) != (LATENT_DIM - VALUE_DIM, VALUE_DIM)
        or not extras.asks_nothing
        or call.batch_invariant
        or call.config is not None
        or scale is None
        or not 0 < scale < math.inf
        or 0 in (call.q.numel(), k_cache.numel())
        or k_cache.shape[:-1] != v_cache.shape[:-1]
        or _strides(k_cache) != _strides(v_cache)
        or k_cache.data_ptr() != v_cache.data_ptr() + VALUE_DIM * v_cache.element_size()
        or k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr()
        or not is_aligned(v_cache)
        or unavailable_reason(call.q) is not None
    ):
        return None
    return v_cache.as_strided((*v_cache.shape[:-1], LATENT_DIM), v_cache.stride())


def _strides(cache: torch.Tensor) -> list[int]:
    """Return the strides of all dimensions but the last that have several elements."""
    sizes_and_strides = zip(cache.shape[:-1], cache.stride()[:-1], strict=True)
    return [stride for size, stride in sizes_and_strides if size > 1]


def _attend_latent(
    call: Call, latent: torch.Tensor, q: torch.Tensor, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over a latent cache; its kernel does not support packed queries."""
    out, rows = call.out, None
    if call.all_extras.cu_seqlens_q is not None:
        rows = Rows.of(call)
        q = rows.unpack(q)
    # The kernel writes 16 bytes at a time.
    writes_out = rows is None and out is not None and is_aligned(out)
    result, lse = lean_mla_with_kvcache(
        q,
        latent,
        call.length if call.cache_seqlens is None else call.cache_seqlens,
        block_table=call.block_table,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
        return_softmax_lse=True,
        out=out if writes_out else None,
    )
    if rows is not None:
        if out is None:
            out = result.new_empty(call.out_shape)
        packed_lse = lse.new_empty(call.lse_shape)
        rows.pack(result, lse, out, packed_lse)
        return out, packed_lse if with_lse else None
    if out is not None and not writes_out:
        result = out.copy_(result)
    return result, lse if with_lse else None


def _concat_padded(first: torch.Tensor, second: torch.Tensor, columns: int) -> torch.Tensor:
    """Concatenate along the last dimension and zero-pad to `columns`."""
    rest = columns - first.shape[-1] - second.shape[-1]
    return torch.cat([first, second, first.new_zeros((*first.shape[:-1], rest))], dim=-1)
