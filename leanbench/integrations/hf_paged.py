"""Attention of a layer in transformers' continuous batching: packed sequences over blocks."""

from __future__ import annotations

from typing import Any

import torch

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.errors import UserError


def lean_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int = 1,
    max_seqlen_k: Any = None,
    block_table: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer, after writing its new tokens to the cache.

    Args:
        query: (1, q_heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim) of the new tokens.
        cache: transformers' PagedAttentionCache.
        cu_seq_lens_q: (sequences + 1,), int32: the start of each sequence's query tokens.
        cu_seq_lens_k: Like `cu_seq_lens_q`, for all tokens; or a dict by layer type.
        max_seqlen_k: Maximum number of tokens of a sequence, or a dict by layer type.
        block_table: (groups of layers, sequences, blocks), int32, in decode steps: tokens are
            appended to these blocks. None: transformers writes and gathers them.

    Returns:
        (1, tokens, q_heads, head_dim), and None for the attention weights.

    Raises:
        UserError: The call is outside of continuous batching.
    """
    if cache is None or cu_seq_lens_q is None:
        raise UserError(
            "attn_implementation='paged|lean' is for continuous batching: use 'lean' with"
            " generate()"
        )
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    shared = {
        "softmax_scale": scaling,
        "causal": True,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, -1),
        "softcap": 0 if softcap is None else softcap,
        "sinks": s_aux,
    }
    lengths = cu_seq_lens_k.diff()
    if block_table is not None:
        out = _appended(module, query, key, value, cache, lengths, block_table, shared)
        return out.transpose(0, 1), None
    k, v = cache.update(key, value, module.layer_idx, options["read_index"], options["write_index"])
    # Gathered tokens lie one after another: pages of one token, counted from a sequence's first.
    table = cu_seq_lens_k[:-1, None] + torch.arange(
        max_seqlen_k, dtype=torch.int32, device=k.device
    )
    out = lean_attn_with_kvcache(
        query[0].transpose(0, 1),
        k[:, None],
        v[:, None],
        cache_seqlens=lengths,
        block_table=table,
        cu_seqlens_q=cu_seq_lens_q,
        max_seqlen_q=min(max_seqlen_q, query.shape[2]),
        **shared,
    )
    assert isinstance(out, torch.Tensor)
    return out[None], None


def _appended(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Any,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return the output of a decode step that writes its tokens, (sequences, 1, q_heads, head_dim).

    Args:
        lengths: Length of each sequence, with the new token; 0 for padding of a graph.
    """
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    # Sequences that pad a graph have no blocks, -1: their token goes where nobody reads.
    nobodys = cache.write_trash_index // cache.block_size
    table = block_table[group]
    out = lean_attn_with_kvcache(
        query.permute(2, 0, 1, 3),
        cache.key_cache[layer].view(shape),
        cache.value_cache[layer].view(shape),
        k=key.permute(2, 0, 1, 3),
        v=value.permute(2, 0, 1, 3),
        cache_seqlens=(lengths - 1).clamp(min=0),
        block_table=table.masked_fill(table < 0, nobodys),
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out
