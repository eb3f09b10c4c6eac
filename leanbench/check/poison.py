"""NaN and infinities in the parts of a cache and its scales that no sequence uses."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.reference.torch import (
    distance_behind,
    hidden_tokens,
    tokens_without_page,
)


def poison_unused(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with NaN and +inf, token by token in turn, in all unused parts of K and V.

    These are tokens past the end of a sequence, its padding, tokens before the windows of all query
    tokens, and places of appended tokens. Scales of empty sequences are NaN. With pages, block
    tables continue with an unused page past the end of each sequence, and a KV head with pages of
    its own uses no other head's.
    """
    inputs = replace(inputs, **_scales(inputs))
    if inputs.block_table is not None:
        return _poison_pages(inputs, inputs.block_table)
    rows = range(inputs.batch)
    if inputs.cache_batch_idx is not None:
        rows = inputs.cache_batch_idx.tolist()
    used = torch.zeros((*inputs.k_cache.shape[:2], 1), dtype=torch.bool, device=inputs.q.device)
    for row, tokens in zip(rows, _used(inputs), strict=True):
        used[row, tokens] = True
    return replace(
        inputs, k_cache=_poisoned(inputs.k_cache, used), v_cache=_poisoned(inputs.v_cache, used)
    )


def _scales(inputs: AttentionInputs) -> dict[str, torch.Tensor]:
    """Return the scales of sequences, those of empty ones as NaN."""
    empty = torch.tensor(inputs.read_lengths(), device=inputs.q.device) == 0
    if not empty.any():
        # Those of a shared prefix stay one number in memory.
        return {}
    return {
        name: scales.masked_fill(empty[:, None], math.nan)
        for name in ("q_descale", "k_descale", "v_descale")
        if (scales := getattr(inputs, name)) is not None
    }


def _used(inputs: AttentionInputs) -> list[torch.Tensor]:
    """Return the places of tokens in the cache that a query token of each sequence sees."""
    device = inputs.q.device
    firsts = [0] * inputs.batch
    if inputs.cache_leftpad is not None:
        firsts = inputs.cache_leftpad.tolist()
    starts, ends, used = inputs.read_query_starts(), inputs.read_lengths(), []
    for sequence, cached in enumerate(inputs.read_cached()):
        q_len = starts[sequence + 1] - starts[sequence]
        first = min(max(firsts[sequence], 0), ends[sequence])
        distance = distance_behind(q_len, ends[sequence] - first, device)
        places = first + (~hidden_tokens(inputs, distance).all(0)).nonzero()[:, 0]
        used.append(places[places < cached])
    return used


def _poisoned(cache: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Write NaN and +inf to unused tokens; `used` is (rows, tokens, KV heads, or 1 for all heads).

    A maximum skips NaN, but not +inf. e4m3 has no infinity.
    """
    numbers = (math.nan, math.nan if cache.dtype == torch.float8_e4m3fn else math.inf)
    rows, tokens = cache.shape[:2]
    places = torch.arange(rows * tokens, device=cache.device).view(rows, tokens, 1, 1)
    for turn, number in enumerate(numbers):
        poison = torch.tensor(number, device=cache.device).to(cache.dtype)
        poisoned = ~used[..., None] & (places % 2 == turn)
        if cache.element_size() == 1:
            # No fp8 tensor can be filled under a mask.
            cache.view(torch.uint8).masked_fill_(poisoned, poison.view(torch.uint8))
        else:
            cache.masked_fill_(poisoned, poison)
    return cache


def _poison_pages(inputs: AttentionInputs, block_table: torch.Tensor) -> AttentionInputs:
    pages, page_size = inputs.k_cache.shape[:2]
    table = block_table.clone()
    # Of each KV head, or of all together.
    rows = table if inputs.has_table_of_heads else table[:, None]
    shape = (pages + 1, page_size, rows.shape[1])
    used = torch.zeros(shape, dtype=torch.bool, device=inputs.q.device)
    lengths = inputs.read_lengths()
    for sequence, seen in enumerate(_used(inputs)):
        for head, row in enumerate(rows[sequence]):
            tokens = seen[~tokens_without_page(inputs, sequence, head)[seen]]
            used[row[tokens // page_size].long(), tokens % page_size, head] = True
            # Those of tokens that are appended are the sequence's own.
            row[-(-lengths[sequence] // page_size) :] = pages
    k_cache = _poisoned(_with_page(inputs.k_cache), used)
    v_cache = _poisoned(_with_page(inputs.v_cache), used)
    page_scales = {
        name: _with_nan(scales)
        for name in ("k_page_descale", "v_page_descale")
        if (scales := getattr(inputs, name)) is not None
    }
    return replace(inputs, k_cache=k_cache, v_cache=v_cache, block_table=table, **page_scales)


def _with_nan(scales: torch.Tensor) -> torch.Tensor:
    """Append the scale NaN for one more page."""
    return torch.cat([scales, torch.full_like(scales[:1], math.nan)])


def _with_page(cache: torch.Tensor) -> torch.Tensor:
    """Append a page in the same layout."""
    stored = cache if cache.is_contiguous() else cache.transpose(1, 2)
    grown = torch.cat([stored, torch.zeros_like(stored[:1])])
    return grown if cache.is_contiguous() else grown.transpose(1, 2)
