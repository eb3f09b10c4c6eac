"""Calls with `qv`: scores are q k + qv v, FlashAttention-3's form of attention over a latent cache,
whose K and V are two views of it.

They are calls over rows of K and V one after the other: plain ones up to 576 columns together, and
of `lean_mla_with_kvcache` where these are 64 and 512 of what it takes. But for such that are views
of one cache, without windows and paddings, the caches are copied in every call: for compatibility,
not for speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from leanbench.calls import values
from leanbench.calls.appending import after_append
from leanbench.calls.call import Call, check_device, check_layouts
from leanbench.calls.empty import attend_nothing
from leanbench.calls.extra_checks import check_extras, check_tensors
from leanbench.calls.latent_launch import device_refusal, is_on_hopper
from leanbench.calls.padding import is_whole, padded_dim
from leanbench.calls.prepared import check_runs_on
from leanbench.calls.refusals import refuse_kinds
from leanbench.calls.run import refuse_derivatives, run
from leanbench.calls.spans import (
    has_spans,
    lengths_of,
    paddings_of,
    rows_from,
    spans_of,
)
from leanbench.calls.traced import is_traced
from leanbench.calls.unpacking import Rows
from leanbench.core.extras import fp8_name
from leanbench.core.kinds import SAME
from leanbench.kernels.lean.cuda_kernel import HEAD_DIMS
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM
from leanbench.latent import lean_mla_with_kvcache

_ROPE_DIM = LATENT_DIM - VALUE_DIM
#: Tokens of a latent cache that are copied at a time, for as many query tokens as see so many.
_COPIED_TOKENS = 1 << 16


def attend_with_qv(call: Call, qv: Any, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if asked for, of scores q k + qv v.

    Args:
        call: what else is asked for.
        qv: like `q`, with the columns of `v_cache`.

    Raises:
        NotImplementedError: no kernel takes it.
        ValueError: the tensors do not fit together.
    """
    check_layouts(call, qv=qv)
    call = call.with_own_rows()
    _check(call, qv)
    if call.q.numel() == 0 or call.k_cache.numel() == 0:
        return attend_nothing(call, with_lse)
    if call.softmax_scale is None:
        call = call._replace(softmax_scale=(call.q.shape[-1] + qv.shape[-1]) ** -0.5)
    if _is_latent(call):
        call = after_append(call)
        return _attend_latent(call, torch.cat([qv, call.q], dim=-1), with_lse)
    result = run(_joined(call, qv), with_lse)
    if call.all_extras.k_new is not None:
        # What is refused, is so before the caller's caches are written.
        after_append(call)
    return result


def _check(call: Call, qv: Any) -> None:
    """Everything that can be refused, before anything is appended."""
    check_tensors(call)
    q = call.q
    expected = (*q.shape[:-1], *call.v_cache.shape[-1:])
    if not isinstance(qv, torch.Tensor) or qv.shape != expected or qv.dtype != q.dtype:
        given = f"{tuple(qv.shape)} {qv.dtype}" if isinstance(qv, torch.Tensor) else repr(qv)
        raise ValueError(
            f"qv is {given}: expected {tuple(expected)} {q.dtype}, as q is, with the columns of"
            " v_cache"
        )
    check_device("qv", qv, q)
    refuse_derivatives(call, qv)
    if fp8_name(call.k_cache.dtype) != SAME:
        raise NotImplementedError(
            "lean_attn_with_kvcache does not support qv with fp8 caches: pass the latent cache"
            " whole to lean_mla_with_kvcache"
        )
    _refuse(call)
    if 0 in (q.numel(), call.k_cache.numel()) and not is_traced(*call[:3]):
        return
    call.check()
    check_extras(call)
    call.check_length()
    if is_traced(*call[:3]):
        # The operators that the call becomes refuse kinds: sizes may be symbols here.
        return
    refuse_kinds(call)
    if not _is_latent(call):
        check_runs_on(q.device)
    if values.are_read(q):
        values.check_values(call)


def _is_latent(call: Call) -> bool:
    """Whether the kernel for latent caches takes it."""
    if (call.k_cache.shape[-1], call.v_cache.shape[-1]) != (_ROPE_DIM, VALUE_DIM):
        return False
    extras, scale = call.all_extras, call.softmax_scale
    beyond = (
        extras.softcap,
        extras.alibi_slopes is not None,
        extras.sinks is not None,
        call.batch_invariant,
        call.config is not None,
        scale is not None and not 0 < scale < math.inf,
    )
    if any(beyond):
        return False
    # What else it needs, its operator refuses: TorchDynamo cannot look for a compiler.
    return is_on_hopper(call.q) if is_traced(*call[:3]) else device_refusal(call.q) is None


def _refuse(call: Call) -> None:
    k_dim, v_dim = call.q.shape[-1], call.v_cache.shape[-1]
    if k_dim + v_dim > max(HEAD_DIMS):
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support qv with head_dims {k_dim} of q and {v_dim} of"
            f" v_cache: choose at most {max(HEAD_DIMS)} together"
        )


def _joined(call: Call, qv: torch.Tensor) -> Call:
    """The plain call over rows of q and qv, and of K and V, up to a head_dim that kernels take;
    tokens are appended to that copy of the caches.
    """
    k_dim, v_dim = call.k_cache.shape[3], call.v_cache.shape[3]
    columns = padded_dim(k_dim + v_dim, call.k_cache)
    rows = _in_a_row(call.k_cache, call.v_cache, columns)
    if call.all_extras.k_new is not None:
        call = call._replace(k_cache=rows[..., :k_dim], v_cache=rows[..., k_dim : k_dim + v_dim])
    call = after_append(call)
    return call._replace(q=_in_a_row(call.q, qv, columns), k_cache=rows)


def _in_a_row(first: torch.Tensor, second: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of both, then 0."""
    rest = columns - first.shape[-1] - second.shape[-1]
    return torch.cat([first, second, first.new_zeros((*first.shape[:-1], rest))], dim=-1)


def _attend_latent(
    call: Call, q: torch.Tensor, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same over a latent cache, by its kernel, which has no packed queries, windows or
    paddings.

    Args:
        q: rows of 576.
    """
    starts, out, rows = call.all_extras.cu_seqlens_q, call.out, None
    if starts is not None:
        rows = Rows(starts, q.shape[0], call.q_len)
        q = rows.unpack(q)
    is_own = rows is not None or has_spans(call.all_extras) or is_traced(*call[:3])
    # The kernel writes 16 bytes at a time.
    given = None if is_own or out is None or not is_whole(out) else out
    result, lse = _attend_rows(call, q, given)
    if rows is not None:
        if out is None:
            out = result.new_empty(call.out_shape)
        packed_lse = lse.new_empty(call.lse_shape)
        rows.pack(result, lse, out, packed_lse)
        return out, packed_lse if with_lse else None
    if out is not None and given is None:
        result = out.copy_(result)
    return result, lse if with_lse else None


def _attend_rows(
    call: Call, q: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of q (batch, q_len, q_heads, 576)."""
    extras, causal = call.all_extras, call.causal
    latent, scale = _latent(call.k_cache, call.v_cache), call.softmax_scale
    if not has_spans(extras):
        lengths, table = call.cache_seqlens, call.block_table
        if extras.cache_leftpad is not None or extras.cache_batch_idx is not None:
            # Each sequence from its first token on.
            paddings = paddings_of(call)
            latent, table = _copied(call, latent, paddings[:, None], call.capacity), None
            lengths = (lengths_of(call) - paddings).clamp(min=0).int()
        return lean_mla_with_kvcache(
            q,
            latent,
            call.length if lengths is None else lengths,
            block_table=table,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
            out=out,
        )  # pyright: ignore[reportReturnType]
    batch, q_len = q.shape[:2]
    spans = spans_of(call, q_len)
    at_once = max(1, _COPIED_TOKENS // (batch * spans.width))
    results, logs = [], []
    for place in range(0, q_len, at_once):
        own = slice(place, place + at_once)
        queries = q[:, own]
        # Every query token is a sequence of its own, of the tokens that it sees.
        result, lse = lean_mla_with_kvcache(
            queries.flatten(0, 1)[:, None],
            _copied(call, latent, spans.first[:, own], spans.width),
            spans.tokens[:, own].flatten().int(),
            softmax_scale=scale,
            return_softmax_lse=True,
        )
        results.append(result[:, 0].view(batch, -1, *result.shape[2:]))
        logs.append(lse.view(batch, -1, lse.shape[1]))
    return torch.cat(results, dim=1), torch.cat(logs, dim=1).transpose(1, 2).contiguous()


def _copied(call: Call, latent: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """(batch * q_len, width, kv_heads, 576): tokens from each `first` (batch, q_len) on."""
    return latent[rows_from(call, first, width)].flatten(0, 1)


def _latent(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """(*, 576): the cache whose views these are, where a kernel reads it, or a copy of both."""
    if (
        not is_traced(k_cache, k_cache, v_cache)
        and k_cache.shape[:-1] == v_cache.shape[:-1]
        and _steps(k_cache) == _steps(v_cache)
        and k_cache.data_ptr() == v_cache.data_ptr() + VALUE_DIM * v_cache.element_size()
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        and is_whole(v_cache)
    ):
        return v_cache.as_strided((*v_cache.shape[:-1], LATENT_DIM), v_cache.stride())
    return torch.cat([v_cache, k_cache], dim=-1)


def _steps(cache: torch.Tensor) -> list[int]:
    """Strides of the dimensions before the last one; a view gives one of size 1 any stride."""
    sizes_and_strides = zip(cache.shape[:-1], cache.stride()[:-1], strict=True)
    return [stride for size, stride in sizes_and_strides if size > 1]
