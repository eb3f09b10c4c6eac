"""The launch of a call over a latent cache: whether its tensors fit together, and the kernel's."""

from __future__ import annotations

import torch

from leanbench.calls.call import Call, check_device, check_numbers, check_pages
from leanbench.core.errors import UserError
from leanbench.core.extras import fp8_name
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kinds import SAME
from leanbench.kernels.launch import Relaunch
from leanbench.kernels.lean.cuda_driver import sm_count
from leanbench.kernels.mla import LEAN_MLA, PAGE_TOKENS
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM
from leanbench.kernels.mla.launch import MlaRelaunch, launch_of

_DTYPES = (torch.bfloat16, torch.float16)
#: Bytes that tensor maps and the kernel's stores start at and step by.
_ALIGNMENT = 16
#: What the kernel has 32 bits for.
_LARGEST_STEP = 2**31 - 1


def as_attention(call: Call) -> Call:
    """A latent call with its cache as K, and the cache's first columns as V."""
    cache, table = call.k_cache, call.block_table
    if cache.dim() == 3 and table is None:
        cache = cache.unsqueeze(2)
    return call._replace(k_cache=cache, v_cache=cache[..., :VALUE_DIM])


def relaunch_latent(inputs: AttentionInputs) -> Relaunch:
    """The launch over these tensors, with the kernel's settings."""
    batch, q_len, heads, _ = inputs.q.shape
    config = LEAN_MLA.config_of(
        (batch, q_len * heads),
        inputs.context,
        inputs.cache_seqlens is None,
        sm_count(inputs.q.device),
        fp8_name(inputs.k_cache.dtype),
    )
    return MlaRelaunch(launch_of(inputs, config))


class LatentShapes(ValueError):
    """Shapes of `q` and `kv_cache` that do not fit together."""


def latent_shapes(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor | None
) -> LatentShapes:
    """Make the error about tensors as they were passed."""
    rows = "(batch, tokens" if block_table is None else "(pages, page_size"
    heads = ", kv_heads" if kv_cache.dim() == 4 else ""
    return LatentShapes(
        f"q is {tuple(q.shape)} and kv_cache {tuple(kv_cache.shape)}: expected (batch, q_len,"
        f" q_heads, {LATENT_DIM}) and {rows}{heads}, {LATENT_DIM}), no size 0"
    )


def check_latent(call: Call) -> None:
    """Whether the tensors fit together, by what a tracer knows of them.

    Raises:
        ValueError: they do not; the sentence names what was given and what is expected.
    """
    q, cache, table = call.q, as_attention(call).k_cache, call.block_table
    if (
        (q.dim(), cache.dim()) != (4, 4)
        or (q.shape[3], cache.shape[2], cache.shape[3]) != (LATENT_DIM, 1, LATENT_DIM)
        or (table is None and q.shape[0] != cache.shape[0])
        or 0 in (*q.shape, *cache.shape)
    ):
        raise latent_shapes(q, call.k_cache, table)
    of_cache = cache.dtype == q.dtype or fp8_name(cache.dtype) != SAME
    if q.dtype not in _DTYPES or not of_cache:
        raise ValueError(
            f"q is {q.dtype} and kv_cache {cache.dtype}: expected q in bf16 or fp16, and kv_cache"
            " in the same or in torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if cache.stride(3) != 1:
        raise ValueError(
            f"the last stride of kv_cache is {cache.stride(3)}: 576 numbers must be contiguous,"
            " their stride 1"
        )
    if call.cache_seqlens is not None:
        check_numbers("cache_seqlens", call.cache_seqlens, q, (q.shape[0],))
    if table is not None and cache.shape[1] % PAGE_TOKENS:
        raise ValueError(
            f"kv_cache has pages of {cache.shape[1]} tokens: choose a multiple of {PAGE_TOKENS}"
        )
    if table is not None:
        check_pages(table, q, q.shape[0])
    check_device("kv_cache", cache, q)
    if call.all_extras.k_descale is not None:
        shapes = (1,), (q.shape[0], 1)
        check_numbers("k_descale", call.all_extras.k_descale, q, *shapes, dtypes=(torch.float32,))
    if call.out is not None:
        check_latent_out(call, call.out)


def check_latent_launch(call: Call) -> None:
    """Whether the kernel runs over the tensors of a call of `as_attention`.

    Raises:
        UserError: the kernel does not run here.
        ValueError: tensor maps cannot have these addresses or steps.
    """
    q, cache = call.q, call.k_cache
    if (reason := device_refusal(q)) is not None:
        raise UserError(reason)
    steps = [cache.element_size() * step for step in cache.stride()[:2]]
    if any(number % _ALIGNMENT for number in (cache.data_ptr(), *steps)):
        raise ValueError(
            "kv_cache starts at or steps by no multiple of 16 bytes: pass an aligned tensor"
        )
    if call.out is not None and call.out.data_ptr() % _ALIGNMENT:
        raise ValueError("out starts at no multiple of 16 bytes: pass an aligned tensor")


def check_heads(cache: torch.Tensor) -> None:
    """Raises ValueError: not every KV head of a cache, which has a launch each, can be read."""
    if cache.element_size() * cache.stride(2) % _ALIGNMENT:
        raise ValueError(
            f"kv_cache steps by no multiple of {_ALIGNMENT} bytes from head to head: pass an"
            " aligned tensor"
        )


def is_on_hopper(q: torch.Tensor) -> bool:
    """Whether `q` is on a GPU that the kernel is for; TorchDynamo takes it as a constant."""
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9


def device_refusal(q: torch.Tensor) -> str | None:
    """One sentence why the kernel does not run where `q` is, or None."""
    if not is_on_hopper(q):
        return (
            f"lean_mla_with_kvcache runs on Hopper GPUs, q is on {q.device}: move the tensors there"
        )
    return LEAN_MLA.unavailable_reason()


def check_latent_out(call: Call, out: torch.Tensor) -> None:
    """Raises ValueError: the kernel writes 16 bytes at a time, and has 32 bits for steps."""
    shape, dtype = as_attention(call).out_shape, call.out_dtype
    if out.shape != shape or out.dtype != dtype or out.stride(3) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {tuple(out.stride())}: expected"
            f" {tuple(shape)} {dtype}, the last stride 1"
        )
    steps = [stride for size, stride in zip(shape[:3], out.stride()[:3], strict=True) if size > 1]
    if any(step > _LARGEST_STEP for step in steps):
        raise ValueError(
            f"out has strides {tuple(out.stride())}: one is above {_LARGEST_STEP}, pass an output"
            " with smaller ones"
        )
    if 0 in steps or any(2 * step % _ALIGNMENT for step in steps):
        raise ValueError(
            f"out has strides {tuple(out.stride())}: it must step by multiples of 16 bytes, and"
            " not be expanded"
        )
    check_device("out", out, call.q)
