"""Calls whose head_dim is no multiple of 8: run over padded copies, as flash-attn does."""

from __future__ import annotations

import torch

from leanbench.calls.call import Call

#: Columns that kernels take together.
COLUMNS = 8


def needs_padding(call: Call) -> bool:
    """Whether a head_dim is no multiple of `COLUMNS`."""
    if call.q.dim() == 0 or call.v_cache.dim() != 4:
        return False
    return call.q.shape[-1] % COLUMNS != 0 or call.v_cache.shape[3] % COLUMNS != 0


def padded(call: Call) -> Call:
    """The call over copies of its tensors with columns of 0, for new outputs. Scores and the
    output's own columns are as without them.
    """
    scale = call.q.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    extras = call.extras
    if extras is not None and extras.k_new is not None and extras.v_new is not None:
        extras = extras._replace(k_new=_wider(extras.k_new), v_new=_wider(extras.v_new))
    return call._replace(
        q=_wider(call.q),
        k_cache=_wider(call.k_cache),
        v_cache=_wider(call.v_cache),
        out=None,
        softmax_scale=scale,
        extras=extras,
    )


def write_back(call: Call, wide: Call, out: torch.Tensor) -> torch.Tensor:
    """The output's own columns, in `call.out` if there is one; what was appended goes into the
    caches of the call.
    """
    if call.new_tokens:
        call.k_cache.copy_(wide.k_cache[..., : call.k_cache.shape[-1]])
        call.v_cache.copy_(wide.v_cache[..., : call.v_cache.shape[-1]])
    own = out[..., : call.v_cache.shape[-1]]
    return own.contiguous() if call.out is None else call.out.copy_(own)


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    columns = tensor.shape[-1]
    if columns % COLUMNS == 0:
        return tensor
    # There is no torch.nn.functional.pad of fp8.
    wide = tensor.new_zeros((*tensor.shape[:-1], -(-columns // COLUMNS) * COLUMNS))
    wide[..., :columns].copy_(tensor)
    return wide
