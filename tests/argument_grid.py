"""Calls of `flash_attn_with_kvcache` that together cover every pair of values of its arguments.
tests/argument_calls.py draws their tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch

#: Factors that select the compiled kernels. A row is a set of values; every compatible pair of
#: values is in a row.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float16, torch.bfloat16),
    # Dtypes of the caches, and of q.
    "fp8": (None, "e4m3", "e5m2", "e4m3 and q", "e5m2 and q"),
    "head_dim": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 512, 576),
    "v_head_dim": (None, 64, 128, 256, 512),
    "heads": ((6, 6), (6, 3), (6, 1), (8, 2), (16, 1), (71, 1)),
    "q_len": (1, 2, 3, 8, 16, 17, 64, 128, 300),
    "cu_seqlens_q": (False, True),
    "page_size": (None, 1, 16, 48, 64, 256, 544),
    "page_descale": (None, "pages", "heads"),
    "causal": (False, True),
    "window_size": (
        (-1, -1),
        (0, 0),
        (31, -1),
        (-1, 5),
        (200, 7),
        (100_000, 0),
        (100_000, 100_000),
    ),
    "attention_chunk": (0, 50, 4096),
    "softcap": (0.0, 15.0),
    "sinks": (None, torch.float32, torch.float16, torch.bfloat16),
    "alibi_slopes": (None, "heads", "batch", "expanded"),
    "cache_leftpad": (False, True),
    "cache_batch_idx": (False, True),
    # New tokens: the number of query tokens, or fewer.
    "append": (None, "q_len", "fewer"),
    # Rotated fraction of head_dim, and whether neighbors form pairs.
    "rotary": (None, (0.5, False), (0.5, True), (1.0, False), (1.0, True)),
    "cu_seqlens_k_new": (False, True),
    "rotary_seqlens": (False, True),
    "cache_seqlens": ("tensor", "int", None),
    "batch_invariant": (False, True),
    "capacity": (130, 339, 1024),
}
#: Factors that change between calls of a row.
DRAWN: dict[str, tuple[Any, ...]] = {
    # Style of the arguments: flash-attn's order, or FlashAttention-3's names.
    "style": ("positions", "keywords", "FlashAttention-3"),
    "kv_layout": ("NHD", "HND", "K beside V"),
    "q_layout": ("own", "of q, k and v"),
    "out": (False, True),
    "num_splits": (0, 1, 3),
    "return_softmax_lse": (False, True),
    "softmax_scale": (None, 0.1),
    "sharpness": (1.0, 3.0),
    "lengths": ("random", "full", "short"),
    "unused": ("random", "NaN"),
    "rotary_positions": (0, 77),
    "descale": ("none", "tensors", "one number"),
}
Row = dict[str, Any]


def go_together(first: str, value: Any, second: str, other: Any) -> bool:
    """Return True if flash-attn supports both values in one call."""
    pair = {first: value, second: other}
    for name, needed in (
        ("page_descale", "page_size"),
        ("page_descale", "fp8"),
        ("rotary", "append"),
        ("append", "cache_seqlens"),
        ("rotary", "cache_seqlens"),
        ("cu_seqlens_k_new", "append"),
        ("cu_seqlens_k_new", "cache_seqlens"),
    ):
        if pair.get(name) and needed in pair and pair[needed] is None:
            return False
    # V has at most 512.
    if pair.get("head_dim") == 576 and pair.get("v_head_dim", 512) is None:
        return False
    return not (pair.get("append") == "fewer" and pair.get("q_len") == 1)


def pairs(row: Row) -> set[tuple[str, Any, str, Any]]:
    """Return the pairs of values in a row."""
    return {(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)}


def all_pairs(factors: dict[str, tuple[Any, ...]]) -> set[tuple[str, Any, str, Any]]:
    """Return every compatible pair of values."""
    return {
        (a, x, b, y)
        for a, b in combinations(sorted(factors), 2)
        for x in factors[a]
        for y in factors[b]
        if go_together(a, x, b, y)
    }


def pairwise_rows(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[Row]:
    """Return rows that cover every pair.

    Each begins with a missing pair, and takes the values with the most missing pairs.
    """
    draw = random.Random(seed)
    # The order must not depend on hashes.
    missing = dict.fromkeys(sorted(all_pairs(factors), key=str))
    rows: list[Row] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = {a: x, b: y}
        names = [name for name in factors if name not in row]
        draw.shuffle(names)
        for name in names:
            values = [
                value
                for value in factors[name]
                if all(go_together(name, value, own, row[own]) for own in row)
            ]
            row[name] = max(
                values, key=lambda value: (_gain(row, name, value, missing), draw.random())
            )
        rows.append(row)
        for pair in pairs(row):
            missing.pop(pair, None)
    return rows


def _gain(row: Row, name: str, value: Any, missing: dict[tuple[str, Any, str, Any], None]) -> int:
    ordered = (
        (name, value, own, row[own]) if name < own else (own, row[own], name, value) for own in row
    )
    return sum(pair in missing for pair in ordered)


def calls_of(row: Row, count: int, seed: int) -> Iterator[Row]:
    """Yield `count` calls of a row, each with values of `DRAWN`."""
    draw = random.Random(f"{seed} {row}")
    for _ in range(count):
        yield {**row, **{name: draw.choice(values) for name, values in DRAWN.items()}}
