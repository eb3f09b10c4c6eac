"""Random tensors for the calls of tests/argument_grid.py, and the calls."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from argument_grid import Row

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BATCH = 3
#: Maximum of query tokens x query heads x tokens of a call: the reference holds them in fp64.
_MOST_SCORES = 6_000_000


@dataclass
class Drawn:
    """A call: its arguments, and their meaning, with a row per sequence."""

    arguments: dict[str, Any]
    row: Row
    #: (batch, tokens, kv_heads, head_dim), before the call, dequantized; garbage outside of
    #: sequences.
    k: torch.Tensor
    v: torch.Tensor
    #: (batch, q_len, q_heads, head_dim), dequantized; zeros past a sequence's query tokens.
    q: torch.Tensor
    q_lens: list[int]
    #: Tokens of each sequence in the caches before the call.
    cached: list[int]
    leftpads: list[int]
    #: (batch, new tokens, kv_heads, head_dim), and the number of new tokens per sequence.
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    new_lens: list[int]
    #: Rows of the rotary tables at which sequences begin.
    first_angles: list[int]
    #: (batch, capacity): index of each token in `arguments["k_cache"].flatten(0, 1)`.
    places: torch.Tensor
    scale: float
    descales: dict[str, torch.Tensor] = field(default_factory=dict)
    #: (batch, tokens, kv_heads): scales of the tokens' pages.
    page_descales: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_device(self, numbers: list[int]) -> torch.Tensor:
        return _moved(torch.tensor(numbers), self.k.device.type)


def draw_call(row: Row, seed: int, device: str) -> Drawn:
    """Draw random tensors for a call."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = random.Random(seed)
    dtype, (q_heads, kv_heads) = row["dtype"], row["heads"]
    fp8 = row["fp8"]
    kv_dtype = dtype if fp8 is None else _FP8[fp8[:4]]
    q_dtype = kv_dtype if fp8 and fp8.endswith("q") else dtype
    head_dim, v_dim = row["head_dim"], row["v_head_dim"] or row["head_dim"]
    q_len = row["q_len"]
    capacity = min(row["capacity"], _MOST_SCORES // (BATCH * q_heads * q_len))
    if row["append"] is not None:
        capacity = max(capacity, q_len + 2)
    page_size = row["page_size"]
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    def int32(numbers: Any) -> torch.Tensor:
        return _moved(torch.tensor(list(numbers), dtype=torch.int32), device)

    # Queries.
    q_lens = [q_len] * BATCH
    if row["cu_seqlens_q"]:
        q_lens = [q_len, draw.randint(1, q_len), draw.randint(1, q_len)]
    q = normal(BATCH, q_len, q_heads, head_dim, scale=row["sharpness"]).to(q_dtype)
    if row["q_layout"] == "of q, k and v":
        wide = normal(BATCH, q_len, q_heads + 2 * kv_heads, head_dim, scale=row["sharpness"])
        q = wide.to(q_dtype)[:, :, :q_heads]
    # Caches.
    rows, tokens = (BATCH + 2 if row["cache_batch_idx"] else BATCH), capacity
    if page_size is not None:
        rows, tokens = rows * (capacity // page_size) + 3, page_size
    k_cache, v_cache = _caches(row, rows, tokens, (head_dim, v_dim), kv_dtype, normal)
    block_table, cache_batch_idx, of_nobody = None, None, None
    table_rows = BATCH + 2 if row["cache_batch_idx"] else BATCH
    picked = torch.arange(BATCH, device=device)
    if row["cache_batch_idx"]:
        picked = torch.randperm(table_rows, generator=generator, device=device)[:BATCH]
        cache_batch_idx = picked.int()
    inner = torch.arange(tokens, device=device)
    places = picked[:, None] * capacity + inner
    if page_size is not None:
        order = torch.randperm(rows, generator=generator, device=device)
        of_nobody = order[rows - 3 :]
        block_table = order[: rows - 3].view(table_rows, -1).int().contiguous()
        places = (block_table[picked].long()[..., None] * page_size + inner).flatten(1)
    # New tokens.
    new, k_new, v_new, new_lens = 0, None, None, [0] * BATCH
    if row["append"] is not None:
        new = q_len if row["append"] == "q_len" else draw.randint(1, q_len - 1)
        k_new = normal(BATCH, new, kv_heads, head_dim).to(kv_dtype)
        v_new = normal(BATCH, new, kv_heads, v_dim).to(kv_dtype)
        new_lens = [new] * BATCH
        if row["cu_seqlens_k_new"]:
            new_lens = [draw.randint(0, new), new, draw.randint(0, new)]
    cached = _lengths(row, draw, capacity - new)
    leftpads = [0] * BATCH
    if row["cache_leftpad"]:
        leftpads = [draw.randint(0, max(0, length - 1)) for length in cached]
    cos, sin = _rotary_tables(row, capacity + q_len, q_dtype, generator, device)
    first_angles = cached
    if row["rotary_seqlens"]:
        first_angles = [draw.randint(0, length) for length in cached]
    if row["unused"] == "NaN":
        used = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=device).flatten()
        for sequence, length in enumerate(cached):
            used[places[sequence, leftpads[sequence] : length]] = True
        for cache in (k_cache, v_cache):
            _fill_nan(cache, ~used.view(k_cache.shape[:2]))
    k = k_cache.flatten(0, 1)[places] if k_cache.is_contiguous() else rows_at(k_cache, places)
    v = rows_at(v_cache, places)
    descales = {}
    if fp8 is not None and row["descale"] != "none":
        for name in ("q", "k", "v"):
            shape = (BATCH, kv_heads) if row["descale"] == "tensors" else (1, 1)
            own = 0.5 + torch.rand(shape, generator=generator, device=device)
            descales[name] = own.expand(BATCH, kv_heads)
    of_pages, page_descales = {}, {}
    if page_size is not None and row["page_descale"] is not None:
        for name in ("k", "v"):
            own = 0.5 + torch.rand(rows, kv_heads, generator=generator, device=device)
            if row["page_descale"] == "pages":
                own = own[:, :1].expand(rows, kv_heads)
            page_descales[name] = own[places // page_size]
            if row["unused"] == "NaN":
                own = own.clone()
                own[of_nobody] = math.nan
            of_pages[name] = own[:, 0] if row["page_descale"] == "pages" else own
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k_new,
        "v": v_new,
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": {"tensor": int32(cached), "int": cached[0], None: None}[
            row["cache_seqlens"]
        ],
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": int32(leftpads) if row["cache_leftpad"] else None,
        "block_table": block_table,
        "softmax_scale": row["softmax_scale"],
        "causal": row["causal"],
        "window_size": row["window_size"],
        "softcap": row["softcap"],
        "rotary_interleaved": bool(row["rotary"] and row["rotary"][1]),
        "alibi_slopes": _slopes(row["alibi_slopes"], q_heads, generator, device),
        "num_splits": row["num_splits"],
        "return_softmax_lse": row["return_softmax_lse"],
    }
    if row["attention_chunk"]:
        arguments["attention_chunk"] = row["attention_chunk"]
    if row["sinks"] is not None:
        arguments["sinks"] = normal(q_heads).to(row["sinks"])
    if row["batch_invariant"]:
        arguments["batch_invariant"] = True
    arguments |= {f"{name}_descale": own for name, own in descales.items()}
    arguments |= {f"{name}_page_descale": own for name, own in of_pages.items()}
    if row["rotary_seqlens"]:
        arguments["rotary_seqlens"] = int32(first_angles)
    if row["cu_seqlens_k_new"]:
        for name, padded in (("k", k_new), ("v", v_new)):
            assert padded is not None
            own = [new[:count] for new, count in zip(padded, new_lens, strict=True)]
            arguments[name] = torch.cat([tokens.view(torch.uint8) for tokens in own]).view(kv_dtype)
        arguments["cu_seqlens_k_new"] = int32(accumulate(new_lens, initial=0))
    if row["cu_seqlens_q"]:
        arguments["q"] = torch.cat([own[:count] for own, count in zip(q, q_lens, strict=True)])
        arguments["cu_seqlens_q"] = int32(accumulate(q_lens, initial=0))
        arguments["max_seqlen_q"] = q_len
    if row["out"]:
        out_dtype = dtype if q_dtype == dtype else torch.bfloat16
        arguments["out"] = arguments["q"].new_empty(
            (*arguments["q"].shape[:-1], v_dim), dtype=out_dtype
        )
    scale = row["softmax_scale"] or head_dim**-0.5
    caches, added = (k, v, q, q_lens, cached, leftpads), (k_new, v_new, new_lens)
    of_call = (first_angles, places, scale, descales, page_descales)
    return Drawn(arguments, row, *caches, *added, *of_call)


def _moved(numbers: torch.Tensor, device: str) -> torch.Tensor:
    """Return numbers on the device without synchronization."""
    return numbers.pin_memory().to(device, non_blocking=True) if device != "cpu" else numbers


def _caches(
    row: Row, rows: int, tokens: int, dims: tuple[int, int], dtype: torch.dtype, normal: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads = row["heads"][1]
    if row["kv_layout"] == "HND":
        k, v = (normal(rows, kv_heads, tokens, dim).to(dtype).transpose(1, 2) for dim in dims)
        return k, v
    if row["kv_layout"] == "K beside V" and dims[0] == dims[1]:
        both = normal(rows, tokens, 2, kv_heads, dims[0]).to(dtype)
        return both[:, :, 0], both[:, :, 1]
    k, v = (normal(rows, tokens, kv_heads, dim).to(dtype) for dim in dims)
    return k, v


def rows_at(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    tokens = cache.shape[1]
    return cache[places // tokens, places % tokens]


def _fill_nan(cache: torch.Tensor, where: torch.Tensor) -> None:
    if cache.element_size() == 1:
        # In both formats, all bits set is NaN.
        cache.view(torch.uint8).masked_fill_(where[:, :, None, None], 0xFF)
    else:
        cache.masked_fill_(where[:, :, None, None], math.nan)


def _lengths(row: Row, draw: random.Random, most: int) -> list[int]:
    if row["cache_seqlens"] is None:
        return [most] * BATCH
    short = min(most, row["q_len"] + 3)
    bound = {"random": most, "full": most, "short": short}[row["lengths"]]
    least = bound if row["lengths"] == "full" else 0
    lengths = [draw.randint(least, bound) for _ in range(BATCH)]
    return [lengths[0]] * BATCH if row["cache_seqlens"] == "int" else lengths


def _slopes(
    kind: str | None, heads: int, generator: torch.Generator, device: str
) -> torch.Tensor | None:
    if kind is None:
        return None
    shape = (BATCH, heads) if kind == "batch" else (heads,)
    slopes = 0.3 * torch.rand(shape, generator=generator, device=device)
    return slopes.expand(BATCH, heads) if kind == "expanded" else slopes


def _rotary_tables(
    row: Row, positions: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if row["rotary"] is None:
        return None, None
    half = max(16, int(row["rotary"][0] * row["head_dim"]) // 16 * 16) // 2
    shape = (positions + row["rotary_positions"], half)
    angle = 2 * math.pi * torch.rand(shape, generator=generator, device=device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def run_call(drawn: Drawn, function: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and LSE of the call, in the style of its row."""
    given, style = dict(drawn.arguments), drawn.row["style"]
    names = list(given)[: list(given).index("return_softmax_lse") + 1]
    if style == "positions":
        result = function(*[given.pop(name) for name in names], **given)
    else:
        if style == "FlashAttention-3":
            given["page_table"] = given.pop("block_table")
            given["pack_gqa"], given["sm_margin"] = None, 0
            given["scheduler_metadata"] = None
            if "sinks" in given:
                given["learnable_sink"] = given.pop("sinks")
        positional = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
        result = function(*positional, **given)
    return result if drawn.row["return_softmax_lse"] else (result, None)
