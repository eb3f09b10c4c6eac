"""Parameters of a launch of lean.cu: C structures, field by field, and their limits."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs

#: Alignment required by tensor maps. The compiler rounds the size of Params up to a multiple.
PARAMS_ALIGNMENT = 64
#: Limit of 32-bit fields: ctypes silently drops higher bits.
INT32_MAX = 2**31 - 1


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Divisor(ctypes.Structure):
    _fields_ = [("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    @classmethod
    def of(cls, divisor: int) -> Divisor:
        return cls(*divided_by(divisor))


def divided_by(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift): n // divisor == n * multiplier >> shift, for n below 2^31."""
    bits = (divisor - 1).bit_length()
    return (1 << (31 + bits)) // divisor + 1, 31 + bits


class Descale(ctypes.Structure):
    """Scales by sequence, or page of a cache, and KV head. Strides count numbers. Null: scale 1."""

    _fields_ = [
        ("at", ctypes.c_uint64),
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, scales: torch.Tensor | None) -> Descale:
        if scales is None:
            return cls()
        # (pages,): one scale for all KV heads.
        return cls(scales.data_ptr(), *scales.stride(), *[0] * (2 - scales.dim()))


#: Numbers of a division of LeanTiles among work ranges, followed by divisors.
_SHARES = (
    *("end_tiles", "min_tiles_per_range", "share", "longer"),
    *("longest_steps", "merge_tiles"),
)
#: Pointers of every call, or 0.
_POINTERS = ("q", "k", "v", "out", "lse", "partials", "cache_seqlens", "block_table")


class Params(ctypes.Structure):
    """Params in params.cuh, field by field."""

    _fields_ = [
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        *((name, ctypes.c_uint64) for name in _POINTERS),
        ("kept", ctypes.c_uint64),
        ("kept_stride", ctypes.c_int32),
        ("kept_key", ctypes.c_uint32),
        ("context", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        *(
            (name, ctypes.c_uint64)
            for name in ("cache_leftpad", "cache_batch_idx", "alibi_slopes", "sinks")
        ),
        *((name, ctypes.c_uint64) for name in ("prior", "prior_lse")),
        *((name, ctypes.c_uint64) for name in ("k_new", "v_new", "rotary_cos", "rotary_sin")),
        *(
            (f"stride_{name}", ctypes.c_int64)
            for name in ("q_batch", "k_batch", "k_head", "v_batch", "v_head", "out_batch")
        ),
        ("stride_slopes_batch", ctypes.c_int64),
        *(
            (f"stride_{name}_new_{step}", ctypes.c_int64)
            for name in ("k", "v")
            for step in ("batch", "token", "head")
        ),
        *(
            (f"stride_{name}", ctypes.c_int32)
            for name in ("q_token", "q_head", "k_token", "v_token", "out_token", "out_head")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "kv_heads",
                "stride_table",
                "stride_table_head",
                "window_left",
                "window_right",
                "window_tokens",
                "tile_shift",
                "longest_shift",
                "new_tokens",
                "prior_tokens",
                "rotary_positions",
                "rotary_step",
            )
        ),
        *((name, ctypes.c_int32) for name in _SHARES),
        *((f"by_{name}", Divisor) for name in ("tiles", "heads", "share", "share_plus_1")),
        ("qk_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("epoch", ctypes.c_int32),
        ("replays", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("cu_seqlens_q", ctypes.c_uint64),
        ("q_len", ctypes.c_int32),
        ("total_queries", ctypes.c_int32),
        *((f"{name}_descale", Descale) for name in ("q", "k", "v")),
        ("attention_chunk", ctypes.c_int32),
        ("by_attention_chunk", Divisor),
        ("pages", ctypes.c_int32),
        ("peers", ctypes.c_uint64),
        # Only in builds with page_scales: its `page_descales`.
        *((f"{name}_page_descale", Descale) for name in ("k", "v")),
    ]


#: Write all pointers of Params from POINTERS_OFFSET on, faster than ctypes sets single fields.
pack_pointers = struct.Struct(f"{len(_POINTERS)}Q").pack_into
POINTERS_OFFSET = Params.q.offset
#: Write the fields of caches' strides, of `_SHARES` with their divisors, and of a pointer alone.
pack_strides, STRIDES_OFFSET = struct.Struct("4q").pack_into, Params.stride_k_batch.offset
_pack_shares, _SHARES_OFFSET = struct.Struct("6i8I").pack_into, Params.end_tiles.offset
pack_pointer = struct.Struct("Q").pack_into


def _aligned(size: int) -> int:
    return -(-size // PARAMS_ALIGNMENT) * PARAMS_ALIGNMENT


#: sizeof(Params) in params.cuh, checked by the compiler; and with page_scales.
PARAMS_BYTES = _aligned(Params.k_page_descale.offset)
PAGE_SCALES_PARAMS_BYTES = _aligned(ctypes.sizeof(Params))


_Memory = ctypes.c_uint8 * (PAGE_SCALES_PARAMS_BYTES + PARAMS_ALIGNMENT)


def aligned_params() -> Params:
    """Create Params with the size and alignment that the driver and the kernel read."""
    memory = _Memory()
    start = ctypes.addressof(memory)
    params = Params.from_address(start + -start % PARAMS_ALIGNMENT)
    # Faster than `from_buffer`.
    params.memory = memory
    return params


def pass_shares(params: Params, shares: tuple[int, ...], tiles: int) -> None:
    """Set `_SHARES` and their divisors.

    Args:
        tiles: LeanTiles of an output tile.
    """
    by_heads, share = params.by_heads, shares[2]
    _pack_shares(
        params,
        _SHARES_OFFSET,
        *shares,
        *divided_by(tiles),
        by_heads.multiplier,
        by_heads.shift,
        *divided_by(share),
        *divided_by(share + 1),
    )


def pass_table(params: Params, table: torch.Tensor) -> None:
    """Set the strides of a block table: (batch, pages) or (batch, kv_heads, pages)."""
    params.stride_table = table.stride(0)
    params.stride_table_head = table.stride(1) if table.dim() == 3 else 0


def too_far_apart(inputs: AttentionInputs) -> str | None:
    """Return which stride or number of pages exceeds its field of `Params`, or None."""
    q, out, k, v, table = inputs.q, inputs.out, inputs.k_cache, inputs.v_cache, inputs.block_table
    pages = 0 if table is None else table.shape[-1]
    if max(*q.stride()[-3:-1], *out.stride()[-3:-1], k.stride(1), v.stride(1), pages) <= INT32_MAX:
        return None
    # The stride of a single token or head is never used.
    steps = [
        (
            f"{name} steps by {tensor.stride(axis)} numbers from {what} to {what}",
            tensor.stride(axis),
        )
        for axis, what, tensors in (
            (-3, "token", {"q": q, "out": out, "k_cache": k, "v_cache": v}),
            (-2, "head", {"q": q, "out": out}),
        )
        for name, tensor in tensors.items()
        if tensor.shape[axis] > 1
    ]
    for quantity, number in (*steps, (f"block_table has {pages} pages a sequence", pages)):
        if number > INT32_MAX:
            return (
                f"{quantity}, lean_cuda takes at most {INT32_MAX}: pass a smaller or a contiguous"
                " tensor"
            )
    return None


def check_counts(lean_tiles: int, tokens: int) -> None:
    """Raise UserError if the LeanTiles, or the tokens in them, exceed their counters.

    The tokens are those of an output tile's LeanTiles.
    """
    for count, what in (
        (lean_tiles, "LeanTiles"),
        (tokens, "tokens a sequence, in whole LeanTiles,"),
    ):
        if count > INT32_MAX:
            raise UserError(
                f"this call has {count} {what} and lean_cuda counts to {INT32_MAX}: pass fewer"
                " sequences at a time, or a cache that has room for fewer tokens"
            )
