"""Calls of `flash_attn_with_kvcache` that together have every value of every argument beside every
value of every other: random tensors for them, and attention over those in plain torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import Any

import torch

#: What decides which kernels are compiled. A set of values is a row; every pair of values that go
#: together is in a row.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float16, torch.bfloat16),
    # Of the caches, and of q.
    "fp8": (None, "e4m3", "e5m2", "e4m3 and q", "e5m2 and q"),
    "head_dim": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 512),
    "v_head_dim": (None, 64, 128, 256, 512),
    "heads": ((6, 6), (6, 3), (6, 1), (8, 2), (16, 1), (71, 1)),
    "q_len": (1, 2, 3, 8, 16, 17, 64, 128, 200),
    "cu_seqlens_q": (False, True),
    "page_size": (None, 1, 16, 48, 64, 256, 544),
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
    # New tokens: as many as query tokens, or fewer.
    "append": (None, "q_len", "fewer"),
    # Share of head_dim that is rotated, and whether neighbours are.
    "rotary": (None, (0.5, False), (0.5, True), (1.0, False), (1.0, True)),
    "cu_seqlens_k_new": (False, True),
    "rotary_seqlens": (False, True),
    "cache_seqlens": ("tensor", "int", None),
    "batch_invariant": (False, True),
    "capacity": (130, 339, 1024),
}
#: What changes from call to call of a row.
DRAWN: dict[str, tuple[Any, ...]] = {
    # Of the arguments: flash-attn's order, or FlashAttention-3's names.
    "style": ("positions", "keywords", "FlashAttention-3"),
    "kv_layout": ("NHD", "HND", "K beside V"),
    "q_layout": ("own", "of q, k and v"),
    "out": (False, True),
    "num_splits": (0, 1, 3),
    "return_softmax_lse": (False, True),
    "softmax_scale": (None, 0.3),
    "sharpness": (1.0, 6.0),
    "lengths": ("random", "full", "short"),
    "unused": ("random", "NaN"),
    "rotary_positions": (0, 77),
    "descale": ("none", "tensors", "one number"),
}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BATCH = 3
#: Query tokens x query heads x tokens of a call, at most: the reference has them in fp64.
_MOST_SCORES = 6_000_000

Row = dict[str, Any]


def go_together(first: str, value: Any, second: str, other: Any) -> bool:
    """Whether flash-attn has a meaning for two values in one call."""
    pair = {first: value, second: other}
    for name, needed in (
        ("rotary", "append"),
        ("append", "cache_seqlens"),
        ("rotary", "cache_seqlens"),
        ("cu_seqlens_k_new", "append"),
        ("cu_seqlens_k_new", "cache_seqlens"),
    ):
        if pair.get(name) and needed in pair and pair[needed] is None:
            return False
    return not (pair.get("append") == "fewer" and pair.get("q_len") == 1)


def pairs(row: Row) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values in a row."""
    return {(a, row[a], b, row[b]) for a, b in combinations(sorted(row), 2)}


def all_pairs(factors: dict[str, tuple[Any, ...]]) -> set[tuple[str, Any, str, Any]]:
    """Every pair of values that go together."""
    return {
        (a, x, b, y)
        for a, b in combinations(sorted(factors), 2)
        for x in factors[a]
        for y in factors[b]
        if go_together(a, x, b, y)
    }


def pairwise_rows(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[Row]:
    """Rows that have every pair: each begins with one that is missing, and takes the values with
    the most missing pairs.
    """
    draw = random.Random(seed)
    # In an order that does not depend on hashes.
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
    """`count` calls of a row, each with values of `DRAWN` too."""
    draw = random.Random(f"{seed} {row}")
    for _ in range(count):
        yield {**row, **{name: draw.choice(values) for name, values in DRAWN.items()}}


@dataclass
class Drawn:
    """A call: its arguments, and what they mean, each sequence in its own row."""

    arguments: dict[str, Any]
    row: Row
    #: (batch, tokens, kv_heads, head_dim), before the call, dequantized; garbage where there is no
    #: token.
    k: torch.Tensor
    v: torch.Tensor
    #: (batch, q_len, q_heads, head_dim), dequantized; zeros where a sequence has fewer.
    q: torch.Tensor
    q_lens: torch.Tensor
    #: (batch,): tokens in the caches before the call.
    cached: torch.Tensor
    leftpad: torch.Tensor
    #: (batch, new tokens, kv_heads, head_dim), and how many of them each sequence has.
    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    new_lens: torch.Tensor
    #: (batch,): rows of the rotary tables where each sequence begins.
    first_angles: torch.Tensor
    #: (batch, capacity): where in `arguments["k_cache"].flatten(0, 1)` each token is.
    places: torch.Tensor
    scale: float
    descales: dict[str, torch.Tensor] = field(default_factory=dict)


def draw_call(row: Row, seed: int, device: str) -> Drawn:
    """Random tensors for a call."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = random.Random(seed)
    dtype, (q_heads, kv_heads) = row["dtype"], row["heads"]
    fp8 = row["fp8"]
    kv_dtype = dtype if fp8 is None else _FP8[fp8[:4]]
    q_dtype = kv_dtype if fp8 and fp8.endswith("q") else dtype
    head_dim, v_dim = row["head_dim"], row["v_head_dim"] or row["head_dim"]
    q_len = row["q_len"]
    capacity = min(row["capacity"], max(q_len + 2, _MOST_SCORES // (BATCH * q_heads * q_len)))
    page_size = row["page_size"]
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * scale

    def int32(numbers: Any) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=device)

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
    block_table, cache_batch_idx = None, None
    places = (
        torch.arange(capacity, device=device)
        + capacity * torch.arange(BATCH, device=device)[:, None]
    )
    if page_size is not None:
        order = torch.randperm(rows, generator=generator, device=device)
        table_rows = BATCH + 2 if row["cache_batch_idx"] else BATCH
        block_table = order[: rows - 3].view(table_rows, -1).int().contiguous()
        picked = torch.arange(BATCH, device=device)
        if row["cache_batch_idx"]:
            picked = torch.randperm(table_rows, generator=generator, device=device)[:BATCH]
            cache_batch_idx = picked.int()
        inner = torch.arange(page_size, device=device)
        places = (block_table[picked].long()[..., None] * page_size + inner).flatten(1)
    elif row["cache_batch_idx"]:
        cache_batch_idx = torch.randperm(rows, generator=generator, device=device)[:BATCH].int()
        places = cache_batch_idx.long()[:, None] * capacity + torch.arange(capacity, device=device)
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
    k = k_cache.flatten(0, 1)[places] if k_cache.is_contiguous() else _rows(k_cache, places)
    v = _rows(v_cache, places)
    descales = {}
    if fp8 is not None and row["descale"] != "none":
        for name in ("q", "k", "v"):
            shape = (BATCH, kv_heads) if row["descale"] == "tensors" else (1, 1)
            own = 0.5 + torch.rand(shape, generator=generator, device=device)
            descales[name] = own.expand(BATCH, kv_heads)
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
    return Drawn(
        arguments,
        row,
        k,
        v,
        q,
        torch.tensor(q_lens, device=device),
        torch.tensor(cached, device=device),
        torch.tensor(leftpads, device=device),
        k_new,
        v_new,
        torch.tensor(new_lens, device=device),
        torch.tensor(first_angles, device=device),
        places,
        row["softmax_scale"] or head_dim**-0.5,
        descales,
    )


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


def _rows(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    tokens = cache.shape[1]
    return cache[places // tokens, places % tokens]


def _fill_nan(cache: torch.Tensor, where: torch.Tensor) -> None:
    if cache.element_size() == 1:
        # Both formats read all bits set as NaN.
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
    """Output and LSE of the call, in the style of its row."""
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


def appended(drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, tokens, kv_heads, head_dim) of K and V after the call, in the caches' dtype."""
    k, v = drawn.k.clone(), drawn.v.clone()
    if drawn.k_new is None or drawn.v_new is None:
        return k, v
    steps = torch.arange(drawn.k_new.shape[1], device=k.device)
    k_new = rotated(drawn, drawn.k_new, drawn.first_angles[:, None] + steps)
    for sequence, count in enumerate(drawn.new_lens.tolist()):
        first = int(drawn.cached[sequence])
        for cache, new in ((k, k_new), (v, drawn.v_new)):
            _bits(cache[sequence])[first : first + count] = _bits(new[sequence])[:count]
    return k, v


def rotated(drawn: Drawn, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, heads, head_dim) turned by the tables' rows (batch, tokens)."""
    cos, sin = drawn.arguments["rotary_cos"], drawn.arguments["rotary_sin"]
    if cos is None:
        return numbers
    half, result = cos.shape[1], numbers.float()
    c, s = cos.float()[positions][:, :, None], sin.float()[positions][:, :, None]
    if drawn.arguments["rotary_interleaved"]:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    result = result.clone()
    x, y = result[..., first].clone(), result[..., second].clone()
    result[..., first], result[..., second] = x * c - y * s, x * s + y * c
    return result.to(numbers.dtype)


@dataclass(frozen=True)
class Answer:
    """(batch, q_len, q_heads, head_dim of V), and LSE (batch, q_heads, q_len)."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(drawn: Drawn, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Answer:
    """Attention over K and V after the call, every step in one dtype."""
    row, arguments = drawn.row, drawn.arguments
    batch, q_len, q_heads, _ = drawn.q.shape
    kv_heads, tokens = k.shape[2], k.shape[1]
    q_at = drawn.first_angles[:, None].expand(batch, q_len)
    # A window as wide as the cache is none.
    is_local = any(0 <= side < tokens for side in row["window_size"]) or row["attention_chunk"]
    if row["causal"] or is_local:
        q_at = q_at + torch.arange(q_len, device=k.device)
    q = rotated(drawn, drawn.q, q_at) if arguments["rotary_cos"] is not None else drawn.q
    ends = drawn.cached + drawn.new_lens
    places = torch.arange(tokens, device=k.device)
    is_token = (places >= drawn.leftpad[:, None]) & (places < ends[:, None])
    q = _scaled(
        q,
        drawn.descales.get("q"),
        drawn.row["fp8"] is not None and drawn.q.element_size() == 1,
        dtype,
    )
    k = _scaled(k, drawn.descales.get("k"), True, dtype).masked_fill(~is_token[..., None, None], 0)
    v = _scaled(v, drawn.descales.get("v"), True, dtype).masked_fill(~is_token[..., None, None], 0)
    q = q.unflatten(2, (kv_heads, q_heads // kv_heads))
    # FlashAttention's own low-precision reference scales K.
    scores = torch.einsum("bqhgd,bnhd->bhgqn", q, k * drawn.scale).flatten(1, 2)
    if row["softcap"]:
        scores = torch.tanh(scores / row["softcap"]) * row["softcap"]
    # Query i stands at `position` of the sequence's own tokens.
    position = (ends - drawn.leftpad - drawn.q_lens)[:, None] + torch.arange(q_len, device=k.device)
    behind = position[:, :, None] - (places - drawn.leftpad[:, None])[:, None, :]
    if arguments["alibi_slopes"] is not None:
        slopes = arguments["alibi_slopes"].expand(batch, q_heads)
        scores = (scores - slopes[:, :, None, None] * behind.abs()[:, None]).to(dtype)
    left, right = row["window_size"]
    right = 0 if row["causal"] else right
    seen = is_token[:, None, :].expand_as(behind)
    if left >= 0:
        seen = seen & (behind <= left)
    if row["attention_chunk"]:
        chunk = row["attention_chunk"]
        chunk_of = (places - drawn.leftpad[:, None]).div(chunk, rounding_mode="floor")
        seen = seen & (position.div(chunk, rounding_mode="floor")[..., None] == chunk_of[:, None])
    if right >= 0:
        seen = seen & (-behind <= right)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if "sinks" in arguments:
        sinks = arguments["sinks"].to(dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(batch, -1, q_len, 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :tokens].masked_fill(~seen[:, None], 0)
    weights = weights.to(dtype).unflatten(1, (kv_heads, -1))
    out = torch.einsum("bhgqn,bnhd->bqhgd", weights, v).flatten(2, 3)
    return Answer(out, lse)


def _scaled(
    numbers: torch.Tensor, scales: torch.Tensor | None, takes: bool, dtype: torch.dtype
) -> torch.Tensor:
    wide = numbers.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if scales is not None and takes:
        heads = wide.shape[2]
        wide = wide * scales.repeat_interleave(heads // scales.shape[1], dim=1)[:, None, :, None]
    return wide.to(dtype)


def failure(drawn: Drawn, out: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """What is wrong with the results of a call that was made, in a sentence, or None: flash-attn's
    criterion, an error at most twice that of a low-precision reference.
    """
    k, v = appended(drawn)
    problem = _cache_failure(drawn, k, v)
    if problem is not None:
        return problem
    work = drawn.row["dtype"] if drawn.q.element_size() == 2 else torch.bfloat16
    exact, low = attend(drawn, k, v, torch.float64), attend(drawn, k, v, work)
    is_row = torch.arange(drawn.q.shape[1], device=k.device) < drawn.q_lens[:, None]
    if not drawn.row["cu_seqlens_q"]:
        out = out.flatten(0, 1)
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    expected = exact.out[is_row]
    if out.isnan().any():
        return "the output has NaN"
    error = (out.double() - expected).abs().max().item()
    allowed = 2 * (low.out.double()[is_row] - expected).abs().max().item() + 1e-5
    if not error <= allowed:
        return f"error {error:.2e}, allowed {allowed:.2e}"
    if lse is not None:
        own = exact.lse.transpose(1, 2)[is_row].T
        same = torch.where(
            own.isinf(), own == lse, (own - lse).abs() <= 1e-3 * own.abs().clamp(min=1)
        )
        if not same.all():
            return f"LSE differs by {(own - lse).abs().nan_to_num(0).max().item():.2e}"
    return None


def _cache_failure(drawn: Drawn, k: torch.Tensor, v: torch.Tensor) -> str | None:
    is_new = torch.zeros(k.shape[:2], dtype=torch.bool, device=k.device)
    counts = drawn.new_lens.tolist()
    for sequence, length in enumerate(drawn.cached.tolist()):
        is_new[sequence, length : length + counts[sequence]] = True
    for name, expected in (("k", k), ("v", v)):
        own = _rows(drawn.arguments[f"{name}_cache"], drawn.places)
        if not torch.equal(_bits(own)[~is_new], _bits(expected)[~is_new]):
            return f"{name}_cache was changed where nothing is appended"
        new, expected_new = own[is_new].float(), expected[is_new].float()
        # Rotated numbers may be rounded to the next one.
        turned = name == "k" and drawn.arguments["rotary_cos"] is not None
        ulp = 2**-7 if own.dtype == torch.bfloat16 else 2**-10
        near = (new - expected_new).abs() <= (ulp * expected_new.abs() + 1e-4 if turned else 0)
        if not near.all():
            return f"{name}_cache does not have what was appended"
    return None


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    integers = torch.uint8 if numbers.element_size() == 1 else torch.int16
    return numbers.contiguous().view(integers)
