"""Launches of calls over a latent cache, and the checks of their tensors."""

from __future__ import annotations

import torch

from leanbench.attention.call import HALVES, Call
from leanbench.attention.checks import MAX_STRIDE, check_device, check_numbers, check_pages
from leanbench.core.errors import UserError
from leanbench.core.extras import fp8_name
from leanbench.core.kernel import size_choices
from leanbench.core.kinds import SAME
from leanbench.kernels.mla import LEAN_MLA
from leanbench.kernels.mla.build import (
    LATENT_DIM,
    LATENTS,
    SCALED_ROW_BYTES,
    VALUE_DIM,
    gathers,
)

#: Alignment of tensor maps and of the kernel's stores, in bytes.
_ALIGNMENT = 16


class LatentShapes(ValueError):
    """Inconsistent shapes of `q` and `kv_cache`."""

    @classmethod
    def of(
        cls, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor | None
    ) -> LatentShapes:
        # Exceptions are pickled by the words that they are made of.
        rows = "(batch, tokens" if block_table is None else "(pages, page_size"
        heads = ", kv_heads" if kv_cache.dim() == 4 else ""
        columns = f"columns {size_choices(LATENTS)}"
        if kv_cache.dtype == torch.uint8:
            columns = f"{SCALED_ROW_BYTES} bytes a row in torch.uint8"
        if kv_cache.shape[-1:] == (SCALED_ROW_BYTES,):
            columns = f"{LATENT_DIM} columns of q for rows of {SCALED_ROW_BYTES} bytes"
        return cls(
            f"q is {tuple(q.shape)} and kv_cache {tuple(kv_cache.shape)}: expected (batch, q_len,"
            f" q_heads, columns) and {rows}{heads}, columns), {columns}, no size 0"
        )


def as_attention(call: Call) -> Call:
    """Return a latent call with its cache as K, and the first columns as V."""
    cache, table = call.k_cache, call.block_table
    if cache.dim() == 3 and table is None:
        cache = cache.unsqueeze(2)
    # Of shapes that are rejected later, all columns. A tracer's symbol has no hash.
    return call._replace(k_cache=cache, v_cache=cache[..., : LATENTS.get(int(call.q.shape[-1]))])


def check_latent(call: Call) -> None:
    """Check the tensors of a latent call by what a tracer knows.

    Raises:
        ValueError: The tensors are inconsistent.
    """
    q, table = call.q, call.block_table
    if q.dim() != 4 or call.k_cache.dim() < 3:
        raise LatentShapes.of(q, call.k_cache, table)
    cache = as_attention(call).k_cache
    if (
        cache.dim() != 4
        or int(q.shape[3]) not in LATENTS
        or cache.shape[2] != 1
        or (q.shape[3], cache.shape[3]) not in ((q.shape[3],) * 2, (LATENT_DIM, SCALED_ROW_BYTES))
        or (table is None and q.shape[0] != cache.shape[0])
        or 0 in (*q.shape, *cache.shape)
    ):
        raise LatentShapes.of(q, call.k_cache, table)
    if q.dtype not in HALVES or not (cache.dtype == q.dtype or fp8_name(cache.dtype) != SAME):
        raise ValueError(
            f"q is {q.dtype} and kv_cache {cache.dtype}: expected q in bf16 or fp16, and kv_cache"
            " in the same or in torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if fp8_name(cache.dtype) != SAME and LATENTS[int(q.shape[3])] != VALUE_DIM:
        raise ValueError(
            f"kv_cache {tuple(cache.shape)} is {cache.dtype}: fp8 is for rows of 512 or 576 numbers"
        )
    if cache.shape[3] == SCALED_ROW_BYTES:
        _check_row_scales(call, cache)
    if cache.stride(3) != 1:
        raise ValueError(
            f"the last stride of kv_cache is {cache.stride(3)}: {cache.shape[3]} numbers must be"
            " contiguous, their stride 1"
        )
    if call.cache_seqlens is not None:
        check_numbers("cache_seqlens", call.cache_seqlens, q, (q.shape[0],))
    if table is not None:
        check_pages(table, q, q.shape[0])
    check_device("kv_cache", cache, q)
    if call.all_extras.k_descale is not None:
        shapes = (1,), (q.shape[0], 1)
        check_numbers("k_descale", call.all_extras.k_descale, q, *shapes, dtypes=(torch.float32,))
    if call.out is not None:
        check_latent_out(call, call.out)


def _check_row_scales(call: Call, cache: torch.Tensor) -> None:
    if call.q.dtype != torch.bfloat16 or fp8_name(cache.dtype) != "e4m3":
        raise ValueError(
            f"q is {call.q.dtype} and kv_cache {cache.dtype} with rows of {SCALED_ROW_BYTES} bytes:"
            " expected q in bf16, and kv_cache in torch.uint8 or torch.float8_e4m3fn"
        )
    if call.block_table is None or not gathers(cache.shape[1]):
        raise ValueError(
            f"kv_cache is {tuple(cache.shape)}: rows of {SCALED_ROW_BYTES} bytes are read one by"
            " one, pass a view with pages of one token, and a block_table of tokens"
        )
    if call.all_extras.k_descale is not None:
        raise ValueError(
            f"k_descale goes with rows of {LATENT_DIM} numbers, those of kv_cache have scales"
            " inside: leave it out"
        )


def check_latent_launch(call: Call) -> None:
    """Check that the kernel can launch over the tensors of `as_attention`.

    Raises:
        UserError: The kernel does not run here.
        ValueError: Tensor maps do not support these addresses or strides.
    """
    q, cache = call.q, call.k_cache
    if (reason := unavailable_reason(q)) is not None:
        raise UserError(reason)
    steps = [cache.element_size() * step for step in cache.stride()[:2]]
    if any(number % _ALIGNMENT for number in (cache.data_ptr(), *steps)):
        raise ValueError(
            "kv_cache starts at or steps by no multiple of 16 bytes: pass an aligned tensor"
        )
    if cache.shape[1] > 1 and cache.stride(1) > MAX_STRIDE:
        raise ValueError(
            f"kv_cache steps by {cache.stride(1)} numbers from token to token, the maximum is"
            f" {MAX_STRIDE}: pass a contiguous one"
        )
    if call.out is not None and call.out.data_ptr() % _ALIGNMENT:
        raise ValueError("out starts at no multiple of 16 bytes: pass an aligned tensor")


def unavailable_reason(q: torch.Tensor) -> str | None:
    """Return why the kernel does not run on the device of `q`, or None."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return (
            f"lean_mla_with_kvcache runs on Hopper GPUs, q is on {q.device}: move the tensors there"
        )
    return LEAN_MLA.unavailable_reason()


def check_latent_out(call: Call, out: torch.Tensor) -> None:
    """Check that the kernel can write `out`: 16 bytes at a time, with 32-bit strides.

    Raises:
        ValueError: It cannot.
    """
    shape, dtype = as_attention(call).out_shape, call.out_dtype
    if out.shape != shape or out.dtype != dtype or out.stride(3) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {tuple(out.stride())}: expected"
            f" {tuple(shape)} {dtype}, the last stride 1"
        )
    steps = [stride for size, stride in zip(shape[:3], out.stride()[:3], strict=True) if size > 1]
    if any(step > MAX_STRIDE for step in steps):
        raise ValueError(
            f"out has strides {tuple(out.stride())}: one is above {MAX_STRIDE}, pass an output"
            " with smaller ones"
        )
    if 0 in steps or any(2 * step % _ALIGNMENT for step in steps):
        raise ValueError(
            f"out has strides {tuple(out.stride())}: it must step by multiples of 16 bytes, and"
            " not be expanded"
        )
    check_device("out", out, call.q)
