"""Attention of a layer with the interface of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leanbench.attention import lean_attn_with_kvcache
from leanbench.core.errors import UserError
from leanbench.integrations.hf_masks import dense_mask, is_windowed, lengths_of


def lean_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer.

    LeanAttention runs decode steps and chunks, prompts that are padded or longer than the layer's
    window, and everything with sinks or soft caps. Other prompts use torch's
    `scaled_dot_product_attention`.

    Args:
        query: (batch, q_heads, q_len, head_dim), fp16 or bf16.
        key: (batch, kv_heads, tokens, head_dim); the whole capacity of a static cache.
        value: Like `key`; may have another head_dim.
        attention_mask: A result of `leanbench.integrations.hf_masks.lean_mask`, or the caller's
            mask for sdpa.
        scaling: Scale of the scores; None: head_dim ** -0.5. OPT scales its queries and passes 1.
        sliding_window: Number of visible tokens, the query's own included; None: no limit but the
            mask's.
        position_bias: Added to the scores, (1 or batch, q_heads, q_len, tokens), as in T5; uses
            sdpa.
        s_aux: (q_heads,): the logit of a sink for each head (gpt-oss).

    Returns:
        (batch, q_len, q_heads, head_dim of V), and None for the attention weights.

    Raises:
        UserError: The model needs a feature that both lack.
        ValueError, NotImplementedError: See `leanbench.lean_attn_with_kvcache`.
    """
    if options.get("output_attentions"):
        raise UserError(
            "output_attentions is set, and attn_implementation='lean' has no weights to return: use"
            " attn_implementation='eager'"
        )
    if options.get("indices") is not None:
        raise UserError(
            f"{type(module).__name__} attends to chosen tokens only (indices), which"
            " attn_implementation='lean' does not: use attn_implementation='eager'"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q_len, capacity = query.shape[2], key.shape[2]
    # Of causal masks alone, whatever the layer says of itself.
    lengths_mask = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        lengths_mask = attention_mask
        if sliding_window is None and is_windowed(lengths_mask):
            sliding_window = _window_of(module)
    if sliding_window is not None and sliding_window >= capacity:
        sliding_window = None
    is_prompt = attention_mask is None and q_len > 1
    if is_prompt and is_causal and capacity > q_len and position_bias is None:
        # An empty static cache. A bias has its capacity, and sdpa cuts both.
        key, value = key[:, :, :q_len], value[:, :, :q_len]
    plain = sliding_window is None and softcap is None and s_aux is None
    of_sdpa = lengths_mask is None and (
        attention_mask is not None or not is_causal or (is_prompt and plain)
    )
    if of_sdpa or position_bias is not None:
        if lengths_mask is not None:
            attention_mask = dense_mask(lengths_mask, q_len, capacity, sliding_window)
        _refuse_for_sdpa(softcap, s_aux)
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **options,
        )
    if dropout:
        raise UserError(f"dropout is {dropout}, and lean has none: call model.eval() first")
    lengths, starts = lengths_of(lengths_mask)
    q, k_cache, v_cache = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = lean_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        cache_leftpad=starts,
        softmax_scale=scaling,
        causal=q_len > 1,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, -1),
        softcap=0 if softcap is None else softcap,
        sinks=s_aux,
    )
    assert isinstance(out, torch.Tensor)
    return out, None


def _window_of(module: torch.nn.Module) -> int:
    """Return the window of a layer that does not pass it, as `lean_mask` does."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    if window is None:
        raise UserError(
            f"the mask of {type(module).__name__} has a sliding window, and neither the layer nor"
            " its config has sliding_window: use attn_implementation='eager'"
        )
    return window


def _refuse_for_sdpa(softcap: float | None, sinks: torch.Tensor | None) -> None:
    if softcap is None and sinks is None:
        return
    kind = "sinks" if sinks is not None else f"a soft cap of {softcap}"
    raise UserError(
        f"a layer with {kind} has a mask that is not causal, which attn_implementation='lean' does"
        " not take together: use attn_implementation='eager'"
    )
