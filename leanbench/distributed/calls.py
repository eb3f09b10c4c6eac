"""`lean_attn_with_kvcache` over KV caches that several GPUs share."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from leanbench.attention import lean_attn_with_kvcache as _on_this_gpu
from leanbench.attention.call import Call, host_length
from leanbench.attention.checks import check_tensors
from leanbench.attention.prepared import attend
from leanbench.attention.run import check_no_derivatives
from leanbench.core.extras import Extras, fp8_name
from leanbench.core.kinds import SAME
from leanbench.distributed.group import ContextGroup

#: Arguments of `leanbench.lean_attn_with_kvcache` that ask for something where they are not None.
_NOT_SHARED = (
    "k",
    "v",
    "rotary_cos",
    "rotary_sin",
    "cache_leftpad",
    "alibi_slopes",
    "page_table",
    "cu_seqlens_q",
    "max_seqlen_q",
    "k_page_descale",
    "v_page_descale",
    "learnable_sink",
    "config",
    "qv",
)
#: Those that change nothing without others, or how it is computed and not what.
_WITHOUT_EFFECT = (
    "rotary_interleaved",
    "rotary_seqlens",
    "cu_seqlens_k_new",
    "num_splits",
    "scheduler_metadata",
    "pack_gqa",
    "sm_margin",
)


def lean_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    group: ContextGroup | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0,
    sinks: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    **arguments: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute decode attention over sequences with tokens split over the GPUs of `group`.

    Every GPU gets the whole output with the same bits. There is one launch per GPU, which exchanges
    and merges partials. Nothing is copied to or read from the host, so CUDA graphs can capture
    calls.

    A collective: `q` is the same on all ranks; caches, lengths and block tables are local. A rank
    may have no token of a sequence. Any split of the tokens works (`contiguous_shard`,
    `interleaved_shard`).

    Tensor parallel calls need no exchange: pass the heads of this rank, and the group of the ranks
    that share them, or None.

    Args:
        group: None, or a group of one: this GPU has all tokens, and the call is
            `leanbench.lean_attn_with_kvcache` with all of its arguments.
        cache_seqlens: Tokens on this rank, as in `leanbench.lean_attn_with_kvcache`. So are the
            other arguments.
        **arguments: Further arguments of `leanbench.lean_attn_with_kvcache`, at values without
            effect such as their defaults.

    Returns:
        As `leanbench.lean_attn_with_kvcache`.

    Raises:
        NotImplementedError: An argument depends on the positions of tokens, or changes the caches.
        RuntimeError: A rank timed out in an earlier call.
        TypeError: `group` is not a ContextGroup, or an argument is unknown.
        UserError: The group's workspace is too small.
    """
    if group is not None and not isinstance(group, ContextGroup):
        raise TypeError(f"group is {group!r}: pass a leanbench.distributed.ContextGroup, or None")
    if group is None or group.size == 1:
        return _on_this_gpu(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            softcap=softcap,
            sinks=sinks,
            cache_batch_idx=cache_batch_idx,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            return_softmax_lse=return_softmax_lse,
            batch_invariant=batch_invariant,
            out=out,
            **arguments,
        )
    group.raise_failure()
    _check_arguments(q, causal, arguments)
    on_device = isinstance(cache_seqlens, torch.Tensor)
    extras = None
    if softcap or any(
        tensor is not None for tensor in (sinks, cache_batch_idx, q_descale, k_descale, v_descale)
    ):
        extras = Extras(
            sinks=sinks,
            cache_batch_idx=cache_batch_idx,
            q_descale=_of_fp8(q, q_descale),
            k_descale=_of_fp8(k_cache, k_descale),
            v_descale=_of_fp8(v_cache, v_descale),
            softcap=softcap,
        )
    call = Call(
        q,
        k_cache,
        v_cache,
        cache_seqlens if on_device else None,
        None if on_device else host_length(cache_seqlens),
        block_table,
        out,
        None if softmax_scale is None else float(softmax_scale),
        causal,
        batch_invariant,
        extras=extras,
        peers=group.peers,
    )
    if extras is not None:
        check_tensors(call)
    if torch.is_grad_enabled():
        check_no_derivatives(call)
    if q.dim() == 4 and v_cache.dim() == 4:
        group.check_room(math.prod(q.shape[:3]), v_cache.shape[3])
    result, lse = attend(call, return_softmax_lse)
    return result if lse is None else (result, lse)


def _of_fp8(tensor: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | None:
    """Return the scales of an fp8 tensor, None for others."""
    return None if fp8_name(tensor.dtype) == SAME else scales


def _check_arguments(q: torch.Tensor, causal: bool, arguments: dict[str, Any]) -> None:
    q_len = q.shape[1] if q.dim() == 4 else None
    unsupported = [name for name, value in arguments.items() if _has_effect(name, value, q_len)]
    if unsupported:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support {', '.join(unsupported)} where GPUs share the"
            " sequences: leave it out, or split heads (tensor parallel)"
        )
    if causal and q.dim() == 4 and q.shape[1] > 1:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support causal=True with {q.shape[1]} query tokens"
            " where GPUs share the sequences: attend to one token at a time, or split heads"
        )


def _has_effect(name: str, value: Any, q_len: int | None) -> bool:
    """Return True if an argument depends on the positions of tokens or is unsupported.

    Raises:
        TypeError: The argument is unknown.
    """
    if name in _WITHOUT_EFFECT:
        return False
    if name == "window_size":
        return _limits(value, q_len)
    if name in ("attention_chunk", "shared_prefix"):
        return bool(value)
    if name in _NOT_SHARED:
        return value is not None
    raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")


def _limits(window_size: Any, q_len: int | None) -> bool:
    """Return True if a window may hide tokens; right of a single query token there are none."""
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        return True
    return left >= 0 or (right >= 0 and q_len != 1)
