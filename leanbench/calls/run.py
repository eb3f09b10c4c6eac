"""A call from its arguments to its output, as they are or as an operator of torch."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from leanbench.calls.call import Call
from leanbench.calls.empty import attend_nothing
from leanbench.calls.extra_checks import check_tensors
from leanbench.calls.operator import attend_traced
from leanbench.calls.prepared import attend
from leanbench.calls.traced import is_traced


def run(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if asked for, of a call whose arguments have the types that they are to
    have; errors as of `lean_attn_with_kvcache`.
    """
    if call.extras is not None:
        check_tensors(call)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        refuse_derivatives(call)
    if is_traced(call.q, call.k_cache, call.v_cache):
        return attend_traced(call.with_own_rows(), with_lse)
    if call.q.numel() == 0 or call.k_cache.numel() == 0:
        return attend_nothing(call.with_own_rows(), with_lse)
    return attend(call, with_lse)


def refuse_derivatives(call: Call, *others: torch.Tensor) -> None:
    """Raises NotImplementedError where one would be asked of the call, or of other tensors."""
    tensors = *call[:3], *others
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
