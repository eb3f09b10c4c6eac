"""What a cache holds where no sequence has a token, at its worst: NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from leanbench.core.inputs import AttentionInputs


def poison_unused(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with NaN in K and V past every sequence's end; with pages, also in a page of
    nobody, which the block table names past each sequence's last one.
    """
    if inputs.block_table is not None:
        return _poison_pages(inputs, inputs.block_table)
    lengths = torch.tensor(inputs.read_lengths(), device=inputs.q.device)
    tokens = torch.arange(inputs.k_cache.shape[1], device=inputs.q.device)
    unused = (tokens >= lengths[:, None])[:, :, None, None]
    inputs.k_cache.masked_fill_(unused, math.nan)
    inputs.v_cache.masked_fill_(unused, math.nan)
    return inputs


def _poison_pages(inputs: AttentionInputs, block_table: torch.Tensor) -> AttentionInputs:
    pages, page_size = inputs.k_cache.shape[:2]
    table = block_table.clone()
    used = torch.zeros(pages + 1, page_size, dtype=torch.bool, device=inputs.q.device)
    for sequence, length in enumerate(inputs.read_lengths()):
        whole, rest = divmod(length, page_size)
        used[table[sequence, :whole].long()] = True
        if rest:
            used[table[sequence, whole].long(), :rest] = True
        table[sequence, whole + (rest > 0) :] = pages
    k_cache = _with_page(inputs.k_cache)
    v_cache = _with_page(inputs.v_cache)
    for cache in (k_cache, v_cache):
        cache.masked_fill_(~used[:, :, None, None], math.nan)
    return replace(inputs, k_cache=k_cache, v_cache=v_cache, block_table=table)


def _with_page(cache: torch.Tensor) -> torch.Tensor:
    """The pages and one more, in the same layout."""
    stored = cache if cache.is_contiguous() else cache.transpose(1, 2)
    grown = torch.cat([stored, torch.zeros_like(stored[:1])])
    return grown if cache.is_contiguous() else grown.transpose(1, 2)
