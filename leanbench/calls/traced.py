"""Whether a call is to be an operator."""

from __future__ import annotations

import torch
from torch._C import (
    _functorch,  # pyright: ignore[reportAttributeAccessIssue]
    _get_tracing_state,
    _len_torch_dispatch_stack,
)

# Every call asks: a name of this module takes less host time than one of another.
_is_compiling = torch.compiler.is_dynamo_compiling
_interpreter = _functorch.peek_interpreter_stack
_Tensor = torch.Tensor


def is_traced(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a compiler, a transform, a mode or a subclass of tensors is to see an operator."""
    return (
        _is_compiling()
        or _interpreter() is not None
        or _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or not (type(q) is type(k_cache) is type(v_cache) is _Tensor)
    )
