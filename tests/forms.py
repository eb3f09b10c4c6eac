"""Calls in the forms of flash-attn, FlashAttention-3 and FlashMLA, and the tensors of the
equivalent plain calls for the fp64 reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from leanbench.kernels.reference.torch import attend_all

from leanbench.attention.call import Call
from leanbench.attention.compat import non_contiguous
from leanbench.check.reference import Reference
from leanbench.core.extras import extras_of
from leanbench.core.inputs import AttentionInputs

INT32 = torch.int32


def numbers(*values: int, device: str = "cpu") -> torch.Tensor:
    """Return int32 values, (values,)."""
    return torch.tensor(values, dtype=INT32, device=device)


def rand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape).to(dtype)


def half(*shape: int) -> torch.Tensor:
    """Return zeros in fp16."""
    return torch.zeros(shape, dtype=torch.float16)


def plain_form(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qv: torch.Tensor | None = None,
    scale: float | None = None,
    **others: Any,
) -> AttentionInputs:
    """Return the tensors of a call without `qv`, with poisoned outputs.

    Rows of q and qv are concatenated, and so are those of K and V.

    Args:
        scale: None: head_dim ** -0.5, of both together.
        others: fields of AttentionInputs; `causal` is False by default.
    """
    if qv is not None:
        q, k_cache = torch.cat([q, qv], -1), joined(k_cache, v_cache)
        if others.get("k_new") is not None:
            others["k_new"] = joined(others["k_new"], others["v_new"])
    table = others.get("block_table")
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    packed = others.get("cu_seqlens_q") is not None
    lse = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=others.pop("cache_seqlens", None),
        context=others.pop("context", capacity),
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
        out=q.new_full(
            (*q.shape[:-1], v_cache.shape[-1]),
            torch.nan,
            dtype=q.dtype if q.element_size() == 2 else torch.bfloat16,
        ),
        lse=q.new_full(lse, torch.nan, dtype=torch.float32),
        **{"causal": False, **others},
    )


def joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return concatenated rows of K and V."""
    return torch.cat([k, v], -1)


def assert_form(
    inputs: AttentionInputs,
    results: Any,
    caches: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Check the results of every head within the limits of `leanbench.check.reference`.

    Args:
        inputs: made by `plain_form` before the call.
        results: output and LSE.
        caches: K and V after an appending call, with tokens unchanged or appended.
    """
    out, lse = results
    written = replace(inputs, k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    if caches is not None:
        attend_all(written)
        # Rotations in fp64 and in fp32 may be rounded to different numbers.
        k_cache = written.k_cache[..., : caches[0].shape[-1]]
        torch.testing.assert_close(caches[0], k_cache, equal_nan=True)
        assert torch.equal(caches[1].nan_to_num(), written.v_cache.nan_to_num())
    reference = Reference(inputs, max_elements=1 << 62)
    check = reference.check(replace(written, out=out, lse=lse))
    assert check.failure("fp16" if out.dtype == torch.float16 else "bf16") is None


def pages_of(rows: torch.Tensor, page_size: int, spare: int = 3) -> tuple[torch.Tensor, Any]:
    """Return pages of (batch, tokens, kv_heads, head_dim), and the block table.

    Pages (pages, page_size, kv_heads, head_dim) are in any order, among others that are NaN.
    """
    batch, tokens = rows.shape[:2]
    count = tokens // page_size
    order = torch.randperm(batch * count + spare, device=rows.device)[: batch * count]
    shape = (batch * count + spare, page_size, *rows.shape[2:])
    pages = torch.full(shape, torch.nan, device=rows.device).to(rows.dtype)
    bits = torch.uint8 if rows.element_size() == 1 else torch.int16
    whole = rows.contiguous().view(bits)
    pages.view(bits)[order] = whole.view(batch * count, page_size, *whole.shape[2:])
    return pages, order.view(batch, count).to(INT32)


def assert_read_as_is(inputs: AttentionInputs) -> None:
    """Every tensor is contiguous where kernels need that."""
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens, None)
    assert not non_contiguous(Call(*tensors, inputs.block_table, extras=extras_of(inputs)))


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with NaN, or numbers that are too large, between them."""
    wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide.view(torch.uint8).fill_(0x7F)
    wide[..., 0] = tensor
    return wide[..., 0]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers and strides, a number past a multiple of 16 bytes."""
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.empty(numbers + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)
