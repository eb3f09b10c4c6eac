"""Appending ahead of a launch, by torch's operators: what lean.cu's own append does not take.

These are new tokens of which each sequence has a number of its own, rotations that do not begin at
a sequence's length or are of fp8, and caches that a launch sees copies of. It costs some twenty
small kernels a call: for compatibility, not for speed. Nothing is read from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from leanbench.calls.call import Call
from leanbench.core.extras import Extras


class Appended(NamedTuple):
    """A call after its append."""

    #: Rotated.
    q: torch.Tensor
    #: Tokens in the caches, (batch,) int32 or one number for all.
    lengths: torch.Tensor | int
    #: Those of the call that have nothing to do with appending.
    extras: Extras


def after_append(call: Call) -> Call:
    """The call that is left after its new tokens were written: with rotated queries and the new
    lengths. The rows that it has of a block table are picked.
    """
    extras, table, lengths = call.all_extras, call.block_table, call.cache_seqlens
    if table is not None and extras.cache_batch_idx is not None:
        table = table.index_select(0, extras.cache_batch_idx)
        extras = extras._replace(cache_batch_idx=None)
    q, now = call.q, call.length if lengths is None else lengths
    if extras.k_new is not None:
        if lengths is None:
            assert call.length is not None
            lengths = call.length - extras.new_tokens
        caches = (call.k_cache, call.v_cache)
        q, now, extras = append_ahead(q, caches, lengths, table, extras, call.causal)
    is_tensor = isinstance(now, torch.Tensor)
    return call._replace(
        q=q,
        cache_seqlens=now if is_tensor else None,
        length=None if is_tensor else now,
        block_table=table,
        extras=None if extras.asks_nothing else extras,
    )


def append_ahead(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor | int,
    block_table: torch.Tensor | None,
    extras: Extras,
    causal: bool,
) -> Appended:
    """Writes the new tokens into the caches; those that these have no room for are left out.

    Args:
        caches: of K and V.
        lengths: tokens in the caches before, (batch,) int32 or one number for all.
    """
    k_new, v_new = extras.k_new, extras.v_new
    assert k_new is not None
    assert v_new is not None
    capacity = caches[0].shape[1] * (1 if block_table is None else block_table.shape[1])
    if extras.cu_seqlens_k_new is None:
        batch, count = k_new.shape[:2]
        starts = torch.arange(0, (batch + 1) * count, count, device=q.device)
        k_new, v_new, after = k_new.flatten(0, 1), v_new.flatten(0, 1), count
    else:
        starts = extras.cu_seqlens_k_new.long()
        batch, after = starts.shape[0] - 1, starts.diff()
    if isinstance(lengths, torch.Tensor):
        cached = lengths.clamp(0, capacity).long()
    else:
        cached = torch.full((batch,), lengths, device=q.device)
    first = cached if extras.rotary_seqlens is None else extras.rotary_seqlens.long()
    owner, step = _owners(starts, k_new.shape[0])
    if extras.rotary_cos is not None:
        k_new = _rotated(k_new, first[owner] + step, extras)
        windows = (extras.window_left, extras.window_right)
        is_local = causal or max(windows) >= 0 or extras.attention_chunk > 0
        q = _rotated_queries(q, first, extras, step=1 if is_local else 0)
    at = cached[owner] + step
    is_kept = (at < capacity) & (step < starts.diff()[owner])
    at = at.clamp(max=capacity - 1)
    if block_table is not None:
        page_size = caches[0].shape[1]
        rows, at = block_table[owner, at // page_size].long(), at % page_size
    else:
        rows = owner if extras.cache_batch_idx is None else extras.cache_batch_idx[owner].long()
    for cache, new in zip(caches, (k_new, v_new), strict=True):
        _write(cache, rows, at, new, is_kept)
    if isinstance(lengths, torch.Tensor) or isinstance(after, torch.Tensor):
        lengths = (cached + after).clamp(max=capacity).int()
    else:
        lengths = lengths + after
    rest = extras._replace(
        k_new=None,
        v_new=None,
        rotary_cos=None,
        rotary_sin=None,
        rotary_seqlens=None,
        cu_seqlens_k_new=None,
        rotary_interleaved=False,
    )
    return Appended(q, lengths, rest)


def _owners(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(count,) each: which sequence each of the tokens is of, and which of its tokens it is; those
    behind the last sequence's count as that one's.
    """
    tokens = torch.arange(count, device=starts.device)
    owner = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=starts.shape[0] - 2)
    return owner, tokens - starts[owner]


def _rotated_queries(
    q: torch.Tensor, first: torch.Tensor, extras: Extras, step: int
) -> torch.Tensor:
    if extras.cu_seqlens_q is not None:
        owner, place = _owners(extras.cu_seqlens_q.long(), q.shape[0])
        return _rotated(q, first[owner] + step * place, extras)
    places = first[:, None] + step * torch.arange(q.shape[1], device=q.device)
    return _rotated(q.flatten(0, 1), places.flatten(), extras).view(q.shape)


def _rotated(rows: torch.Tensor, places: torch.Tensor, extras: Extras) -> torch.Tensor:
    """(tokens, heads, head_dim), each token turned by its place's row of the tables, or the nearest
    one that they have, and rounded to its dtype again.
    """
    assert extras.rotary_cos is not None
    assert extras.rotary_sin is not None
    places = places.clamp(0, extras.rotary_cos.shape[0] - 1)
    cos = extras.rotary_cos.float()[places][:, None]
    sin = extras.rotary_sin.float()[places][:, None]
    half, turned = cos.shape[-1], rows.float()
    if extras.rotary_interleaved:
        low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        low, high = slice(0, half), slice(half, 2 * half)
    x, y = turned[..., low], turned[..., high]
    turned = turned.clone()
    turned[..., low], turned[..., high] = x * cos - y * sin, x * sin + y * cos
    return turned.to(rows.dtype)


def _write(
    cache: torch.Tensor,
    rows: torch.Tensor,
    at: torch.Tensor,
    new: torch.Tensor,
    is_kept: torch.Tensor,
) -> None:
    """Writes the kept ones of the new tokens to their places in a cache.

    How many are kept is not known here: the others are written as copies of the first that is, or,
    where none is, as what the cache has there already.
    """
    if cache.element_size() == 1:
        # No fp8 tensor can be indexed.
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    first = is_kept.int().argmax().reshape(1)

    def kept(values: torch.Tensor) -> torch.Tensor:
        where = is_kept.view(-1, *[1] * (values.dim() - 1))
        return torch.where(where, values, values.index_select(0, first))

    # Where none is kept, the first may stand past its sequence's end, where there may be no page.
    rows = kept(rows).clamp(0, cache.shape[0] - 1)
    at = kept(at)
    values = torch.where(is_kept.any(), kept(new), cache[rows, at])
    cache.index_put_((rows, at), values)
