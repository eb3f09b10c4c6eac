"""Arguments in the forms that flash-attn's callers pass, in the one form that a call has."""

from __future__ import annotations

import operator
from typing import Any

import torch

from leanbench.calls.call import WHOLE_NUMBERS


def check_types(**tensors: Any) -> None:
    """Raises TypeError: the first of these that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}: expected a torch.Tensor")


#: What `float` raises of what is no number, too large a one, or one that is on no device.
NO_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)


def flag(name: str, value: Any, call: str = "lean_attn_with_kvcache") -> bool:
    """A bool that came as another type: 0 and 1, numpy's, a tensor of one on the host.

    Args:
        call: whose argument it is.

    Raises:
        NotImplementedError: it is a tensor of several, one for each sequence.
        ValueError: it is nothing of all that.
    """
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise NotImplementedError(
            f"{call} does not support {name} of each sequence, a tensor {tuple(value.shape)}: pass"
            " True or False, and the sequences in two calls"
        )
    on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    try:
        if not on_device and value in (0, 1):
            return bool(value)
    except ValueError:
        # Of an array of several.
        pass
    raise ValueError(f"{name} is {said(value)}: expected True or False")


def said(value: Any) -> str:
    """A value in a sentence; of a long one its type."""
    text = repr(value)
    is_short = len(text) < 100 and "\n" not in text
    return text if is_short else f"of type {type(value).__name__}"


def check_splits(num_splits: Any) -> None:
    """Check the hint `num_splits`, which is ignored.

    Raises:
        ValueError: It is no whole number.
    """
    if isinstance(num_splits, bool) or not hasattr(type(num_splits), "__index__"):
        raise ValueError(
            f"num_splits is {said(num_splits)}: expected a whole number, which is ignored"
        )


def most_query_tokens(q: torch.Tensor, cu_seqlens_q: Any, max_seqlen_q: Any) -> Any:
    """`max_seqlen_q` as it counts: none without packed queries, at most their tokens, and these
    where it is not given. What is no whole number is left for `check_tensors` to refuse.
    """
    if cu_seqlens_q is None or q.dim() != 3:
        return None if cu_seqlens_q is None else max_seqlen_q
    if max_seqlen_q is None:
        return q.shape[0]
    if not isinstance(max_seqlen_q, WHOLE_NUMBERS):
        max_seqlen_q = tokens_of(max_seqlen_q)
        if not isinstance(max_seqlen_q, int):
            return max_seqlen_q
    is_symbol = isinstance(max_seqlen_q, torch.SymInt) or isinstance(q.shape[0], torch.SymInt)
    return max_seqlen_q if is_symbol else min(max_seqlen_q, q.shape[0])


def cap_of(softcap: Any) -> float:
    """A soft cap as a number, 0 where it is below: none, as by flash-attn.

    Raises:
        ValueError: it is none.
    """
    try:
        cap = float(softcap)
    except NO_NUMBER:
        raise ValueError(
            f"softcap is {said(softcap)}: expected 0 for none, or a number above it"
        ) from None
    # A NaN stays one, which is refused.
    return 0.0 if cap < 0 else cap


def tokens_of(number: Any) -> Any:
    """A whole number of another type, such as numpy's, as an int; what is none, and tensors, whose
    number could change under a prepared launch, are left for `check_tensors` to refuse.
    """
    # An int at once: torch.compile's symbols are some, and have no attributes to ask for.
    is_done = isinstance(number, (int, torch.SymInt, torch.Tensor))
    return number if is_done or not hasattr(number, "__index__") else operator.index(number)


def expanded(scales: Any, q: torch.Tensor, k_cache: torch.Tensor, cu_seqlens_q: Any) -> Any:
    """Scales as (batch, kv_heads) where they expand to that; others are left to be refused."""
    if not isinstance(scales, torch.Tensor) or k_cache.dim() != 4 or not q.dim():
        return scales
    batch = q.shape[0]
    if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
        batch = cu_seqlens_q.shape[0] - 1
    shape = (batch, k_cache.shape[2])
    if scales.shape == shape or scales.dim() > 2:
        return scales
    sizes = zip(reversed(scales.shape), reversed(shape), strict=False)
    return scales.expand(shape) if all(own in (1, size) for own, size in sizes) else scales
