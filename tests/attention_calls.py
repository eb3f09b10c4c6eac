"""`lean_attn_with_kvcache` over a problem's tensors, and whether what it returned is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from leanbench.attention import lean_attn_with_kvcache
from leanbench.inputs import AttentionInputs
from leanbench.measure.check import check_against_reference


def attend(inputs: AttentionInputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; `inputs.out` and `inputs.lse` are left alone."""
    options = {"cache_seqlens": inputs.cache_seqlens, "return_softmax_lse": True, **options}
    out, lse = lean_attn_with_kvcache(inputs.q, inputs.k_cache, inputs.v_cache, **options)
    return out, lse


def assert_right(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Within the limits of `leanbench.measure.check`, every head compared."""
    result = check_against_reference(replace(inputs, out=out, lse=lse), max_elements=1 << 62)
    assert result.failure("fp16" if out.dtype == torch.float16 else "bf16") is None
    assert result.checked_heads == result.total_heads
