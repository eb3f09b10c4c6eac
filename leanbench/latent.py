"""Multi-head latent attention for your own code: `lean_mla_with_kvcache`."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch

from leanbench.calls.call import check_device, check_numbers, check_pages, whole_number
from leanbench.core.errors import UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.kernels.mla import LEAN_MLA, PAGE_TOKENS
from leanbench.kernels.mla.build import LATENT_DIM, VALUE_DIM
from leanbench.kernels.mla.launch import MlaLaunch

#: Prepared launches that a thread keeps.
_KEPT = 512
_DTYPES = (torch.bfloat16, torch.float16)


class _Launches(threading.local):
    """Prepared launches of a thread, by all that decides them."""

    def __init__(self) -> None:
        self.by_signature: dict[Hashable, MlaLaunch] = {}


_LAUNCHES = _Launches()


def lean_mla_with_kvcache(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | int | None = None,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int = VALUE_DIM,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a latent cache (MLA), on Hopper GPUs: all query heads attend to one row
    of 576 numbers a token, which is K, and whose first 512 numbers are V. Shapes are FlashMLA's.

    Args:
        q: (batch, q_len, q_heads, 576), bf16 or fp16, positions and heads in a row in memory.
        kv_cache: (batch, tokens, 576), or with a `block_table` (pages, page_size, 1, 576), whose
            pages have a multiple of 64 tokens; in the dtype of `q`.
        cache_seqlens: tokens in use: one number, or (batch,) int32 on the same device. None: all.
            A sequence of length 0 gives output 0 and LSE -inf.
        block_table: (batch, pages of a sequence), int32, contiguous: where each page is.
        softmax_scale: above 0; 576 ** -0.5 by default.
        head_dim_v: 512.
        causal: True: the last of several query tokens sees the whole sequence, each one before it a
            token less. False: each sees all tokens.
        return_softmax_lse: also return the LSE, (batch, q_heads, q_len), fp32.
        out: (batch, q_len, q_heads, 512), where the output is written; None: a new tensor.

    Raises:
        NotImplementedError: a tensor requires a gradient.
        ValueError: shapes, dtypes, strides or devices do not fit together.
        UserError: the tensors are not on a Hopper GPU, or NVRTC is missing.
    """
    if torch.is_grad_enabled() and (q.requires_grad or kv_cache.requires_grad):
        raise NotImplementedError(
            "lean_mla_with_kvcache is for inference and has no gradient, but a tensor of the call"
            " requires one: call it under torch.no_grad()"
        )
    cache = kv_cache.unsqueeze(2) if kv_cache.dim() == 3 and block_table is None else kv_cache
    _check(q, cache, cache_seqlens, block_table, softmax_scale, head_dim_v, out)
    batch, q_len, heads, _ = q.shape
    capacity = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    on_device = isinstance(cache_seqlens, torch.Tensor)
    length = None if on_device else whole_number(cache_seqlens)
    if length is None:
        length = capacity
    if not 0 <= length <= capacity:
        raise ValueError(
            f"cache_seqlens {length} is outside the cache's 0 to {capacity} tokens: pass a length"
            " that the cache has room for"
        )
    inputs = AttentionInputs(
        q=q,
        k_cache=cache,
        v_cache=cache[..., :VALUE_DIM],
        cache_seqlens=cache_seqlens if on_device else None,
        context=length,
        softmax_scale=LATENT_DIM**-0.5 if softmax_scale is None else float(softmax_scale),
        out=q.new_empty((batch, q_len, heads, VALUE_DIM)) if out is None else out,
        lse=torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device),
        block_table=block_table,
        causal=causal,
        latent=True,
    )
    # Kernels are launched on the current device.
    with torch.cuda.device(q.device):
        _prepared(inputs).run_over(inputs)
    return (inputs.out, inputs.lse) if return_softmax_lse else inputs.out


def _prepared(inputs: AttentionInputs) -> MlaLaunch:
    """The launch for these shapes, strides and lengths, made once."""
    table = inputs.block_table
    signature = (
        inputs.q.device,
        inputs.q.dtype,
        inputs.q.shape,
        inputs.q.stride(),
        inputs.k_cache.shape,
        inputs.k_cache.stride(),
        inputs.out.stride(),
        None if table is None else table.shape,
        # Lengths that need as many stages share a launch.
        None if inputs.cache_seqlens is not None else -(-inputs.context // PAGE_TOKENS),
        inputs.softmax_scale,
        inputs.causal,
    )
    launches = _LAUNCHES.by_signature
    if signature not in launches:
        if (reason := LEAN_MLA.unavailable_reason()) is not None:
            raise UserError(reason)
        if len(launches) >= _KEPT:
            launches.pop(next(iter(launches)))
        config = LEAN_MLA.config_of(inputs.context)
        launches[signature] = MlaLaunch(inputs, config)
    return launches[signature]


def _check(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor | int | None,
    table: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int,
    out: torch.Tensor | None,
) -> None:
    """Raises ValueError or UserError, as `lean_mla_with_kvcache` says."""
    caches = "(batch, tokens, 576)" if table is None else "(pages, page_size, 1, 576)"
    if (
        (q.dim(), cache.dim()) != (4, 4)
        or (q.shape[3], cache.shape[2], cache.shape[3]) != (LATENT_DIM, 1, LATENT_DIM)
        or (table is None and q.shape[0] != cache.shape[0])
        or 0 in (*q.shape, *cache.shape)
    ):
        raise ValueError(
            f"q is {tuple(q.shape)} and kv_cache {tuple(cache.shape)}: expected (batch, q_len,"
            f" q_heads, {LATENT_DIM}) and {caches}, no size 0"
        )
    if head_dim_v != VALUE_DIM:
        raise ValueError(f"head_dim_v is {head_dim_v}: only {VALUE_DIM} is supported, pass that")
    if softmax_scale is not None and not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}: pass a number above 0")
    if q.dtype not in _DTYPES or cache.dtype != q.dtype:
        raise ValueError(
            f"q is {q.dtype} and kv_cache {cache.dtype}: expected both bf16 or both fp16"
        )
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        raise UserError(
            f"lean_mla_with_kvcache runs on Hopper GPUs, q is on {q.device}: move the tensors there"
        )
    rows_are_in_a_row = q.shape[1] == 1 or q.stride(1) == q.shape[2] * q.stride(2)
    if not rows_are_in_a_row or q.stride(3) != 1 or cache.stride(3) != 1:
        raise ValueError(
            f"q has strides {tuple(q.stride())} and kv_cache {tuple(cache.stride())}: query"
            " positions and heads must lie in a row, and 576 numbers side by side"
        )
    addresses = (q.data_ptr(), cache.data_ptr())
    steps = (*q.stride()[:3], *cache.stride()[:2])
    if any(number % 16 for number in (*addresses, *(2 * step for step in steps))):
        raise ValueError(
            "q or kv_cache starts at or steps by no multiple of 16 bytes: pass aligned tensors"
        )
    _check_others(q, cache, lengths, table, out)


def _check_others(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor | int | None,
    table: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    if isinstance(lengths, torch.Tensor):
        check_numbers("cache_seqlens", lengths, q, (q.shape[0],))
    if table is not None and cache.shape[1] % PAGE_TOKENS:
        raise ValueError(
            f"kv_cache has pages of {cache.shape[1]} tokens: choose a multiple of {PAGE_TOKENS}"
        )
    if table is not None:
        check_pages(table, q, q.shape[0])
    check_device("kv_cache", cache, q)
    if out is not None:
        check_device("out", out, q)
        _check_out(q, out)


def _check_out(q: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ValueError: the kernel writes pairs of numbers, 4 bytes at a time."""
    shape = (*q.shape[:3], VALUE_DIM)
    if out.shape != shape or out.dtype != q.dtype or out.stride(3) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {tuple(out.stride())}: expected"
            f" {shape} {q.dtype}, the last stride 1"
        )
    steps = [stride for size, stride in zip(shape[:3], out.stride()[:3], strict=True) if size > 1]
    if 0 in steps or out.data_ptr() % 4 or any(step % 2 for step in steps):
        raise ValueError(
            f"out has strides {tuple(out.stride())}: it must start at and step by multiples of 4"
            " bytes, and not be expanded"
        )
