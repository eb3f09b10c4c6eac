"""What every Triton launch of this room passes, taken from the call's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.decomposition import tile_rows

if TYPE_CHECKING:
    import torch

    from leanbench.inputs import AttentionInputs
    from leanbench.registry import KernelConfig

#: SMs that stand in for a GPU's in Triton's interpreter: odd, so that shares come out uneven.
INTERPRETER_SMS = 5
#: Numbers of a partial's row beside its D columns: a logarithm, and three that keep the next slot's rows on 16-byte
#: borders.
PARTIAL_ROW_EXTRA = 4


@dataclass(frozen=True)
class LaunchShape:
    """Sizes derived from a call, named as in leanbench.decomposition."""

    batch: int
    kv_heads: int
    group_size: int
    head_dim: int
    rows: int
    row_tiles: int
    #: Rows of a partial that hold anything: the padding of small groups is neither stored nor read.
    row_count: int

    @classmethod
    def of(cls, inputs: AttentionInputs) -> LaunchShape:
        group_size, head_dim = inputs.group_size, inputs.head_dim
        rows = tile_rows(group_size, head_dim)
        return cls(
            batch=inputs.q.shape[0],
            kv_heads=inputs.k_cache.shape[2],
            group_size=group_size,
            head_dim=head_dim,
            rows=rows,
            row_tiles=-(-group_size // rows),
            row_count=min(group_size, rows),
        )

    @property
    def output_tiles(self) -> int:
        return self.batch * self.kv_heads * self.row_tiles

    def lean_tiles(self, context: int, tile_tokens: int) -> int:
        """All LeanTiles if every sequence had `context` tokens."""
        return self.output_tiles * max(1, -(-context // tile_tokens))


def cache_strides(inputs: AttentionInputs) -> tuple[int, ...]:
    """(batch, head, token) strides of K, then of V, in elements."""
    strides = []
    for cache in (inputs.k_cache, inputs.v_cache):
        batch, token, head, _ = cache.stride()
        strides += [batch, head, token]
    return tuple(strides)


def qk_scale(inputs: AttentionInputs) -> float:
    """Softmax scale in units of log2, the kernels exponentiate with base 2."""
    return inputs.softmax_scale * math.log2(math.e)


def constants(shape: LaunchShape, config: KernelConfig, ragged: bool) -> dict[str, Any]:
    """The compile-time parameters that all kernels of this room take; shapes that change between calls are not
    among them.
    """
    return {
        "GROUP_SIZE": shape.group_size,
        "TILE_ROWS": shape.rows,
        "TILE_TOKENS": config.tile_tokens,
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": padded(shape.head_dim),
        "RAGGED": ragged,
    }


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def merge_rows_at_once(row_count: int, head_dim: int, num_warps: int) -> int:
    """Rows that a merge accumulates together: a power of two, at most 8 numbers a thread."""
    return min(padded(row_count), max(1, 8 * 32 * num_warps // padded(head_dim)))


#: Below this the kernels spill, and more CTAs than fit at once cost nothing but their start.
_MIN_REGISTERS = 96


def registers_per_thread(warps_per_sm: int) -> int | None:
    """The cap that lets `warps_per_sm` warps share an SM's 64K registers; None where none is needed or it would be
    too low.
    """
    cap = 65536 // (32 * warps_per_sm) // 8 * 8
    return cap if _MIN_REGISTERS <= cap < 255 else None


def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SMS
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
