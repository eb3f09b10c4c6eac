"""Whether a call is to be an operator."""

from __future__ import annotations

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_traced(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a compiler, a transform, a mode or a subclass of tensors is to see an operator."""
    return (
        torch.compiler.is_compiling()
        or _functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not (type(q) is type(k_cache) is type(v_cache) is torch.Tensor)
    )
