"""Ways of a call: an operator under tracers, nothing for empty tensors, else a launch."""

from __future__ import annotations

import math

import torch
from torch._C import (
    _functorch,  # pyright: ignore[reportAttributeAccessIssue]
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad

from leanbench.attention.call import Call
from leanbench.attention.checks import (
    FLOATS,
    check_call,
    check_length,
    check_numbers,
    check_out,
    check_tensors,
)
from leanbench.attention.operator import attend_traced
from leanbench.attention.prepared import attend

# Every call checks these: a global takes less host time than an attribute.
_is_compiling = torch.compiler.is_dynamo_compiling
_interpreter = _functorch.peek_interpreter_stack
_Tensor = torch.Tensor


def run(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if requested, of a call with arguments of correct types."""
    if call.extras is not None:
        check_tensors(call)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        check_no_derivatives(call)
    if is_traced(call.q, call.k_cache, call.v_cache):
        return attend_traced(call.without_spare_rows(), with_lse)
    if call.q.numel() == 0 or call.k_cache.numel() == 0:
        return attend_nothing(call.without_spare_rows(), with_lse)
    return attend(call, with_lse)


def is_traced(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if a compiler, transform, mode or tensor subclass must see an operator."""
    return (
        _is_compiling()
        or _interpreter() is not None
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or not (type(q) is type(k_cache) is type(v_cache) is _Tensor)
    )


def check_no_derivatives(call: Call, *more: torch.Tensor) -> None:
    """Raise NotImplementedError for tensors that require a gradient or carry a tangent."""
    tensors = *call[:3], *more
    if call.out is not None:
        tensors = *tensors, call.out
    if call.extras is not None:
        tensors += tuple(call.extras.tensors.values())
    name = "lean_mla_with_kvcache" if call.latent else "lean_attn_with_kvcache"
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name} is for inference and has no gradient, but a tensor of the call"
                    " requires one: call it under torch.no_grad()"
                )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            f"{name} is for inference and has no derivative, but a tensor of the call carries a"
            " tangent: call it outside torch.func.jvp and forward_ad.dual_level"
        )


def attend_nothing(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output 0, and LSE -inf or the sink's logit, if there are no sequences, query tokens
    or cached tokens.

    Raises:
        ValueError: Another size is 0, tokens are appended, or the tensors are inconsistent.
    """
    q, k_cache, v_cache, extras = call.q, call.k_cache, call.v_cache, call.all_extras
    has_row_each = call.block_table is None and extras.cache_batch_idx is None
    if (
        q.dim() != (3 if extras.cu_seqlens_q is not None else 4)
        or k_cache.dim() != 4
        or v_cache.shape[:-1] != k_cache.shape[:-1]
        or 0 in (*q.shape[-2:], *k_cache.shape[2:], *v_cache.shape[3:])
        or q.shape[-1] != k_cache.shape[3]
        or q.shape[-2] % k_cache.shape[2]
        or (has_row_each and call.batch != k_cache.shape[0])
        or extras.k_new is not None
    ):
        # Rejects every size 0.
        check_call(call)
    if call.batch:
        # No sequence has the length. A block table of none has no pages.
        check_length(call)
    out = call.out
    if out is None:
        out = q.new_empty(call.out_shape, dtype=call.out_dtype)
    else:
        check_out(call, out)
    out.zero_()
    if not with_lse:
        return out, None
    lse = q.new_full(call.lse_shape, -math.inf, dtype=torch.float32)
    if extras.sinks is not None:
        check_numbers("sinks", extras.sinks, q, (q.shape[-2],), dtypes=FLOATS)
        lse.copy_(extras.sinks.float()[:, None].expand(call.lse_shape))
    return out, lse
