"""What a launch of lean.cu is passed: the C structures of its beginning, field by field."""

from __future__ import annotations

import ctypes

#: Of the tensor maps, which the driver wants there; the compiler rounds the size of Params up to a multiple.
_ALIGNMENT_BYTES = 64


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


class Divisor(ctypes.Structure):
    _fields_ = [("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]

    @classmethod
    def of(cls, divisor: int) -> Divisor:
        """n // divisor == n * multiplier >> shift, for n below 2^31."""
        bits = (divisor - 1).bit_length()
        return cls((1 << (31 + bits)) // divisor + 1, 31 + bits)


class Params(ctypes.Structure):
    """Params in lean.cu, field by field."""

    _fields_ = [
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        *(
            (name, ctypes.c_uint64)
            for name in ("q", "k", "v", "out", "lse", "partials", "cache_seqlens", "block_table")
        ),
        *(
            (f"stride_{name}", ctypes.c_int64)
            for name in ("q_batch", "k_batch", "k_head", "v_batch", "v_head", "out_batch")
        ),
        *(
            (f"stride_{name}", ctypes.c_int32)
            for name in ("q_token", "q_head", "k_token", "v_token", "out_token", "out_head")
        ),
        *((name, ctypes.c_int32) for name in ("context", "batch", "kv_heads", "pages_per_sequence", "tile_shift")),
        *((name, ctypes.c_int32) for name in ("min_tiles_per_run", "share", "longer")),
        *((f"by_{name}", Divisor) for name in ("tiles", "heads", "share", "share_plus_1")),
        ("qk_scale", ctypes.c_float),
        ("stamps", ctypes.c_uint64),
    ]


class PaddedParams(ctypes.Structure):
    """Params as long as the driver reads it."""

    _fields_ = [("params", Params), ("padding", ctypes.c_uint8 * (-ctypes.sizeof(Params) % _ALIGNMENT_BYTES))]


#: sizeof(Params) in lean.cu, which refuses to compile with another.
PARAMS_BYTES = ctypes.sizeof(PaddedParams)
