"""The window of a call: which sides of it a kernel is asked for."""

from __future__ import annotations

import operator
from typing import Any

import torch

from leanbench.calls.call import WHOLE_NUMBERS

#: flash-attn's default.
NO_WINDOW = (-1, -1)


def window_of(
    window_size: Any,
    causal: bool,
    q: torch.Tensor,
    max_seqlen_q: int | None,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
) -> tuple[int, int]:
    """(left, right), -1 for no limit, as a side is that is as wide as the cache and all query
    tokens, or hides none besides the causal one.
    """
    if window_size is NO_WINDOW or window_size is None:
        return NO_WINDOW
    try:
        left, right = (-1 if side is None else side for side in window_size)
        left = left if isinstance(left, WHOLE_NUMBERS) else operator.index(left)
        right = right if isinstance(right, WHOLE_NUMBERS) else operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {window_size!r}: expected (left, right), two whole numbers, -1 or None"
            " for no limit"
        ) from None
    q_len = q.shape[1] if q.dim() == 4 else max_seqlen_q
    capacity = k_cache.shape[1] if k_cache.dim() == 4 else 0
    if block_table is not None and block_table.dim() == 2:
        capacity *= block_table.shape[1]
    left = left if 0 <= left < capacity else -1
    # The first query token is q_len - 1 tokens before the last one, before all tokens of a shorter
    # cache. A side that hides no token but is narrower stays: queries are then rotated each by its
    # own position, as by flash-attn.
    reach = capacity if q_len is None or capacity >= q_len else q_len - 1
    right = -1 if causal or q_len == 1 or not 0 <= right < reach else right
    return left, right  # pyright: ignore[reportReturnType]
