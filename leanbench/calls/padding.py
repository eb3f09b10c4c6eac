"""Copies of tensors that no kernel reads as they are, as flash-attn makes them.

Kernels read rows of K and V in pieces of 16 bytes, up to 32 of 8 numbers, or 64, and of K 72. Where
a head_dim is another number of them or no whole one, or a tensor starts at or steps by none, the
copies are contiguous and have columns of 0, which change neither the scores nor the output's own
columns.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch

from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import misalignment, problem_of
from leanbench.kernels.lean.cuda_kernel import HEAD_DIMS
from leanbench.kernels.lean.triton_kernel import LeanTriton

#: The head_dims to which larger ones than this are padded.
_MOST_DIM, *_WIDE_DIMS = HEAD_DIMS[-3:]
_PIECE_BYTES = 16
_TRITON = LeanTriton()


def padded_dim(head_dim: int, cache: torch.Tensor) -> int:
    """A head_dim of a cache, up to whole pieces of the cache's dtype, as many as kernels take; as
    it is where they take none.
    """
    numbers = _PIECE_BYTES // cache.element_size()
    whole = -(-head_dim // numbers) * numbers
    if whole <= _MOST_DIM:
        return whole
    return next((wide for wide in _WIDE_DIMS if whole <= wide), whole)


def needs_padding(inputs: AttentionInputs) -> bool:
    """Whether no kernel reads these tensors as they are. Triton's reads what is not aligned, but
    takes fewer kinds and sizes.
    """
    for cache in (inputs.k_cache, inputs.v_cache):
        # As `padded_dim`, without a call.
        columns = cache.shape[3]
        if columns * cache.element_size() % _PIECE_BYTES:
            return True
        if columns > _MOST_DIM and columns not in _WIDE_DIMS:
            return True
    if misalignment(inputs) is None:
        return False
    return _TRITON.unsupported_reason(problem_of(inputs)) is not None


def is_read(cache: torch.Tensor) -> bool:
    """Whether a cache is one that a launch sees no copy of."""
    return is_whole(cache) and padded_dim(cache.shape[3], cache) == cache.shape[3]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it starts at, steps by, and has rows of, whole pieces."""
    numbers = reduce(or_, (*tensor.stride()[:-1], tensor.shape[-1]))
    return (tensor.data_ptr() | tensor.element_size() * numbers) % _PIECE_BYTES == 0


def copied(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """A contiguous copy with so many columns, further ones 0."""
    # There is no torch.nn.functional.pad of fp8.
    wide = tensor.new_zeros((*tensor.shape[:-1], columns))
    wide[..., : tensor.shape[-1]].copy_(tensor)
    return wide
