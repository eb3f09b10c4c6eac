"""Operators of traced calls.

`torch.ops.leanbench.lean_attn_with_kvcache` has an overload `extras`;
`lean_attn_with_kvcache_append` changes the caches. Graphs of torch hold a call as one node. Shapes
are checked while tracing; settings are chosen and kernels launched when the graph runs.
`torch.library.custom_op` is not used: its checks take 80 us of host time per call.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch

from leanbench.attention import fast
from leanbench.attention.call import Call
from leanbench.attention.checks import check_call, check_layouts, check_out
from leanbench.attention.prepared import attend
from leanbench.core.config import TAG, Switch, Words, limits, read_config
from leanbench.core.extras import Extras
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig

#: Fields of Extras that only calls with an append have.
_APPEND = (
    *("k_new", "v_new", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"),
)
#: Fields of Call that are positional arguments of an operator, in order; `flatten_config` follows.
_FIELDS = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "length", "block_table"),
    *("softmax_scale", "causal", "batch_invariant"),
)
#: Types of a schema by annotations of Call and Extras.
_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "int | None": "SymInt?",
    "int": "SymInt",
    "float | None": "float?",
    "float": "float",
    "bool": "bool",
}


def _argument(shape: Any, name: str) -> str:
    """Return a field of Call or Extras in a schema."""
    return f"{_TYPES[shape.__annotations__[name].__forward_arg__]} {name}"


def _schema(name: str, without: tuple[str, ...], changes_caches: bool) -> str:
    fields = ", ".join(_argument(Call, field) for field in _FIELDS)
    if changes_caches:
        fields = fields.replace("Tensor k_", "Tensor(a!) k_").replace("Tensor v_", "Tensor(b!) v_")
    extras = [
        f"{_argument(Extras, field)}={Extras._field_defaults[field]}"
        for field in Extras._fields
        if field not in without
    ]
    keywords = ", *, " + ", ".join(extras) if extras else ""
    settings = "SymInt[]? config, str? implementation"
    return f"{name}({fields}, {settings}{keywords}) -> (Tensor, Tensor)"


def _call(arguments: tuple[Any, ...], extras: dict[str, Any]) -> Call:
    fields: dict[str, Any] = dict(zip(_FIELDS, arguments, strict=False))
    return Call(**fields, extras=Extras(**extras) if extras else None)


def _attend(*arguments: Any, learns: int = 0, **extras: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(arguments, extras)._replace(learns=learns)
    config, implementation = arguments[len(_FIELDS) :]
    if config is not None and implementation is not None:
        call = call._replace(config=_unflatten_config(tuple(config), implementation))
    out, lse = attend(call, with_lse=True)
    assert lse is not None
    return out, lse


def _schema_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.leanbench, packet), overload or "default")._schema


class _Errors(threading.local):
    #: Words of the last error that torch's C interface hides.
    words = ""


_errors = _Errors()


def _attend_for_c(*arguments: Any, **extras: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a call that C does not know."""
    try:
        return _attend(*arguments, learns=fast.operator_learns(), **extras)
    except BaseException as error:
        _errors.words = str(error) or type(error).__name__
        raise


def _shapes(*arguments: Any, **extras: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Without `check_length`: lengths can be symbols.
    call = _call(arguments, extras)._replace(softmax_scale=None)
    check_call(call)
    out = call.q.new_empty(call.out_shape, dtype=call.out_dtype)
    return out, call.q.new_empty(call.lse_shape, dtype=torch.float32)


_LIBRARY = torch.library.Library("leanbench", "DEF")
#: Operators, and fields of Extras that they lack.
_OPERATORS = {
    # Graphs of torch.compile pass every argument of a schema: fewer are faster.
    "lean_attn_with_kvcache": Extras._fields,
    "lean_attn_with_kvcache.extras": _APPEND,
    "lean_attn_with_kvcache_append": (),
}
_IN_PYTHON = "_in_python"
for _name, _without in _OPERATORS.items():
    _declared = _schema(_name, _without, changes_caches=not _without)
    _LIBRARY.define(_declared, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"leanbench::{_name}", _shapes, lib=_LIBRARY)
    _LIBRARY.define(_declared.replace("(", f"{_IN_PYTHON}(", 1), tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name + _IN_PYTHON, _attend_for_c, "CompositeExplicitAutograd")


def use_c(key: str) -> str | None:
    """Let C make the calls that it knows on devices of a dispatch key; return why not, or None.

    Operators of the same schema make the others in Python. torch's interface for C keeps of their
    errors only the words.
    """
    operators = [(name, name + _IN_PYTHON, _schema_of(name)) for name in _OPERATORS]
    return fast.use_operators(key, operators, lambda: _errors.words)


use_c("CUDA")
operator = torch.ops.leanbench.lean_attn_with_kvcache.default
extras_operator = torch.ops.leanbench.lean_attn_with_kvcache.extras
append_operator = torch.ops.leanbench.lean_attn_with_kvcache_append.default


def attend_traced(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, and the LSE if requested, through an operator."""
    check_layouts(call)
    extras = {} if call.extras is None else _non_defaults(call.extras)
    if call.out is not None:
        # Before the caches change; the operator checks everything else.
        check_out(call, call.out)
    chosen = operator
    if extras:
        changes_caches = any(name in extras for name in _APPEND)
        chosen = append_operator if changes_caches else extras_operator
    fields = [getattr(call, name) for name in _FIELDS]
    result, lse = chosen(*fields, *flatten_config(call.config), **extras)
    if call.out is not None:
        result = call.out.copy_(result)
    return result, lse if with_lse else None


def _non_defaults(extras: Extras) -> dict[str, Any]:
    numbers = {
        name: value
        for name, value in zip(extras._fields, extras, strict=True)
        if not isinstance(value, torch.Tensor) and value != Extras._field_defaults[name]
    }
    return {**extras.tensors, **numbers}


#: Limits of settings, by implementation and name.
_LIMITS = {str(config_type.implementation): limits(config_type) for config_type in LEAN_CONFIGS}
#: Numbers of the words of settings.
_NUMBERS = {
    word: number
    for named in _LIMITS.values()
    for limit in named.values()
    if isinstance(limit, Words)
    for number, word in enumerate(limit.words)
}


def flatten_config(config: LeanConfig | None) -> tuple[list[int] | None, str | None]:
    """Return a config as numbers in the order of its fields, and its implementation.

    The default is (None, None).
    """
    # Not one string: torch.compile turns these numbers into symbols, like sizes.
    if config is None or config.implementation is None:
        return None, None
    values = [getattr(config, name) for name in _LIMITS[config.implementation]]
    numbers = [_NUMBERS[value] if isinstance(value, str) else int(value) for value in values]
    return numbers, config.implementation


@lru_cache(maxsize=1024)
def _unflatten_config(numbers: tuple[int, ...], implementation: str) -> LeanConfig:
    values: dict[str, int | bool | str] = {}
    for (name, limit), number in zip(_LIMITS[implementation].items(), numbers, strict=True):
        match limit:
            case Words(words):
                values[name] = words[number]
            case Switch():
                values[name] = bool(number)
            case _:
                values[name] = number
    return read_config(LEAN_CONFIGS, {TAG: implementation, **values})
