"""`lean_attn_with_kvcache` in a few lines of torch, in any dtype, on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch


def in_place_of_lean(monkeypatch: pytest.MonkeyPatch) -> DenseAttention:
    """Replace LeanAttention in layers of transformers until the test's end."""
    from leanbench.integrations import hf_attention
    from leanbench.integrations.transformers import register

    register()
    dense = DenseAttention()
    monkeypatch.setattr(hf_attention, "lean_attn_with_kvcache", dense)
    return dense


class DenseAttention:
    """Callable like `lean_attn_with_kvcache`; remembers the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        given = {"q": q, "k": k, "v": v, "block_table": block_table, "out": out, **options}
        self.calls.append(given)
        if k is not None and v is not None:
            assert block_table is not None
            lengths = options["cache_seqlens"]
            for cache, new in ((k_cache, k), (v_cache, v)):
                _append(cache, block_table, lengths, new)
            options["cache_seqlens"] = lengths + k.shape[1]
        for name in ("max_seqlen_q", "batch_invariant", "alibi_slopes"):
            options.pop(name, None)
        if block_table is not None:
            # Entries past a sequence's end may be anything.
            pages = block_table.long().clamp(0, k_cache.shape[0] - 1)
            k_cache, v_cache = k_cache[pages].flatten(1, 2), v_cache[pages].flatten(1, 2)
        if cu_seqlens_q is None:
            result = dense_attention(q, k_cache, v_cache, **options)
        else:
            result = _packed(q, k_cache, v_cache, cu_seqlens_q.tolist(), **options)
        return result if out is None else out.copy_(result)


def _append(
    cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor
) -> None:
    """Write (batch, tokens, heads, dim) into pages after the tokens of each sequence."""
    for row, (length, tokens) in enumerate(zip(lengths.tolist(), new, strict=True)):
        for place, token in enumerate(tokens, start=length):
            page = block_table[row, place // cache.shape[1]]
            cache[page, place % cache.shape[1]] = token


def _packed(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: list[int],
    cache_seqlens: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    rows = []
    for sequence, (start, end) in enumerate(pairwise(starts)):
        one = slice(sequence, sequence + 1)
        own = {**options, "cache_seqlens": cache_seqlens[one]}
        rows.append(dense_attention(q[start:end][None], k_cache[one], v_cache[one], **own)[0])
    return torch.cat(rows)


def dense_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    sinks: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return an output like `q`; the meaning of arguments is flash-attn's."""
    (batch, q_len, heads), capacity = q.shape[:3], k_cache.shape[1]
    group = heads // k_cache.shape[2]
    k, v = k_cache.float(), v_cache.float()
    if k_descale is not None and v_descale is not None:
        k, v = k * k_descale[:, None, :, None], v * v_descale[:, None, :, None]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ends = torch.full((batch,), capacity) if cache_seqlens is None else cache_seqlens
    starts = torch.zeros(batch) if cache_leftpad is None else cache_leftpad
    tokens = torch.arange(capacity)
    places = ends[:, None] - q_len + torch.arange(q_len)
    seen = (tokens < ends[:, None]) & (tokens >= starts[:, None])
    seen = seen[:, None].expand(batch, q_len, capacity)
    if causal:
        seen = seen & (tokens <= places[..., None])
    if window_size[0] >= 0:
        seen = seen & (tokens >= places[..., None] - window_size[0])
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        extra = sinks.float()[None, :, None, None].expand(batch, heads, q_len, 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = scores.softmax(-1)[..., :capacity].nan_to_num(0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)
