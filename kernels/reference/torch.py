"""Softmax attention in fp64, one (sequence, KV head) at a time."""

from __future__ import annotations

import torch

from leanbench.core.inputs import AttentionInputs


def attend(
    inputs: AttentionInputs, sequence: int, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (q_len, group_size, head_dim) and LSE (group_size, q_len) of one sequence's KV head,
    both fp64.

    With several query tokens the last one sees the whole context and each earlier one a token less.
    A length below 0 is 0, one past the cache is the cache's.
    """
    tokens = inputs.read_lengths()[sequence]
    group_size = inputs.group_size
    heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
    q = inputs.q[sequence, :, heads].double()
    k = _cached(inputs, inputs.k_cache, sequence, kv_head, tokens).double()
    v = _cached(inputs, inputs.v_cache, sequence, kv_head, tokens).double()

    scores = torch.einsum("qhd,nd->hqn", q, k) * inputs.softmax_scale
    q_len = q.shape[0]
    visible = tokens - q_len + 1 + torch.arange(q_len, device=q.device)
    hidden = torch.arange(tokens, device=q.device)[None, :] >= visible[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # Against the largest score: lse rounds to it where scores are huge.
    seen = torch.softmax(scores, dim=-1)
    weights = torch.where(lse.isneginf()[..., None], torch.zeros_like(seen), seen)
    return torch.einsum("hqn,nd->qhd", weights, v), lse


def _cached(
    inputs: AttentionInputs, cache: torch.Tensor, sequence: int, kv_head: int, tokens: int
) -> torch.Tensor:
    """(tokens, head_dim): one head of a sequence in the order of its tokens."""
    if inputs.block_table is None:
        return cache[sequence, :tokens, kv_head]
    pages = inputs.block_table[sequence, : -(-tokens // cache.shape[1])].long()
    return cache[pages, :, kv_head].flatten(0, 1)[:tokens]


def attend_all(inputs: AttentionInputs) -> None:
    """Writes `inputs.out` and `inputs.lse`."""
    group_size = inputs.group_size
    for sequence in range(inputs.q.shape[0]):
        for kv_head in range(inputs.kv_heads):
            heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
            out, lse = attend(inputs, sequence, kv_head)
            inputs.out[sequence, :, heads] = out.to(inputs.out.dtype)
            inputs.lse[sequence, heads] = lse.float()
