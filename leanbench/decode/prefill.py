"""Time to first token: prompts of all sequences through the whole model."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from leanbench.decode.step import DecodeStep
from leanbench.measure.instruments import Instruments
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

#: Prompts that count at most; after so many seconds, no more than one. One before them does not.
_PROMPTS, _ENOUGH_S = 3, 2.0


def prefill_fields(instruments: Instruments, step: DecodeStep) -> tuple[Outcome, list[str]]:
    """Return the median time of prompts as long as the context, if requested, and warnings."""
    import torch

    if step.problem.max_context > instruments.options.prefill:
        return Outcome(), []
    if step.problem.is_ragged or set(step.cache.lengths) != {None}:
        return Outcome(), [
            "no time to first token: it is measured where prompts are equally long and every layer"
            " sees all of them"
        ]
    step.attend_with(causal_attention)
    try:
        _prompt_us(step)
        times_us = [_prompt_us(step)]
        while len(times_us) < _PROMPTS and sum(times_us) < _ENOUGH_S * 1e6:
            times_us.append(_prompt_us(step))
    except Exception as error:
        # The steps are measured. An error of the GPU itself is sticky: then this raises.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        reason = str(error).partition("\n")[0]
        return Outcome(), [f"no time to first token ({type(error).__name__}: {reason})"]
    return Outcome(prefill_us=statistics.median(times_us)), []


def _prompt_us(step: DecodeStep) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step.prefill()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float = 1.0,
    **call: object,
) -> torch.Tensor:
    """Return the causal attention of a prompt, (batch, tokens, q_heads, head_dim).

    torch's scaled_dot_product_attention computes it with its FlashAttention.

    Args:
        query: (batch, q_heads, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim).
        value: Like `key`.
    """
    from torch.nn.functional import scaled_dot_product_attention

    shared = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
    )
    return out.transpose(1, 2)
