"""Multi-head latent attention for your own code: `lean_mla_with_kvcache`."""

from __future__ import annotations

import torch

from leanbench.calls.call import whole_number
from leanbench.calls.latent import attend_latent_traced, latent_call
from leanbench.calls.prepared import attend
from leanbench.calls.traced import is_traced
from leanbench.kernels.mla.build import VALUE_DIM


def lean_mla_with_kvcache(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int = VALUE_DIM,
    k_descale: torch.Tensor | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a latent cache (MLA), on Hopper GPUs: all query heads attend to one row
    of 576 numbers a token, which is K, and whose first 512 numbers are V. Shapes are FlashMLA's.

    Args:
        q: (batch, q_len, q_heads, 576), bf16 or fp16, positions and heads in a row in memory.
        kv_cache: (batch, tokens, 576), or with a `block_table` (pages, page_size, 1, 576), whose
            pages have a multiple of 64 tokens; in the dtype of `q`, or all 576 numbers in
            torch.float8_e4m3fn or float8_e5m2.
        cache_seqlens: tokens in use: one number, or (batch,) int32 on the same device. None: all.
            A sequence of length 0 gives output 0 and LSE -inf.
        block_table: (batch, pages of a sequence), int32, rows at any distance: where each page is.
        softmax_scale: above 0; 576 ** -0.5 by default.
        head_dim_v: 512.
        k_descale: (1,), fp32, on the device of `q`, above 0: what all fp8 numbers of `kv_cache` are
            multiplied by, as K and as V; None: 1. Ignored where `kv_cache` is not fp8.
        causal: True: the last of several query tokens sees the whole sequence, each one before it a
            token less. False: each sees all tokens.
        return_softmax_lse: also return the LSE, (batch, q_heads, q_len), fp32.
        out: (batch, q_len, q_heads, 512), where the output is written; None: a new tensor.

    Raises:
        NotImplementedError: a tensor requires a gradient.
        ValueError: shapes, dtypes, strides or devices do not fit together.
        UserError: the tensors are not on a Hopper GPU, or NVRTC is missing.
    """
    if torch.is_grad_enabled() and (q.requires_grad or kv_cache.requires_grad):
        raise NotImplementedError(
            "lean_mla_with_kvcache is for inference and has no gradient, but a tensor of the call"
            " requires one: call it under torch.no_grad()"
        )
    if head_dim_v != VALUE_DIM:
        raise ValueError(f"head_dim_v is {head_dim_v}: only {VALUE_DIM} is supported, pass that")
    if softmax_scale is not None and not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}: pass a number above 0")
    if k_descale is not None and not isinstance(k_descale, torch.Tensor):
        raise ValueError(
            f"k_descale is {k_descale!r}, on the host: pass a torch.float32 tensor of one number on"
            " the device of q"
        )
    lengths, length = cache_seqlens, None
    if not isinstance(lengths, torch.Tensor):
        lengths, length = None, whole_number(cache_seqlens)
    scale = None if softmax_scale is None else float(softmax_scale)
    call = latent_call(q, kv_cache, lengths, length, block_table, out, scale, causal, k_descale)
    run = attend_latent_traced if is_traced(q, kv_cache, kv_cache) else attend
    result, lse = run(call, return_softmax_lse)
    return result if lse is None else (result, lse)
