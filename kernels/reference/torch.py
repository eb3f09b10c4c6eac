"""Softmax attention in fp64, one (sequence, KV head) at a time."""

from __future__ import annotations

import torch

from leanbench.core.inputs import AttentionInputs
from leanbench.core.row_scales import decode_rows


def attend(
    inputs: AttentionInputs, sequence: int, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (q_len, group_size, head_dim of V) and LSE (group_size, q_len) in fp64.

    They belong to one sequence's KV head. A row that sees no token has output 0, and an LSE of -inf
    or its sink's logit. Lengths are clamped to the cache. Tokens without a page are hidden.
    """
    q = _queries(inputs, sequence, kv_head)
    k, v = keys_and_values(inputs, sequence, kv_head)
    k = k * _scale(inputs.k_descale, sequence, kv_head)
    v = v * _scale(inputs.v_descale, sequence, kv_head)
    if inputs.k_page_descale is not None and inputs.v_page_descale is not None:
        k = k * _page_scales(inputs, inputs.k_page_descale, sequence, kv_head)
        v = v * _page_scales(inputs, inputs.v_page_descale, sequence, kv_head)

    scores = torch.einsum("qhd,nd->hqn", q, k) * inputs.softmax_scale
    if inputs.softcap:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    distance = distance_behind(len(q), len(k), q.device)
    missing = tokens_without_page(inputs, sequence, kv_head)
    hidden = hidden_tokens(inputs, distance) | missing[len(missing) - len(k) :]
    # Those that no query token sees can be NaN, which weights of 0 do not remove.
    v = v.masked_fill(hidden.all(0)[:, None], 0.0)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.double().expand(inputs.batch, -1)[sequence]
        scores = scores - slopes[_heads(inputs, kv_head), None, None] * distance.abs()
    scores = scores.masked_fill(hidden, float("-inf"))
    if inputs.sinks is not None:
        sinks = inputs.sinks.double()[_heads(inputs, kv_head), None, None]
        scores = torch.cat([scores, sinks.expand(-1, len(q), -1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # Relative to the largest score: huge scores would absorb the difference in lse.
    seen = torch.softmax(scores, dim=-1)[..., : len(k)]
    weights = torch.where(lse.isneginf()[..., None], torch.zeros_like(seen), seen)
    out = torch.einsum("hqn,nd->qhd", weights, v)
    return (out, lse) if inputs.prior is None else _with_prior(inputs, sequence, kv_head, out, lse)


def _with_prior(
    inputs: AttentionInputs, sequence: int, kv_head: int, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results over other tokens into `attend`'s."""
    assert inputs.prior is not None
    assert inputs.prior_lse is not None
    starts, heads = inputs.read_query_starts(), _heads(inputs, kv_head)
    rows = slice(starts[sequence], starts[sequence + 1])
    prior_lse = inputs.prior_lse.view(inputs.q_heads, -1)[heads, rows].double()
    both = torch.logaddexp(lse, prior_lse)
    own, other = (torch.exp(part - both).nan_to_num(0.0).T[..., None] for part in (lse, prior_lse))
    return own * out + other * inputs.prior[rows, heads].double(), both


def distance_behind(q_len: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the distance of each token behind each query token, (q_len, tokens).

    The last query token is the last token.
    """
    places = tokens - q_len + torch.arange(q_len, device=device)
    return places[:, None] - torch.arange(tokens, device=device)[None, :]


def hidden_tokens(inputs: AttentionInputs, distance: torch.Tensor) -> torch.Tensor:
    """Return a mask of the tokens hidden from each query token, given `distance_behind`."""
    hidden = _in_other_chunks(inputs, distance)
    if inputs.causal:
        hidden |= distance < 0
    if inputs.window_left >= 0:
        hidden |= distance > inputs.window_left
    if inputs.window_right >= 0:
        hidden |= -distance > inputs.window_right
    return hidden


def _in_other_chunks(inputs: AttentionInputs, distance: torch.Tensor) -> torch.Tensor:
    """Return a mask of the tokens in another chunk of the sequence than the query token."""
    if not inputs.attention_chunk:
        return torch.zeros_like(distance, dtype=torch.bool)
    places = torch.arange(distance.shape[1], device=distance.device)
    chunk = places // inputs.attention_chunk
    # Tokens before the sequence count as hidden, too.
    return (distance + places) // inputs.attention_chunk != chunk


def _heads(inputs: AttentionInputs, kv_head: int) -> slice:
    """Return the slice of query heads of a KV head."""
    return slice(kv_head * inputs.group_size, (kv_head + 1) * inputs.group_size)


def _queries(inputs: AttentionInputs, sequence: int, kv_head: int) -> torch.Tensor:
    """Return rotated and scaled queries, (q_len, group_size, head_dim)."""
    if inputs.cu_seqlens_q is None:
        q = inputs.q[sequence]
    else:
        starts = inputs.read_query_starts()
        q = inputs.q[starts[sequence] : starts[sequence + 1]]
    q = q[:, _heads(inputs, kv_head)]
    if inputs.rotary_cos is not None:
        first = _first_angle(inputs, sequence)
        is_local = inputs.most_behind >= 0 or inputs.window_right >= 0
        step = 1 if inputs.causal or is_local else 0
        q = _rotated(inputs, q, first + step * torch.arange(len(q), device=q.device))
    return q.double() * _scale(inputs.q_descale, sequence, kv_head)


def keys_and_values(
    inputs: AttentionInputs, sequence: int, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a sequence after the call, (tokens, head_dim) in fp64, unscaled.

    Padding is excluded.
    """
    tokens = inputs.read_lengths()[sequence]
    rows = in_cache(inputs, inputs.k_cache, sequence, kv_head)
    if inputs.row_scales:
        k = decode_rows(rows, inputs.value_dim).double()
        return k, k[:, : inputs.value_dim]
    k = rows.double()
    v = in_cache(inputs, inputs.v_cache, sequence, kv_head).double()
    if inputs.k_new is not None and inputs.v_new is not None:
        first = inputs.read_cached()[sequence]
        k_new = _new_rows(inputs, inputs.k_new, sequence)[: tokens - first, kv_head]
        if inputs.rotary_cos is not None:
            places = _first_angle(inputs, sequence) + torch.arange(len(k_new), device=k.device)
            k_new = _rotated(inputs, k_new[:, None], places)[:, 0]
        k = torch.cat([k[:first], k_new.double()])
        v_new = _new_rows(inputs, inputs.v_new, sequence)[: tokens - first, kv_head]
        v = torch.cat([v[:first], v_new.double()])
    padding = 0
    if inputs.cache_leftpad is not None:
        padding = int(inputs.cache_leftpad[sequence].clamp(0, tokens))
    return k[padding:], v[padding:]


def _new_rows(inputs: AttentionInputs, new: torch.Tensor, sequence: int) -> torch.Tensor:
    """Return a sequence's new rows, (new tokens, kv_heads, head_dim)."""
    if inputs.cu_seqlens_k_new is None:
        return new[sequence]
    starts = inputs.read_new_starts()
    return new[starts[sequence] : starts[sequence + 1]]


def _first_angle(inputs: AttentionInputs, sequence: int) -> int:
    """Return the row of the rotary tables for a sequence's first new token."""
    if inputs.rotary_seqlens is not None:
        return int(inputs.rotary_seqlens[sequence])
    return inputs.read_cached()[sequence]


def _rotated(inputs: AttentionInputs, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return rotated rows, (tokens, heads, head_dim), rounded to their dtype.

    Each token rotates by the table row of its position, or by the last row for positions past it.
    """
    assert inputs.rotary_cos is not None
    assert inputs.rotary_sin is not None
    places = places.clamp(max=len(inputs.rotary_cos) - 1)
    cos = inputs.rotary_cos[places].double()[:, None]
    sin = inputs.rotary_sin[places].double()[:, None]
    half = cos.shape[-1]
    rotated = rows.double()
    if inputs.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    x, y = rotated[..., first].clone(), rotated[..., second].clone()
    rotated[..., first] = x * cos - y * sin
    rotated[..., second] = x * sin + y * cos
    return rotated.to(rows.dtype)


def _scale(scales: torch.Tensor | None, sequence: int, kv_head: int) -> float:
    return 1.0 if scales is None else float(scales[sequence, kv_head])


def _page_scales(
    inputs: AttentionInputs, scales: torch.Tensor, sequence: int, kv_head: int
) -> torch.Tensor:
    """Return the scale of each token's page without padding, (tokens, 1) in fp64."""
    tokens = inputs.read_lengths()[sequence]
    padding = 0
    if inputs.cache_leftpad is not None:
        padding = int(inputs.cache_leftpad[sequence].clamp(0, tokens))
    places = torch.arange(padding, tokens, device=scales.device)
    pages, _ = _places(inputs, sequence, kv_head, places)
    token_scales = scales[pages] if scales.dim() == 1 else scales[pages, kv_head]
    return token_scales.double()[:, None]


def in_cache(
    inputs: AttentionInputs, cache: torch.Tensor, sequence: int, kv_head: int
) -> torch.Tensor:
    """Return one head of a sequence in token order, padding included, (tokens, head_dim)."""
    tokens = inputs.read_lengths()[sequence]
    places = torch.arange(tokens, device=cache.device)
    rows, offsets = _places(inputs, sequence, kv_head, places)
    return cache[rows, offsets, kv_head]


def _places(
    inputs: AttentionInputs, sequence: int, kv_head: int, tokens: torch.Tensor
) -> tuple[torch.Tensor | int, torch.Tensor]:
    """Return (row or page, position in it) of a sequence's tokens in the caches."""
    if inputs.block_table is not None:
        pages = _pages_of(inputs, sequence, kv_head, tokens)
        return pages.clamp(0, inputs.k_cache.shape[0] - 1), tokens % inputs.k_cache.shape[1]
    if inputs.cache_batch_idx is not None:
        return int(inputs.cache_batch_idx[sequence]), tokens
    return sequence, tokens


def _pages_of(
    inputs: AttentionInputs, sequence: int, kv_head: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the numbers of the pages of a sequence's tokens in the block table."""
    assert inputs.block_table is not None
    row = sequence
    if inputs.cache_batch_idx is not None:
        row = int(inputs.cache_batch_idx[sequence])
    pages = inputs.block_table[row]
    if inputs.has_table_of_heads:
        pages = pages[kv_head]
    return pages[tokens // inputs.k_cache.shape[1]].long()


def tokens_without_page(inputs: AttentionInputs, sequence: int, kv_head: int) -> torch.Tensor:
    """Return a mask of a sequence's tokens, padding included: those the cache has no page of."""
    tokens = torch.arange(inputs.read_lengths()[sequence], device=inputs.q.device)
    if inputs.block_table is None:
        return torch.zeros_like(tokens, dtype=torch.bool)
    pages = _pages_of(inputs, sequence, kv_head, tokens)
    return (pages < 0) | (pages >= inputs.k_cache.shape[0])


def attend_all(inputs: AttentionInputs) -> None:
    """Write `inputs.out` and `inputs.lse`, and append to the caches."""
    starts = inputs.read_query_starts()
    for sequence in range(inputs.batch):
        for kv_head in range(inputs.kv_heads):
            heads = _heads(inputs, kv_head)
            out, lse = attend(inputs, sequence, kv_head)
            if inputs.cu_seqlens_q is None:
                inputs.out[sequence, :, heads] = out.to(inputs.out.dtype)
                inputs.lse[sequence, heads] = lse.float()
            else:
                rows = slice(starts[sequence], starts[sequence + 1])
                inputs.out[rows, heads] = out.to(inputs.out.dtype)
                inputs.lse[heads, rows] = lse.float()
            if inputs.k_new is not None:
                _append(inputs, sequence, kv_head)


def _append(inputs: AttentionInputs, sequence: int, kv_head: int) -> None:
    k, v = keys_and_values(inputs, sequence, kv_head)
    tokens, first = inputs.read_lengths()[sequence], inputs.read_cached()[sequence]
    places = torch.arange(first, tokens, device=k.device)
    rows, offsets = _places(inputs, sequence, kv_head, places)
    for cache, numbers in ((inputs.k_cache, k), (inputs.v_cache, v)):
        cache[rows, offsets, kv_head] = numbers[len(numbers) - len(places) :].to(cache.dtype)
