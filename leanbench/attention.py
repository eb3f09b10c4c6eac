"""LeanAttention for your own code, with flash-attn's arguments and shapes."""

from __future__ import annotations

import operator
import os
import warnings
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from leanbench.errors import UserError
from leanbench.inputs import AttentionInputs
from leanbench.problem import HEAD_DIMS, AttentionProblem
from leanbench.registry import KernelConfig, kernel
from leanbench.tune.lookup import State, choose, state

if TYPE_CHECKING:
    from leanbench.gpu.spec import GpuSpec

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Arguments of flash_attn_with_kvcache that this version does not have, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "k": (None,),
    "v": (None,),
    "rotary_cos": (None,),
    "rotary_sin": (None,),
    "cache_batch_idx": (None,),
    "cache_leftpad": (None,),
    "block_table": (None,),
    "window_size": ((-1, -1),),
    "softcap": (0.0,),
    "rotary_interleaved": (True, False),
    "alibi_slopes": (None,),
    "num_splits": (0,),
}


def lean_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    *,
    config: KernelConfig | None = None,
    **flash_attn_arguments: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of one query token per sequence over its cached tokens, by LeanAttention (arXiv 2405.10480).

    The reduction runs in a fixed order: the same inputs give the same bits. Nothing is copied to or read from the host,
    so calls can be captured in a CUDA graph. Partials travel through a workspace that belongs to the stream: calls that
    run at the same time must be on different streams, and graphs that do must have been captured on different ones.

    Args:
        q: (batch, 1, q_heads, head_dim), fp16 or bf16.
        k_cache: (batch, tokens, kv_heads, head_dim); any strides, head_dim contiguous. `q_heads` is a multiple of
            `kv_heads`. A cache stored as (batch, kv_heads, tokens, head_dim) is passed as `cache.transpose(1, 2)`.
        v_cache: like `k_cache`.
        cache_seqlens: tokens in use: one number, or (batch,) int32 on the same device. None: all of them. A sequence of
            length 0 gives output 0 and LSE -inf.
        softmax_scale: defaults to head_dim ** -0.5.
        causal: makes no difference to one query token, accepted for code that passes it.
        return_softmax_lse: also return the logarithm of the sum of exponentials, (batch, q_heads, 1), fp32.
        config: launch settings. By default those that were kept for this GPU (`leanbench tune`), where they are
            predicted to be faster than the kernel's heuristic for these sizes, or else the heuristic's; with a
            `cache_seqlens` tensor, for a batch of the cache's whole length. See leanbench.tune.lookup.
        **flash_attn_arguments: the other arguments of `flash_attn_with_kvcache`, as long as they ask for nothing.

    Returns:
        (batch, 1, q_heads, head_dim) like `q`, and the LSE if asked for.

    Raises:
        NotImplementedError: an argument asks for what this version does not have.
        TypeError: `flash_attn_with_kvcache` has no such argument either.
        ValueError: shapes, dtypes or devices do not fit together.
        UserError: the tensors are not on a GPU, and Triton's interpreter was not asked for.
    """
    for name, value in flash_attn_arguments.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")
        if not any(value is accepted or value == accepted for accepted in _UNSUPPORTED[name]):
            asked = f"a {name} tensor" if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            raise NotImplementedError(
                f"lean_attn_with_kvcache does not support {asked} yet: leave it at its default, {_UNSUPPORTED[name][0]}"
            )
    _check_tensors(q, k_cache, v_cache, cache_seqlens)
    batch, _, q_heads, head_dim = q.shape
    lengths = cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None
    context = k_cache.shape[1] if cache_seqlens is None or lengths is not None else operator.index(cache_seqlens)
    inputs = AttentionInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=lengths,
        context=context,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        lse=torch.empty(batch, q_heads, 1, dtype=torch.float32, device=q.device),
    )
    if config is None:
        # HND: a head's tokens lie next to each other.
        kv_layout = "HND" if k_cache.stride(2) > k_cache.stride(1) else "NHD"
        sizes = batch, q_heads, k_cache.shape[2], context, head_dim
        chosen = _default_config(*sizes, _DTYPE_NAMES[q.dtype], kv_layout, lengths is None, q.device, state())
        _launch_chosen(inputs, *chosen)
    else:
        _launch(inputs, config)
    return (inputs.out, inputs.lse) if return_softmax_lse else inputs.out


def _launch(inputs: AttentionInputs, config: KernelConfig) -> None:
    device = inputs.q.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel("lean").prepare(inputs, config)()
        return
    # Triton launches on the current device.
    with torch.cuda.device(device):
        kernel("lean").prepare(inputs, config)()


def _launch_chosen(inputs: AttentionInputs, config: KernelConfig, heuristic: KernelConfig) -> None:
    """Kept settings were compiled by the Triton of their day: where they do not fit any more, the heuristic's run."""
    if config in _refused:
        config = heuristic
    try:
        _launch(inputs, config)
    except Exception as error:
        if config == heuristic or type(error).__name__ != "OutOfResources":
            raise
        _refused.add(config)
        said = str(error).partition("\n")[0]
        warnings.warn(f"kept settings do not fit any more ({said}), the heuristic's are used: tune again", stacklevel=3)
        _launch(inputs, heuristic)


#: Kept settings that did not fit this GPU.
_refused: set[KernelConfig] = set()


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: int | torch.Tensor | None
) -> None:
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.shape != k_cache.shape or 0 in (*q.shape, *k_cache.shape):
        raise ValueError(
            f"q is {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}: expected "
            "(batch, 1, q_heads, head_dim) and twice (batch, tokens, kv_heads, head_dim), no size 0"
        )
    if q.shape[1] != 1:
        raise NotImplementedError(f"q has {q.shape[1]} tokens per sequence, only 1 is supported yet: loop over them")
    if q.shape[0] != k_cache.shape[0] or q.shape[3] != k_cache.shape[3] or q.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must agree in batch and head_dim, and q_heads must "
            "be a multiple of kv_heads"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head_dim {q.shape[3]} is not supported, choose one of {', '.join(map(str, HEAD_DIMS))}")
    if q.dtype not in _DTYPE_NAMES or {k_cache.dtype, v_cache.dtype} != {q.dtype}:
        raise ValueError(
            f"q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}: all fp16 or all bf16, please"
        )
    if not q.device == k_cache.device == v_cache.device:
        raise ValueError(f"q is on {q.device}, the caches on {k_cache.device} and {v_cache.device}: use one device")
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"the tensors are on {q.device}: move them to a GPU, or set TRITON_INTERPRET=1 before triton is imported "
            "to try it there"
        )
    if q.stride(3) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"the last strides of q and of the caches are {q.stride(3)}, {k_cache.stride(3)} and {v_cache.stride(3)}: "
            "head_dim must be contiguous, its stride 1"
        )
    if isinstance(cache_seqlens, torch.Tensor):
        if (
            cache_seqlens.shape != q.shape[:1]
            or cache_seqlens.dtype != torch.int32
            or not cache_seqlens.is_contiguous()
        ):
            raise ValueError(
                f"cache_seqlens is {tuple(cache_seqlens.shape)} {cache_seqlens.dtype}: expected ({q.shape[0]},) "
                "contiguous torch.int32"
            )
        if cache_seqlens.device != q.device:
            raise ValueError(f"cache_seqlens is on {cache_seqlens.device}, q on {q.device}: move it there")
    elif isinstance(cache_seqlens, bool) or (cache_seqlens is not None and not hasattr(cache_seqlens, "__index__")):
        raise ValueError(f"cache_seqlens is {cache_seqlens!r}: expected a number of tokens, or a tensor of them")
    elif cache_seqlens is not None and not 0 <= cache_seqlens <= k_cache.shape[1]:
        raise ValueError(f"cache_seqlens {cache_seqlens} is outside the cache's 0 to {k_cache.shape[1]} tokens")


@lru_cache(maxsize=4096)
def _default_config(
    batch: int,
    q_heads: int,
    kv_heads: int,
    context: int,
    head_dim: int,
    dtype: str,
    kv_layout: str,
    uniform: bool,
    device: torch.device,
    state: State,
) -> tuple[KernelConfig, KernelConfig]:
    """The settings to use, and the heuristic's.

    Args:
        state: what was chosen before is out of date when it changes.
    """
    problem = AttentionProblem(batch, q_heads, kv_heads, max(1, context), head_dim, dtype, kv_layout)
    config = choose(kernel("lean"), problem, _spec(device), uniform=uniform).config
    heuristic = kernel("lean").default_config(problem, _spec(device))
    assert config is not None
    assert heuristic is not None
    return config, heuristic


@cache
def _spec(device: torch.device) -> GpuSpec:
    if device.type == "cuda":
        from leanbench.gpu.local import spec_of_device

        return spec_of_device(torch.cuda.current_device() if device.index is None else device.index)
    # The interpreter plays any GPU.
    from leanbench.gpu.catalogue import find

    return find("h200")
