"""`lean_attn_with_kvcache` over KV caches that several GPUs share."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from leanbench.attention import lean_attn_with_kvcache as _on_this_gpu
from leanbench.calls.call import Call, whole_number
from leanbench.calls.extra_checks import check_tensors
from leanbench.calls.prepared import attend
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
    """Decode attention over sequences whose tokens the GPUs of `group` share; every GPU gets the
    whole output, the same bits on all of them. One launch a GPU: partials are exchanged and merged
    in it. Nothing is copied to or read from the host, so calls can be captured in CUDA graphs.

    A collective of the group: `q` is the same on all ranks; caches, lengths and block tables are
    each rank's own. A rank may have no token of a sequence. Which tokens it has is the caller's:
    attention does not ask for their order (`contiguous_shard`, `interleaved_shard`).

    Tensor parallel calls need no exchange: pass this rank's heads of `q` and of the caches, and the
    group of those ranks that have the same heads, or None.

    Args:
        group: None, or a group of one: this GPU has all tokens; the call is then
            `leanbench.lean_attn_with_kvcache`, with all of its arguments.
        cache_seqlens: tokens that this rank has, as in `leanbench.lean_attn_with_kvcache`; the
            other arguments, too.
        **arguments: others of `leanbench.lean_attn_with_kvcache`, with values that ask for nothing,
            such as its defaults.

    Returns:
        As `leanbench.lean_attn_with_kvcache`.

    Raises:
        NotImplementedError: an argument asks for what depends on where in the sequence a token is,
            or changes the caches.
        RuntimeError: a rank did not come in time in an earlier call.
        TypeError: `group` is no ContextGroup, or there is no such argument.
        UserError: the group's workspace is too small.
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
    _refuse(q, k_cache, v_cache, causal, arguments)
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
        None if on_device else whole_number(cache_seqlens),
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
    if q.dim() == 4 and v_cache.dim() == 4:
        group.check_room(math.prod(q.shape[:3]), v_cache.shape[3])
    result, lse = attend(call, return_softmax_lse)
    return result if lse is None else (result, lse)


def _of_fp8(tensor: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | None:
    """The scales of a tensor in fp8; others have none."""
    return None if fp8_name(tensor.dtype) == SAME else scales


def _refuse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    causal: bool,
    arguments: dict[str, Any],
) -> None:
    q_len = q.shape[1] if q.dim() == 4 else None
    asked = [name for name, value in arguments.items() if _asks(name, value, q_len)]
    if asked:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support {', '.join(asked)} where GPUs share the"
            " sequences: leave it out, or split heads (tensor parallel)"
        )
    if causal and q.dim() == 4 and q.shape[1] > 1:
        raise NotImplementedError(
            f"lean_attn_with_kvcache does not support causal=True with {q.shape[1]} query tokens"
            " where GPUs share the sequences: attend to one token at a time, or split heads"
        )
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        raise NotImplementedError(
            "lean_attn_with_kvcache is for inference and has no gradient, but a tensor of the call"
            " requires one: call it under torch.no_grad()"
        )


def _asks(name: str, value: Any, q_len: int | None) -> bool:
    """Whether an argument asks for what depends on places of tokens, or is not supported.

    Raises:
        TypeError: there is no such argument.
    """
    if name in _WITHOUT_EFFECT:
        return False
    if name == "window_size":
        return _limits(value, q_len)
    if name == "attention_chunk":
        return bool(value)
    if name in _NOT_SHARED:
        return value is not None
    raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")


def _limits(window_size: Any, q_len: int | None) -> bool:
    """Whether a window leaves tokens out, however many a rank has: to the right of a sequence's
    only query token there are none.
    """
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        return True
    return left >= 0 or (right >= 0 and q_len != 1)
