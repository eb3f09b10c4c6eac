"""The tokens that each query token sees, as a span of its sequence, and copies of these: for a
kernel that has no windows, chunks or paddings. For compatibility, not for speed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from leanbench.calls.call import Call
from leanbench.core.extras import Extras


class Spans(NamedTuple):
    """Of every query token (batch, q_len), int64."""

    #: The first token of its sequence, in the cache, that it sees.
    first: torch.Tensor
    #: How many it sees.
    tokens: torch.Tensor
    #: As many as none of them sees more than.
    width: int


def lengths_of(call: Call) -> torch.Tensor:
    """(batch,) int64: tokens in use, within the caches."""
    if call.cache_seqlens is not None:
        return call.cache_seqlens.long().clamp(0, call.capacity)
    length = call.capacity if call.length is None else call.length
    return torch.full((call.batch,), length, dtype=torch.int64, device=call.q.device)


def paddings_of(call: Call) -> torch.Tensor:
    """(batch,) int64: the token that each sequence begins with."""
    lengths, padding = lengths_of(call), call.all_extras.cache_leftpad
    return torch.zeros_like(lengths) if padding is None else padding.long().clamp(min=0)


def has_spans(extras: Extras) -> bool:
    """Whether query tokens see other tokens than a causal mask leaves."""
    return extras.window_left >= 0 or extras.window_right >= 0 or extras.attention_chunk > 0


def spans_of(call: Call, q_len: int) -> Spans:
    """Of the sequences' last `q_len` tokens."""
    extras, lengths, paddings = call.all_extras, lengths_of(call), paddings_of(call)
    # A chunk as long as the cache is as good as any longer one.
    left, chunk = extras.window_left, min(extras.attention_chunk, call.capacity)
    right = 0 if call.causal else extras.window_right
    place = lengths[:, None] + torch.arange(q_len, device=lengths.device) - q_len
    first = paddings[:, None].expand_as(place)
    end = lengths[:, None].expand_as(place)
    width = call.capacity
    if left >= 0:
        first = torch.maximum(first, place - left)
    if right >= 0:
        end = torch.minimum(end, place + right + 1)
    if left >= 0 and right >= 0:
        width = min(width, left + right + 1)
    if chunk > 0:
        # Of the sequence's own tokens; of one before them, too.
        start = place - (place - paddings[:, None]) % chunk
        first, end = torch.maximum(first, start), torch.minimum(end, start + chunk)
        width = min(width, chunk)
    return Spans(first, (end - first).clamp(min=0), width)


def rows_from(call: Call, first: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the caches, (batch, q_len, width) each: the row or page, and the token in it, of
    `width` tokens from each `first` on; others than those in use are any tokens of the caches.
    """
    steps = torch.arange(width, device=first.device)
    at = (first[..., None] + steps).clamp(0, call.capacity - 1)
    table, own = call.block_table, call.all_extras.cache_batch_idx
    sequences = torch.arange(call.batch, device=first.device)
    if table is None:
        rows = sequences if own is None else own.long()
        return rows[:, None, None], at
    page_size = call.k_cache.shape[1]
    # What stands past a sequence's end may be no page.
    pages = table.long().clamp(0, call.k_cache.shape[0] - 1)
    return pages[sequences[:, None, None], at // page_size], at % page_size
