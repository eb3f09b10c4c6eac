"""LeanAttention for your own code, with flash-attn's arguments and shapes."""

from __future__ import annotations

import operator as operators
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from leanbench.calls.call import Call, check_out
from leanbench.calls.operator import operator, taken_apart
from leanbench.calls.prepared import attend
from leanbench.kernels.lean.configs import LeanConfig

#: Arguments of flash_attn_with_kvcache that this version does not have, and the values that ask for
#: nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "k": (None,),
    "v": (None,),
    "rotary_cos": (None,),
    "rotary_sin": (None,),
    "cache_batch_idx": (None,),
    "cache_leftpad": (None,),
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
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    config: LeanConfig | None = None,
    **flash_attn_arguments: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of a sequence's last query tokens over its cached tokens, by LeanAttention
    (arXiv 2405.10480).

    The reduction runs in a fixed order: the same inputs give the same bits. For inference: there is
    no gradient. `torch.compile` takes a call whole, as the operator
    `torch.ops.leanbench.lean_attn_with_kvcache`.

    Nothing is copied to or read from the host, so calls can be captured in a CUDA graph. One graph
    serves a whole generation: make the call once before the capture, which compiles, capture it
    with `cache_seqlens` and `block_table` as tensors, and between replays write new lengths and
    pages into those two with `copy_`. The caches as captured bound the lengths.

    Partials travel through a workspace that belongs to the stream, or to the graph that captures
    the call: streams, and graphs with memory pools of their own, may run at the same time.

    Args:
        q: (batch, q_len, q_heads, head_dim), fp16 or bf16, q_len 1 to 16. The query tokens are the
            sequence's last, and their keys and values are in the cache already.
        k_cache: (batch, tokens, kv_heads, head_dim); any strides, head_dim contiguous. `q_heads` is
            a multiple of `kv_heads`. A cache stored as (batch, kv_heads, tokens, head_dim) is
            passed as `cache.transpose(1, 2)`. With a `block_table`: (pages, page_size, kv_heads,
            head_dim), page_size 16, 32, 64, 128 or 256.
        v_cache: like `k_cache`.
        cache_seqlens: tokens in use, the query tokens included: one number, or (batch,) int32 on
            the same device. None: all of them, with a `block_table` all of its pages. A sequence of
            length 0 gives output 0 and LSE -inf.
        softmax_scale: defaults to head_dim ** -0.5.
        causal: True where there are several query tokens: the last one sees the whole sequence and
            each one before it a token less; one that sees nothing gives output 0 and LSE -inf.
            Makes no difference to a single one.
        return_softmax_lse: also return the logarithm of the sum of exponentials, (batch, q_heads,
            q_len), fp32.
        block_table: (batch, pages of a sequence), int32, contiguous, on the same device: where each
            page of a sequence is in the caches. Entries past a sequence's end are not followed.
        out: where the output is written, shaped as `q`, head_dim contiguous; not a part of the
            inputs. None: a new tensor.
        batch_invariant: True: the bits of a sequence's output depend on its own query, cache and
            length alone, not on the other sequences, how many there are, or the GPU's SMs. The
            workspace then grows, by a partial for every 128 to 1024 tokens of each KV head of the
            caches' capacity.
        config: launch settings, see leanbench.kernels.lean.configs. By default those that were
            tuned for this GPU (`leanbench tune`), where there are better ones than the kernel's
            heuristic for these sizes, or else the heuristic's, as for several query tokens and
            pages; with a `cache_seqlens` tensor, the heuristic's for any length up to the
            cache's capacity. See leanbench.configs.lookup.
        **flash_attn_arguments: the other arguments of `flash_attn_with_kvcache`, as long as
            they ask for nothing.

    Returns:
        (batch, q_len, q_heads, head_dim) like `q`, and the LSE if asked for.

    Raises:
        NotImplementedError: an argument asks for what this version does not have, or a tensor for a
            gradient or a tangent.
        TypeError: `flash_attn_with_kvcache` has no such argument either.
        ValueError: shapes, dtypes or devices do not fit together, or a `config` without
            `fixed_run_tiles` and `batch_invariant` do not.
        UserError: the tensors are not on a GPU, and Triton's interpreter was not asked for; or the
            workspace of `batch_invariant` would be too large.
        RuntimeError: a CUDA graph is captured, and no call was made on this GPU before.
    """
    if flash_attn_arguments:
        _refuse_unsupported(flash_attn_arguments)
    _refuse_derivatives(q, k_cache, v_cache)
    if batch_invariant and config is not None and not config.fixed_run_tiles:
        raise ValueError(
            "batch_invariant needs a config with fixed_run_tiles: set it, or leave config out"
        )
    in_tensor = isinstance(cache_seqlens, torch.Tensor)
    lengths = cache_seqlens if in_tensor else None
    length = None if in_tensor else _whole_number(cache_seqlens)
    if _is_traced(q, k_cache, v_cache):
        result, lse = operator(
            q,
            k_cache,
            v_cache,
            lengths,
            length,
            block_table,
            softmax_scale,
            causal,
            batch_invariant,
            *taken_apart(config),
        )
        if out is not None:
            check_out(out, q)
            result = out.copy_(result)
        return (result, lse) if return_softmax_lse else result
    scale = None if softmax_scale is None else float(softmax_scale)
    call = Call(
        q,
        k_cache,
        v_cache,
        lengths,
        length,
        block_table,
        out,
        scale,
        causal,
        batch_invariant,
        config,
    )
    result, lse = attend(call, return_softmax_lse)
    return result if lse is None else (result, lse)


def _is_traced(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a compiler, a transform, a mode or a subclass of tensors is to see an operator."""
    return (
        torch.compiler.is_compiling()
        or _functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not (type(q) is type(k_cache) is type(v_cache) is torch.Tensor)
    )


def _refuse_derivatives(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raises NotImplementedError where one would be asked of the call."""
    if torch.is_grad_enabled() and (
        q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
    ):
        raise NotImplementedError(
            "lean_attn_with_kvcache is for inference and has no gradient, but q, k_cache or v_cache"
            " requires one: call it under torch.no_grad()"
        )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in (q, k_cache, v_cache)
    ):
        raise NotImplementedError(
            "lean_attn_with_kvcache is for inference and has no derivative, but q, k_cache or"
            " v_cache carries a tangent: call it outside torch.func.jvp and forward_ad.dual_level"
        )


def _refuse_unsupported(flash_attn_arguments: dict[str, Any]) -> None:
    for name, value in flash_attn_arguments.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"lean_attn_with_kvcache has no argument {name!r}")
        if not any(value is accepted or value == accepted for accepted in _UNSUPPORTED[name]):
            argument = (
                f"a {name} tensor" if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            )
            raise NotImplementedError(
                f"lean_attn_with_kvcache does not support {argument} yet: leave it at its default,"
                f" {_UNSUPPORTED[name][0]}"
            )


def _whole_number(cache_seqlens: Any) -> int | None:
    # A traced number stays a symbol.
    if cache_seqlens is None or (
        isinstance(cache_seqlens, int | torch.SymInt) and not isinstance(cache_seqlens, bool)
    ):
        return cache_seqlens  # pyright: ignore[reportReturnType]
    if isinstance(cache_seqlens, bool) or not hasattr(cache_seqlens, "__index__"):
        raise ValueError(
            f"cache_seqlens is {cache_seqlens!r}: expected a number of tokens, or a tensor of them"
        )
    return operators.index(cache_seqlens)
