"""The C path of calls seen before: `fast.c`, compiled with the package if there is a compiler.

C takes a call if the thread has made one with the same arguments twice: the same tensors but for
their addresses, the same settings, and a length on the host with the same launch. Everything else
is Python's, and what Python has prepared as one launch over the tensors of the call is handed to C.
"""

from __future__ import annotations

import ctypes
import inspect
from array import array
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

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

P = ParamSpec("P")
R = TypeVar("R")
_is_compiling = torch.compiler.is_dynamo_compiling
#: Positions of the arguments of `lean_attn_with_kvcache`, `lean_mla_with_kvcache`, and operators.
_POSITIONS: tuple[dict[str, int], ...] = {}, {}, {}, {}, {}
_FUNCTIONS = 2
#: MAX_FUNCTIONS of fast.c.
_MOST_FUNCTIONS = 8
#: Arguments with another name than their field, and two names of one argument.
_NAMES = (
    {
        "k_new": ("k", "k"),
        "v_new": ("v", "v"),
        "block_table": ("block_table", "page_table"),
        "sinks": ("sinks", "learnable_sink"),
    },
    {"k_cache": ("kv_cache", "kv_cache")},
    *({}, {}, {}),
)
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
            *(WORKSPACES.epochs, cuda_driver.check_status),
        )
    except (TypeError, ValueError) as error:
        # The file of another version raises TypeError.
        return None, str(error)
    return _fast, None


_extension, why_not = _loaded()
#: True if C takes calls.
is_on = why_not is None


def known_first(
    latent: bool = False, ignored: tuple[str, ...] = ()
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]:
    """Let C take known calls of a function, before Python makes them.

    The function gets an additional first argument: `Call.learns`.

    Args:
        latent: True for `lean_mla_with_kvcache`.
        ignored: More keywords, without effect.
    """

    def decorate(function: Callable[Concatenate[int, P], R]) -> Callable[P, R]:
        take = _declare(function, latent, ignored) if is_on else None

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            learns = 0
            if not _is_compiling() and is_on:
                known = take(arguments, options)  # pyright: ignore[reportOptionalCall]
                if type(known) is not int:
                    return known
                learns = known
            return function(learns, *arguments, **options)

        signature = inspect.signature(function)
        first, *parameters = signature.parameters.values()
        call.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
        call.__annotations__ = {**function.__annotations__}
        del call.__annotations__[first.name]
        return call

    return decorate


def _declare(function: Callable[..., Any], latent: bool, ignored: tuple[str, ...]) -> Any:
    """Declare a function to C, and return C's."""
    parameters = [
        parameter
        for parameter in list(inspect.signature(function).parameters.values())[1:]
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    names = [parameter.name for parameter in parameters]
    defaults = [each.default for each in parameters if each.default is not each.empty]
    positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    _POSITIONS[latent].update(zip(names, range(len(names)), strict=True))
    positions = {**_POSITIONS[latent], **dict.fromkeys(ignored, -1)}
    _extension.declare(
        *(int(latent), len(names) - len(defaults), positional),
        *(positions["cache_seqlens"], positions.get("config", -1), positions["out"]),
        *(positions, tuple(defaults)),
    )
    return _extension.latent if latent else _extension.attention


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
        _extension.leave(call.learns)
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
    _extension.learn(
        call.learns,
        *(block.params, block.function, block.config, block.attributes, block.stream),
        *(_places(fields, call.learns), _places(relaunch.maps, call.learns)),
        *(Params.out.offset, Params.lse.offset, Params.context.offset, Params.epoch.offset),
        *(context, first, last),
        *(out_like, lse if has_own_lse else None, (lse, call.config)),
    )


def _places(fields: dict[str, str], learns: int) -> bytes:
    """Return the offset, argument and other name of that argument of each pointer."""
    function = learns % _MOST_FUNCTIONS
    positions, names, places = _POSITIONS[function], _NAMES[function], array("i")
    for field, tensor in fields.items():
        name, other = names.get(tensor, (tensor, tensor))
        places.extend((getattr(Params, field).offset, positions[name], positions[other]))
    return places.tobytes()


#: Functions of `torch` in fast_operators.h, in order, by library.
_TORCH = {
    "libtorch_cpu.so": (
        *("aoti_torch_library_init_impl", "aoti_torch_library_impl", "aoti_torch_call_dispatcher"),
        *("aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes"),
        *("aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_device_type"),
        *("aoti_torch_get_device_index", "aoti_torch_empty_strided"),
        "aoti_torch_delete_tensor_object",
    ),
    "libstdc++.so.6": ("_ZdlPv",),
    "libc10.so": ("_ZN3c106detail14torchCheckFailEPKcS2_jS2_",),
}
#: Letters of fast_operators.h by types of a schema. C knows only None for others.
_LETTERS = {
    "Tensor": "T",
    "Optional[Tensor]": "t",
    "int": "I",
    "Optional[int]": "i",
    "float": "F",
    "Optional[float]": "f",
    "bool": "B",
}


def use_operators(
    key: str, operators: Sequence[tuple[str, str, Any]], last_error: Callable[[], str]
) -> str | None:
    """Let C make the calls of operators on a device; return why not, or None.

    Args:
        key: Dispatch key of the device.
        operators: Name of each, of its operator in Python for what C does not know, and schema.
        last_error: Function that returns the words of the last error of one of those.
    """
    if _extension is None:
        return why_not
    folder = Path(torch.__file__).parent / "lib"
    addresses = array("Q")
    described = []
    try:
        for library, names in _TORCH.items():
            path = folder / library
            loaded = ctypes.CDLL(str(path) if path.exists() else library)
            functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names]
            addresses.extend(function.value or 0 for function in functions)
        for number, (name, in_python, schema) in enumerate(operators):
            letters = "".join(_LETTERS.get(str(each.type), "x") for each in schema.arguments)
            positions = _POSITIONS[_FUNCTIONS + number]
            positions.update((each.name, at) for at, each in enumerate(schema.arguments))
            base, _, overload = in_python.partition(".")
            described.append((name, f"leanbench::{base}", overload, letters, positions["length"]))
        _extension.use_operators(key, addresses.tobytes(), last_error, tuple(described))
    except (OSError, AttributeError, ValueError) as error:
        return f"torch {torch.__version__} has another C interface: {error}"
    return None


def operator_learns() -> int:
    """Return `Call.learns` of the call that an operator of Python is about to make."""
    return _extension.operator_learns()


def clear() -> None:
    """Forget all launches."""
    if _extension is not None:
        _extension.clear()
