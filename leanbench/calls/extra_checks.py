"""Whether what a call asks for besides plain decode fits its tensors."""

from __future__ import annotations

from typing import Any

import torch

from leanbench.calls.arguments import said
from leanbench.calls.call import WHOLE_NUMBERS, Call, check_device, check_numbers
from leanbench.calls.refusals import refuse_kinds
from leanbench.core.extras import EXTRA_TENSORS, Extras, fp8_name
from leanbench.core.kinds import MOST_SOFTCAP, SAME

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_extras(call: Call) -> None:
    """Whether the extras of a call fit its other tensors, by what a tracer knows of them.

    Raises:
        ValueError: they do not; the sentence names what was given and what is expected.
    """
    extras = call.extras
    if extras is None:
        return
    _check_by_shape(call)
    _check_page_scales(call)
    _check_packed(call)
    _check_append(call)
    _check_rotary(call)
    # A NaN is outside, too.
    if not 0 <= extras.softcap <= MOST_SOFTCAP:
        raise ValueError(
            f"softcap is {extras.softcap}: expected 0 for none, or a number above it, at most"
            f" {MOST_SOFTCAP:g}"
        )


def check_tensors(call: Call) -> None:
    """Whether what must be tensors are tensors, and `max_seqlen_q` a number.

    Raises:
        ValueError: they are not.
        NotImplementedError: no kernel takes them either.
    """
    extras = call.all_extras
    most, chunk = extras.max_seqlen_q, extras.attention_chunk
    # A tensor's number could change under a prepared launch.
    if most is not None and (isinstance(most, bool) or not isinstance(most, WHOLE_NUMBERS)):
        raise ValueError(
            f"max_seqlen_q is {most!r}: expected the most query tokens of a sequence as an int"
        )
    if type(chunk) not in (int, torch.SymInt) or chunk < 0:
        raise ValueError(
            f"attention_chunk is {chunk!r}: expected a number of tokens, or 0 for no chunks"
        )
    for place, tensor in enumerate(extras[:EXTRA_TENSORS]):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            refuse_kinds(call)
            name = Extras._fields[place]
            raise _no_tensor({"k_new": "k", "v_new": "v"}.get(name, name), tensor)
    starts = extras.cu_seqlens_q
    # Without one size it has no batch to ask for; `check_extras` has the rest.
    if starts is not None and starts.dim() == 0:
        raise ValueError(f"cu_seqlens_q is {tuple(starts.shape)}: expected (batch + 1,)")


def _no_tensor(name: str, value: Any) -> ValueError:
    if name.endswith("_page_descale"):
        return ValueError(
            f"{name} is {said(value)}, on the host: pass a torch.float32 tensor (pages,) or (pages,"
            " kv_heads) on the device of q"
        )
    if name.endswith("_descale"):
        return ValueError(
            f"{name} is {said(value)}, on the host: pass a torch.float32 tensor on the device of q,"
            " of one number for all"
        )
    return ValueError(f"{name} is {said(value)}: expected a tensor")


def _check_by_shape(call: Call) -> None:
    """Those whose shapes and dtypes are all there is to check."""
    extras, q, batch = call.all_extras, call.q, call.batch
    q_heads, kv_heads = q.shape[-2], call.k_cache.shape[2]
    if extras.sinks is not None:
        check_numbers("sinks", extras.sinks, q, (q_heads,), dtypes=FLOATS)
    if extras.alibi_slopes is not None:
        shapes = (q_heads,), (batch, q_heads)
        check_numbers("alibi_slopes", extras.alibi_slopes, q, *shapes, dtypes=(torch.float32,))
    if extras.cache_leftpad is not None:
        check_numbers("cache_leftpad", extras.cache_leftpad, q, (batch,))
    if extras.cache_batch_idx is not None:
        check_numbers("cache_batch_idx", extras.cache_batch_idx, q, (batch,))
    for name in ("q_descale", "k_descale", "v_descale"):
        scales = getattr(extras, name)
        if scales is None:
            continue
        if scales.shape != (batch, kv_heads) or scales.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tuple(scales.shape)} {scales.dtype}: expected"
                f" {(batch, kv_heads)} torch.float32, or what expands to it"
            )
        check_device(name, scales, q)


def _check_page_scales(call: Call) -> None:
    k_scales, v_scales = call.all_extras.k_page_descale, call.all_extras.v_page_descale
    if (k_scales is None) != (v_scales is None):
        given, missing = ("k", "v") if v_scales is None else ("v", "k")
        raise ValueError(
            f"{given}_page_descale goes with {missing}_page_descale, which is None: pass both, ones"
            " for what has no scales, or neither"
        )
    pages, kv_heads = call.k_cache.shape[0], call.k_cache.shape[2]
    for name, scales in (("k_page_descale", k_scales), ("v_page_descale", v_scales)):
        if scales is None:
            continue
        if call.block_table is None:
            raise ValueError(
                f"{name} has scales of pages, and without a block_table the caches have none: pass"
                f" {name.replace('_page', '')}, or a block_table"
            )
        if fp8_name(call.k_cache.dtype) == SAME:
            raise ValueError(
                f"{name} has scales of fp8 pages, k_cache is {call.k_cache.dtype}: leave it out, or"
                " pass caches in torch.float8_e4m3fn or torch.float8_e5m2"
            )
        if scales.shape not in ((pages,), (pages, kv_heads)) or scales.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tuple(scales.shape)} {scales.dtype}: expected {(pages,)} or"
                f" {(pages, kv_heads)} torch.float32, a scale for each page of the caches or for"
                " each of its KV heads"
            )
        check_device(name, scales, call.q)


def _check_packed(call: Call) -> None:
    starts, most = call.all_extras.cu_seqlens_q, call.all_extras.max_seqlen_q
    if starts is None or most is None:
        return
    if starts.dim() != 1 or starts.shape[0] < 2:
        raise ValueError(f"cu_seqlens_q is {tuple(starts.shape)}: expected (batch + 1,)")
    check_numbers("cu_seqlens_q", starts, call.q, (call.batch + 1,))
    if not 1 <= most <= call.q.shape[0]:
        raise ValueError(
            f"max_seqlen_q {most} is outside the 1 to {call.q.shape[0]} tokens of q: pass the most"
            " tokens of a sequence"
        )


def _check_append(call: Call) -> None:
    k, v = call.all_extras.k_new, call.all_extras.v_new
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together: pass both or neither")
    if k is None or v is None:
        return
    if call.cache_seqlens is None and call.length is None:
        raise ValueError("k and v are appended at cache_seqlens: pass that too")
    table = call.block_table
    if table is not None and table.dim() == 2 and table.shape[0] > 1 and table.stride(0) == 0:
        raise ValueError(
            f"block_table {tuple(table.shape)} has strides {tuple(table.stride())}, so that all"
            " sequences have the same pages: append with a block_table that is not expanded"
        )
    starts = call.all_extras.cu_seqlens_k_new
    words, sizes = "batch, new tokens", (call.batch, k.shape[1] if k.dim() > 1 else 0)
    if starts is not None:
        check_numbers("cu_seqlens_k_new", starts, call.q, (call.batch + 1,))
        words, sizes = "new tokens", (k.shape[0] if k.dim() else 0,)
    for name, new, cache in (("k", k, call.k_cache), ("v", v, call.v_cache)):
        expected = (*sizes, *cache.shape[2:])
        if new.shape == expected and 0 in new.shape:
            raise ValueError(
                f"{name} is {tuple(new.shape)}, which has a size 0: leave k and v out where nothing"
                " is appended"
            )
        if new.shape != expected or new.dtype != cache.dtype:
            raise ValueError(
                f"{name} is {tuple(new.shape)} {new.dtype}: expected ({words}, kv_heads, head_dim)"
                f" = {expected} {cache.dtype}, as q and the caches are"
            )
        check_device(name, new, call.q)
        strides = zip(cache.shape, cache.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in strides):
            raise ValueError(
                f"{name}_cache has strides {tuple(cache.stride())}, so that some of its rows are"
                " one in memory: append to a cache that is not expanded"
            )
    if call.new_tokens > call.capacity:
        raise ValueError(
            f"k has {call.new_tokens} tokens, the caches have room for {call.capacity} of a"
            " sequence: append at most as many"
        )


def _check_rotary(call: Call) -> None:
    cos, sin = call.all_extras.rotary_cos, call.all_extras.rotary_sin
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together: pass both or neither")
    if cos is None or sin is None:
        return
    if call.all_extras.k_new is None:
        raise ValueError("rotary_cos and rotary_sin rotate k, which is None: pass k and v too")
    # A table may be shorter than contiguous caches, which have spare capacity.
    least = 1 if call.length is None else call.length
    if call.block_table is not None:
        least = call.capacity
    if (
        cos.dim() != 2
        or cos.shape[0] < least
        or cos.shape[1] % 8
        or not 0 < 2 * cos.shape[1] <= call.q.shape[-1]
    ):
        raise ValueError(
            f"rotary_cos is {tuple(cos.shape)}: expected (positions, rotary_dim / 2), a position"
            f" for each of {least} tokens or more, and rotary_dim a multiple of 16 up to"
            f" {call.q.shape[-1]}"
        )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_numbers(name, table, call.q, tuple(cos.shape), dtypes=(call.q.dtype,))
    if call.all_extras.rotary_seqlens is not None:
        check_numbers("rotary_seqlens", call.all_extras.rotary_seqlens, call.q, (call.batch,))
