"""What tensors on the device say, checked where LEANBENCH_CHECK_CALLS=1 asks for it: reading them
waits for the GPU in every call.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch

from leanbench.calls.call import Call

#: Whether calls are checked so; read once.
CHECKS_VALUES = os.environ.get("LEANBENCH_CHECK_CALLS") == "1"


def are_read(tensor: torch.Tensor) -> bool:
    """Whether calls over such tensors are checked: asked for, and in no capture, which cannot
    wait.
    """
    return CHECKS_VALUES and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_values(call: Call) -> None:
    """Whether lengths, rows, pages and starts of sequences are those of the caches and of q.

    Raises:
        ValueError: one is not; the sentence names it, its sequence and its limits.
    """
    extras = call.all_extras
    most = call.capacity - call.new_tokens
    whole = call.capacity if call.length is None else call.length - call.new_tokens
    cached = [whole] * call.batch
    if call.cache_seqlens is not None:
        cached = call.cache_seqlens.tolist()
        _check_range("cache_seqlens", cached, most, "tokens, less those that are appended")
    if extras.cache_leftpad is not None:
        for sequence, pad in enumerate(extras.cache_leftpad.tolist()):
            if not 0 <= pad <= cached[sequence]:
                raise ValueError(
                    f"cache_leftpad[{sequence}] is {pad}: expected 0 to the sequence's"
                    f" {cached[sequence]} tokens"
                )
    rows = call.k_cache if call.block_table is None else call.block_table
    if extras.cache_batch_idx is not None:
        picked = extras.cache_batch_idx.tolist()
        _check_range("cache_batch_idx", picked, rows.shape[0] - 1, "rows of the caches")
        if extras.k_new is not None:
            _check_distinct("cache_batch_idx", picked)
    for name, starts, packed in (
        ("cu_seqlens_q", extras.cu_seqlens_q, call.q),
        ("cu_seqlens_k_new", extras.cu_seqlens_k_new, extras.k_new),
    ):
        if starts is not None and packed is not None:
            limit = extras.max_seqlen_q if packed is call.q else None
            _check_starts(name, starts.tolist(), packed.shape[0], limit)
    if extras.k_new is not None:
        _check_append(call, cached)
    if call.block_table is not None:
        _check_pages(call, cached)


def _check_range(name: str, numbers: list[int], most: int, what: str) -> None:
    for sequence, number in enumerate(numbers):
        if not 0 <= number <= most:
            raise ValueError(f"{name}[{sequence}] is {number}: expected 0 to {most}, {what}")


def _check_distinct(name: str, numbers: list[int]) -> None:
    for sequence, number in enumerate(numbers):
        if (first := numbers.index(number)) < sequence:
            raise ValueError(
                f"{name}[{first}] and [{sequence}] are both {number}: expected a row of its own for"
                " each sequence that tokens are appended to"
            )


def _check_starts(name: str, starts: list[int], tokens: int, most: int | None) -> None:
    if starts[0] != 0 or starts[-1] > tokens:
        raise ValueError(
            f"{name} goes from {starts[0]} to {starts[-1]}: expected 0 to at most the {tokens}"
            " tokens that there are"
        )
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if end < start or (most is not None and end - start > most):
            limit = "" if most is None else f", by at most max_seqlen_q, {most}"
            raise ValueError(
                f"{name} goes from {start} to {end} in sequence {sequence}: expected starts that"
                f" rise{limit}"
            )


def _check_append(call: Call, cached: list[int]) -> None:
    """Whether all new tokens find room, and each sequence has queries that bring them there."""
    extras = call.all_extras
    queries, new = extras.cu_seqlens_q, extras.cu_seqlens_k_new
    for sequence, count in enumerate([] if new is None else new.diff().tolist()):
        if cached[sequence] + count > call.capacity:
            raise ValueError(
                f"cu_seqlens_k_new has {count} tokens for sequence {sequence}, which has"
                f" {cached[sequence]}: expected at most the {call.capacity} of the caches together"
            )
    for sequence, count in enumerate([] if queries is None else queries.diff().tolist()):
        if count == 0:
            raise ValueError(
                f"cu_seqlens_q has no query token for sequence {sequence}, whose new tokens may"
                " then be left unwritten: leave it out of the call, or pass a query token"
            )
    if extras.rotary_seqlens is None and extras.rotary_cos is not None:
        most = extras.rotary_cos.shape[0] - extras.new_tokens
        _check_range("cache_seqlens", cached, most, "so that rotary_cos has a row for new tokens")
    if extras.rotary_seqlens is not None and extras.rotary_cos is not None:
        most = extras.rotary_cos.shape[0] - 1
        _check_range("rotary_seqlens", extras.rotary_seqlens.tolist(), most, "rows of rotary_cos")


def _check_pages(call: Call, cached: list[int]) -> None:
    """Pages up to each sequence's end; entries past it are not followed."""
    table, page_size = call.block_table, call.k_cache.shape[1]
    assert table is not None
    picked = call.all_extras.cache_batch_idx
    own = table if picked is None else table[picked.long()]
    new, starts = [call.new_tokens] * call.batch, call.all_extras.cu_seqlens_k_new
    if starts is not None:
        new = starts.diff().tolist()
    whole = call.cache_seqlens is None and call.length is None
    for sequence, pages in enumerate(own.tolist()):
        tokens = call.capacity if whole else cached[sequence] + new[sequence]
        for place, page in enumerate(pages[: -(-tokens // page_size)]):
            if not 0 <= page < call.k_cache.shape[0]:
                raise ValueError(
                    f"block_table[{sequence}, {place}] is {page}: expected 0 to"
                    f" {call.k_cache.shape[0] - 1}, the pages of the caches"
                )
