"""Attention over the tensors of tests/argument_calls.py in plain torch, every step in one dtype,
and the errors of a call's results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from argument_calls import Drawn, rows_at


def appended(drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V after the call, (batch, tokens, kv_heads, head_dim), in the caches' dtype."""
    k, v = drawn.k.clone(), drawn.v.clone()
    if drawn.k_new is None or drawn.v_new is None:
        return k, v
    steps = torch.arange(drawn.k_new.shape[1], device=k.device)
    k_new = rotated(drawn, drawn.k_new, drawn.on_device(drawn.first_angles)[:, None] + steps)
    for sequence, (first, count) in enumerate(zip(drawn.cached, drawn.new_lens, strict=True)):
        for cache, new in ((k, k_new), (v, drawn.v_new)):
            _bits(cache[sequence])[first : first + count] = _bits(new[sequence])[:count]
    return k, v


def rotated(drawn: Drawn, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return (batch, tokens, heads, head_dim) rotated by table rows (batch, tokens)."""
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
    """Output (batch, q_len, q_heads, head_dim of V), and LSE (batch, q_heads, q_len)."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(drawn: Drawn, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Answer:
    """Compute attention over K and V after the call, every step in one dtype."""
    row, arguments = drawn.row, drawn.arguments
    batch, q_len, q_heads, _ = drawn.q.shape
    kv_heads, tokens = k.shape[2], k.shape[1]
    q_at = drawn.on_device(drawn.first_angles)[:, None].expand(batch, q_len)
    # A window of the cache's size or more has no effect.
    is_local = any(0 <= side < tokens for side in row["window_size"]) or row["attention_chunk"]
    if row["causal"] or is_local:
        q_at = q_at + torch.arange(q_len, device=k.device)
    q = rotated(drawn, drawn.q, q_at) if arguments["rotary_cos"] is not None else drawn.q
    leftpad, q_lens = drawn.on_device(drawn.leftpads), drawn.on_device(drawn.q_lens)
    ends = drawn.on_device([sum(own) for own in zip(drawn.cached, drawn.new_lens, strict=True)])
    places = torch.arange(tokens, device=k.device)
    is_token = (places >= leftpad[:, None]) & (places < ends[:, None])
    q = _scaled(
        q,
        drawn.descales.get("q"),
        drawn.row["fp8"] is not None and drawn.q.element_size() == 1,
        dtype,
    )
    pages = drawn.page_descales
    k = _scaled(k, drawn.descales.get("k"), True, dtype, pages.get("k"))
    v = _scaled(v, drawn.descales.get("v"), True, dtype)
    k, v = (numbers.masked_fill(~is_token[..., None, None], 0) for numbers in (k, v))
    q = q.unflatten(2, (kv_heads, q_heads // kv_heads))
    # FlashAttention's low-precision reference also scales K.
    scores = torch.einsum("bqhgd,bnhd->bhgqn", q, k * drawn.scale).flatten(1, 2)
    if row["softcap"]:
        scores = torch.tanh(scores / row["softcap"]) * row["softcap"]
    # Query i has `position` among the sequence's own tokens.
    position = (ends - leftpad - q_lens)[:, None] + torch.arange(q_len, device=k.device)
    behind = position[:, :, None] - (places - leftpad[:, None])[:, None, :]
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
        chunk_of = (places - leftpad[:, None]).div(chunk, rounding_mode="floor")
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
    if "v" in pages:
        # Weights take the scales of pages, as in kernels, which have no operands with scaled
        # values.
        of_tokens = pages["v"].masked_fill(~is_token[..., None], 0).transpose(1, 2)
        weights = (weights * of_tokens[:, :, None, None].to(dtype)).to(dtype)
    out = torch.einsum("bhgqn,bnhd->bqhgd", weights, v).flatten(2, 3)
    return Answer(out, lse)


def _scaled(
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    takes: bool,
    dtype: torch.dtype,
    of_pages: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = numbers.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if scales is not None and takes:
        heads = wide.shape[2]
        wide = wide * scales.repeat_interleave(heads // scales.shape[1], dim=1)[:, None, :, None]
    if of_pages is not None:
        wide = wide * of_pages[..., None]
    return wide.to(dtype)


class Errors(NamedTuple):
    """Errors of a call's results, and the allowed errors."""

    out: float
    #: flash-attn's criterion: twice the error of a low-precision reference.
    allowed: float
    lse: float
    #: True if a cache changed where no token is appended.
    changed: float
    #: Ratio of an appended token's error to the allowed one.
    appended: float

    @property
    def failure(self) -> str | None:
        """Return why the results are wrong, or None; NaN is wrong."""
        if self.changed:
            return "a cache was changed where nothing is appended"
        if not self.appended <= 1:
            return "a cache does not have what was appended"
        if not self.out <= self.allowed:
            return f"error {self.out:.2e}, allowed {self.allowed:.2e}"
        return None if self.lse <= 1e-3 else f"LSE error {self.lse:.2e}"


def errors(drawn: Drawn, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Return the `Errors` of a completed call, on the device without synchronization."""
    k, v = appended(drawn)
    work = drawn.row["dtype"] if drawn.q.element_size() == 2 else torch.bfloat16
    exact, low = attend(drawn, k, v, torch.float64), attend(drawn, k, v, work)
    q_len = drawn.q.shape[1]
    is_row = torch.arange(q_len, device=k.device) < drawn.on_device(drawn.q_lens)[:, None]
    is_row = is_row[..., None, None]
    if drawn.row["cu_seqlens_q"]:
        out = _in_rows(out, drawn.q_lens, q_len)
        lse = None if lse is None else _in_rows(lse.T, drawn.q_lens, q_len).transpose(1, 2)

    def worst(answer: torch.Tensor) -> torch.Tensor:
        return (answer.double() - exact.out).abs().masked_fill(~is_row, 0).max()

    lse_error = torch.zeros((), device=k.device, dtype=torch.float64)
    if lse is not None:
        off = (exact.lse - lse).abs() / exact.lse.abs().clamp(min=1)
        # -inf on both sides for a row that sees nothing.
        off = torch.where(exact.lse.isinf(), torch.where(exact.lse == lse, 0.0, math.inf), off)
        lse_error = off.masked_fill(~is_row[..., 0].transpose(1, 2), 0).max()
    changed, new = zip(*(_cache_errors(drawn, own) for own in (("k", k), ("v", v))), strict=True)
    return torch.stack(
        [
            worst(out),
            2 * worst(low.out) + 1e-5,
            lse_error,
            torch.stack(changed).double().max(),
            torch.stack(new).double().max(),
        ]
    )


def _in_rows(packed: torch.Tensor, counts: list[int], most: int) -> torch.Tensor:
    """Return (batch, most, ...): packed tokens, 0 behind each sequence's."""
    rows = packed.new_zeros((len(counts), most, *packed.shape[1:]))
    for row, own in zip(rows, packed.split([*counts]), strict=True):
        row[: len(own)] = own
    return rows


def _cache_errors(
    drawn: Drawn, expected: tuple[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether a cache changed where no token is appended, and the error of appended tokens.

    Rotated numbers may be rounded to the next one.
    """
    name, right = expected
    own = rows_at(drawn.arguments[f"{name}_cache"], drawn.places)
    is_new = torch.zeros(right.shape[:2], dtype=torch.bool, device=right.device)
    for row, first, count in zip(is_new, drawn.cached, drawn.new_lens, strict=True):
        row[first : first + count] = True
    is_new = is_new[..., None, None]
    differs = _bits(own) != _bits(right)
    turned = name == "k" and drawn.arguments["rotary_cos"] is not None
    if not turned:
        return (differs & ~is_new).any(), (differs & is_new).any() * 2
    ulp = 2**-7 if own.dtype == torch.bfloat16 else 2**-10
    off = (own.float() - right.float()).abs() / (ulp * right.float().abs() + 1e-4)
    return (differs & ~is_new).any(), off.masked_fill(~is_new, 0).max()


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    integers = torch.uint8 if numbers.element_size() == 1 else torch.int16
    return numbers.contiguous().view(integers)


def failure(drawn: Drawn, out: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """Return why the results of a completed call are wrong, or None."""
    return Errors(*errors(drawn, out, lse).tolist()).failure
