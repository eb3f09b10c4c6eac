"""Rows of a latent cache in fp8 with their scales inside, as in DeepSeek's caches (656 bytes).

A row has the columns of V in e4m3, a scale in fp32 for each `GROUP` of them, and the other columns
in bf16. Kernels read them as bf16: a number times its scale is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Columns of a scale.
GROUP = 128
_SCALE_BYTES, _OTHER_BYTES = 4, 2
#: Largest number of e4m3.
_MOST = 448.0


def row_bytes(head_dim: int, value_dim: int) -> int:
    return value_dim + value_dim // GROUP * _SCALE_BYTES + (head_dim - value_dim) * _OTHER_BYTES


def encode_rows(rows: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Return rows (..., head_dim) as (..., row_bytes) in torch.float8_e4m3fn, each group scaled to
    the range of e4m3.
    """
    import torch

    groups = rows[..., :value_dim].float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / _MOST
    values = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    others = rows[..., value_dim:].bfloat16().contiguous()
    parts = [part.view(torch.uint8) for part in (values, scales.contiguous(), others)]
    return torch.cat(parts, dim=-1).view(torch.float8_e4m3fn)


def decode_rows(rows: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Return the output of `encode_rows` in bf16."""
    import torch

    scales_end = value_dim + value_dim // GROUP * _SCALE_BYTES
    as_bytes = rows.view(torch.uint8)
    scales = as_bytes[..., value_dim:scales_end].contiguous().view(torch.float32)
    others = as_bytes[..., scales_end:].contiguous().view(torch.bfloat16)
    groups = rows[..., :value_dim].float().unflatten(-1, (-1, GROUP))
    return torch.cat([(groups * scales[..., None]).flatten(-2).bfloat16(), others], dim=-1)


def negate_rows(rows: torch.Tensor, value_dim: int, size: int) -> None:
    """Negate the numbers of rows of `size` bytes in place, and leave their scales."""
    import torch

    scales_end = value_dim + value_dim // GROUP * _SCALE_BYTES
    signs = torch.zeros(size, dtype=torch.uint8)
    signs[:value_dim] = signs[scales_end + 1 :: _OTHER_BYTES] = 0x80
    rows.view(torch.uint8).view(-1, size).bitwise_xor_(signs.to(rows.device))
