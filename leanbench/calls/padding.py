"""Calls over tensors that no kernel reads as they are: launched over copies, as by flash-attn.

Kernels read rows of K and V in pieces of 16 bytes. Where a head_dim is no whole number of them, or
a tensor starts at or steps by none, the copies are contiguous and have columns of 0, which change
neither the scores nor the output's own columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from leanbench.core.extras import Extras, extras_of
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.launch import Relaunch, problem_of
from leanbench.kernels.lean.cuda import misalignment
from leanbench.kernels.lean.triton_kernel import LeanTriton

_PIECE_BYTES = 16
_TRITON = LeanTriton()


def padded_dim(head_dim: int, cache: torch.Tensor) -> int:
    """A head_dim of a cache, up to whole pieces of the cache's dtype."""
    numbers = _PIECE_BYTES // cache.element_size()
    return -(-head_dim // numbers) * numbers


def needs_padding(inputs: AttentionInputs) -> bool:
    """Whether no kernel reads these tensors as they are. Triton's reads what is not aligned, but
    takes fewer kinds and sizes.
    """
    for cache in (inputs.k_cache, inputs.v_cache):
        if cache.shape[3] * cache.element_size() % _PIECE_BYTES:
            return True
    if misalignment(inputs) is None:
        return False
    return _TRITON.unsupported_reason(problem_of(inputs)) is not None


def launch_padded(
    inputs: AttentionInputs, launch: Callable[[AttentionInputs], Relaunch]
) -> PaddedRelaunch:
    """The launch over padded copies, made once.

    Args:
        launch: makes the launch over the tensors it is handed, and returns it.
    """
    own = _Tensors(inputs.q, inputs.k_cache, inputs.v_cache, inputs.out, extras_of(inputs))
    wide = own.padded()
    extras = {} if wide.extras is None else wide.extras._asdict()
    q, k_cache, v_cache, out, _ = wide
    relaunch = launch(replace(inputs, q=q, k_cache=k_cache, v_cache=v_cache, out=out, **extras))
    own.take(wide)
    return PaddedRelaunch(relaunch)


class PaddedRelaunch:
    """A launch over padded copies of the tensors that it is handed; see
    leanbench.kernels.launch.Relaunch.
    """

    def __init__(self, relaunch: Relaunch) -> None:
        self._relaunch = relaunch
        self.tile_tokens = relaunch.tile_tokens

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor | None,
        context: int,
        block_table: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras | None = None,
    ) -> None:
        own = _Tensors(q, k_cache, v_cache, out, extras)
        wide = own.padded()
        self._relaunch(
            wide.q,
            wide.k_cache,
            wide.v_cache,
            cache_seqlens,
            context,
            block_table,
            wide.out,
            lse,
            wide.extras,
        )
        own.take(wide)


class _Tensors(NamedTuple):
    """Tensors of a call whose rows the kernel reads or writes in pieces."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    extras: Extras | None

    def padded(self) -> _Tensors:
        """Copies of them, and a new `out`; of the caches where they need it."""
        q, k_cache, v_cache, out, extras = self
        k_dim, v_dim = padded_dim(k_cache.shape[3], k_cache), padded_dim(v_cache.shape[3], v_cache)
        # Both or neither: a launch is prepared for the alignment of the two together.
        if not (_is_whole(k_cache) and _is_whole(v_cache)):
            k_cache, v_cache = _copied(k_cache, k_dim), _copied(v_cache, v_dim)
        out = out.new_empty((*out.shape[:-1], v_dim))
        if extras is not None and extras.k_new is not None and extras.v_new is not None:
            extras = extras._replace(
                k_new=_copied(extras.k_new, k_dim), v_new=_copied(extras.v_new, v_dim)
            )
        if extras is not None and extras.rotary_cos is not None and extras.rotary_sin is not None:
            extras = extras._replace(
                rotary_cos=extras.rotary_cos.clone(), rotary_sin=extras.rotary_sin.clone()
            )
        return _Tensors(_copied(q, k_dim), k_cache, v_cache, out, extras)

    def take(self, wide: _Tensors) -> None:
        """Writes what a launch wrote to the copies: the output, and caches that it appended to."""
        self.out.copy_(wide.out[..., : self.out.shape[-1]])
        appends = self.extras is not None and self.extras.k_new is not None
        if appends and wide.k_cache is not self.k_cache:
            self.k_cache.copy_(wide.k_cache[..., : self.k_cache.shape[-1]])
            self.v_cache.copy_(wide.v_cache[..., : self.v_cache.shape[-1]])


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether it starts at, steps by, and has rows of, whole pieces."""
    numbers = reduce(or_, (*tensor.stride()[:-1], tensor.shape[-1]))
    return (tensor.data_ptr() | tensor.element_size() * numbers) % _PIECE_BYTES == 0


def _copied(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """A contiguous copy with so many columns, further ones 0."""
    # There is no torch.nn.functional.pad of fp8.
    wide = tensor.new_zeros((*tensor.shape[:-1], columns))
    wide[..., : tensor.shape[-1]].copy_(tensor)
    return wide
