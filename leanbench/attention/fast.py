"""The C path of calls seen before: `fast.c`, compiled with the package if there is a compiler.

C takes a call if the thread has made one with the same arguments twice: the same tensors but for
their addresses, the same settings, and a length on the host with the same launch. Everything else
is Python's, and what Python has prepared as one launch over the tensors of the call is handed to C.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import (
    _functorch,  # pyright: ignore[reportAttributeAccessIssue]
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad

from leanbench.attention import checks
from leanbench.attention.call import Call
from leanbench.configs import lookup
from leanbench.kernels.launch import Relaunch
from leanbench.kernels.lean import cuda_driver
from leanbench.kernels.lean.cuda import CudaRelaunch
from leanbench.kernels.lean.cuda_params import Params
from leanbench.kernels.lean.workspace import WORKSPACES

#: Arguments of `lean_attn_with_kvcache`, in the order in which C gets them.
ATTENTION = (
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal"),
    *("window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits"),
    *("return_softmax_lse", "page_table", "q_descale", "k_descale", "v_descale"),
    *("k_page_descale", "v_page_descale", "cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k_new"),
    *("rotary_seqlens", "attention_chunk", "sinks", "learnable_sink", "qv", "out"),
    *("batch_invariant", "config"),
)
#: Those of `lean_mla_with_kvcache`.
LATENT = (
    *("q", "kv_cache", "cache_seqlens", "block_table", "softmax_scale", "head_dim_v"),
    *("q_descale", "k_descale", "causal", "return_softmax_lse", "out"),
)
#: Arguments with another name than their field.
_NAMES = {"k_new": ("k", "k"), "v_new": ("v", "v"), "block_table": ("block_table", "page_table")}
_NAMES["sinks"] = ("sinks", "learnable_sink")
_LATENT_NAMES = {"k_cache": ("kv_cache", "kv_cache")}
#: Functions of the driver that C calls.
_DRIVER = (
    *("cuLaunchKernelEx", "cuTensorMapReplaceAddress"),
    *("cuStreamIsCapturing", "cuCtxGetDevice"),
)


def _loaded() -> tuple[Any, str | None]:
    """Return the extension, or None and the reason why Python makes all calls."""
    try:
        from leanbench.attention import _fast  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return None, "fast.c was not compiled when leanbench was installed"
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} has no __dlpack_c_exchange_api__"
    quiet_calls = (
        (_functorch.peek_interpreter_stack, None),
        (_len_torch_dispatch_stack, 0),
        (_is_tracing, False),
    )
    quiet_values = (
        (vars(forward_ad), "_current_level", -1),
        (vars(checks), "CHECKS_VALUES", False),
    )
    try:
        _fast.configure(
            *(exchange, torch.Tensor, torch.nn.Parameter, torch.empty_like),
            *(torch.is_grad_enabled, quiet_calls, quiet_values, lookup.watched()),
            *(WORKSPACES.epochs, _raise_status),
            _positions(ATTENTION, exact_tensors=3),
            _positions(LATENT, exact_tensors=2),
        )
    except (TypeError, ValueError) as error:
        # The file of another version raises TypeError.
        return None, str(error)
    return _fast, None


def _positions(names: tuple[str, ...], exact_tensors: int) -> tuple[int, ...]:
    config = names.index("config") if "config" in names else -1
    return len(names), exact_tensors, names.index("cache_seqlens"), config, names.index("out")


def _raise_status(status: int) -> None:
    cuda_driver.check_status(status)


_extension, why_not = _loaded()
#: Take the arguments `ATTENTION` or `LATENT`. Return what the call returns; or True if Python is to
#: make it and hand its launch over, False if only to make it. None without the extension.
attention: Callable[..., Any] | None = None if why_not else _extension.attention
latent: Callable[..., Any] | None = None if why_not else _extension.latent


@cache
def _use_driver() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    functions = [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in _DRIVER]
    _extension.use_driver(*functions)


def learn(
    call: Call,
    relaunch: Relaunch,
    context: int,
    lengths: range,
    out_like: torch.Tensor,
    lse: torch.Tensor,
    has_own_lse: bool,
) -> None:
    """Hand the launch that has just run to C, if it is one kernel over the tensors of the call.

    Args:
        context: that of the launch.
        lengths, out_like, lse, has_own_lse: Fields of leanbench.attention.prepared.Prepared.
    """
    if not isinstance(relaunch, CudaRelaunch):
        _extension.leave()
        return
    block = relaunch.block()
    if block is None:
        return
    _use_driver()
    fields = relaunch.pointers
    if call.out is not None:
        fields["out"] = "out"
    first = last = context
    if call.length is not None:
        first, last = lengths[0], min(lengths[-1], call.capacity)
    is_learned = _extension.learn(
        *(block.params, block.function, block.config, block.attributes, block.stream),
        *(_places(fields, call.latent), _places(relaunch.maps, call.latent)),
        *(Params.out.offset, Params.lse.offset, Params.context.offset, Params.epoch.offset),
        *(context, first, last),
        *(out_like, lse if has_own_lse else None, (lse, call.config)),
    )
    if not is_learned:
        _extension.leave()


def _places(fields: dict[str, str], latent: bool) -> bytes:
    """Return the offset, argument and other name of that argument of each pointer."""
    names, others = (LATENT, _LATENT_NAMES) if latent else (ATTENTION, _NAMES)
    places = array("i")
    for field, tensor in fields.items():
        name, other = others.get(tensor, (tensor, tensor))
        places.extend((getattr(Params, field).offset, names.index(name), names.index(other)))
    return places.tobytes()


def clear() -> None:
    """Forget all launches."""
    if _extension is not None:
        _extension.clear()
