"""The operators under traced calls: `torch.ops.leanbench.lean_attn_with_kvcache`, of which plain
calls take the default overload and others that named `extras`, and `lean_attn_with_kvcache_append`,
which changes the caches.

Graphs that torch traces hold a call as one node: shapes are checked while they are traced, settings
are chosen and the kernel is launched when they run. They are registered without
`torch.library.custom_op`, whose checks take 80 us of host time a call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from leanbench.calls.call import Call, check_layouts
from leanbench.calls.extra_checks import check_extras
from leanbench.calls.prepared import attend
from leanbench.calls.refusals import refuse_kinds
from leanbench.core.config import TAG, Switch, Words, limits, read_config
from leanbench.core.extras import Extras
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig

#: Fields of Extras that only a call that appends can have.
_OF_APPEND = (
    *("k_new", "v_new", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"),
)
_TYPES = {
    "max_seqlen_q": "SymInt? {}=None",
    "window_left": "SymInt {}=-1",
    "window_right": "SymInt {}=-1",
    "attention_chunk": "SymInt {}=0",
    "softcap": "float {}=0.0",
    "rotary_interleaved": "bool {}=False",
}


def _schema(name: str, caches: tuple[str, str], without: tuple[str, ...] = ()) -> str:
    """Arguments as the fields of leanbench.calls.call.Call, `config` and `implementation` as
    `taken_apart` makes them, then those of Extras; output and LSE.
    """
    k_cache, v_cache = caches
    fields = [
        _TYPES.get(field, "Tensor? {}=None").format(field)
        for field in Extras._fields
        if field not in without
    ]
    extras = ", *, " + ", ".join(fields) if fields else ""
    return (
        f"{name}(Tensor q, {k_cache} k_cache, {v_cache} v_cache, Tensor? cache_seqlens,"
        " SymInt? length, Tensor? block_table, float? softmax_scale, bool causal,"
        f" bool batch_invariant, SymInt[]? config, str? implementation{extras})"
        " -> (Tensor, Tensor)"
    )


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    batch_invariant: bool,
    config: list[int] | None,
    implementation: str | None,
    **extras: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = None
    if config is not None and implementation is not None:
        given = _put_together(tuple(config), implementation)
    call = Call(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        length,
        block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        batch_invariant=batch_invariant,
        config=given,
        extras=_extras_of(extras),
    )
    out, lse = attend(call, with_lse=True)
    assert lse is not None
    return out, lse


def _shapes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    length: int | None,
    block_table: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    *settings: object,
    **extras: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A length that is not checked here: it may be a symbol.
    call = Call(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        length,
        block_table,
        causal=causal,
        extras=_extras_of(extras),
    )
    refuse_kinds(call)
    call.check()
    check_extras(call)
    out = q.new_empty(call.out_shape, dtype=call.out_dtype)
    return out, q.new_empty(call.lse_shape, dtype=torch.float32)


def _extras_of(given: dict[str, Any]) -> Extras | None:
    return Extras(**given) if given else None


_LIBRARY = torch.library.Library("leanbench", "DEF")
for _name, _caches, _without in (
    # A graph that torch.compile made names every argument in every call: the fewer the better.
    ("lean_attn_with_kvcache", ("Tensor", "Tensor"), Extras._fields),
    ("lean_attn_with_kvcache.extras", ("Tensor", "Tensor"), _OF_APPEND),
    ("lean_attn_with_kvcache_append", ("Tensor(a!)", "Tensor(b!)"), ()),
):
    _LIBRARY.define(_schema(_name, _caches, _without), tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"leanbench::{_name}", _shapes, lib=_LIBRARY)
operator = torch.ops.leanbench.lean_attn_with_kvcache.default
extras_operator = torch.ops.leanbench.lean_attn_with_kvcache.extras
append_operator = torch.ops.leanbench.lean_attn_with_kvcache_append.default


def attend_traced(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output, and the LSE if asked for, through an operator; errors as in leanbench.attention."""
    check_layouts(call)
    extras = {} if call.extras is None else _departing(call.extras)
    if call.out is not None:
        # Before the caches are changed; what these are is checked by the operator.
        call.check_out(call.out)
    if not extras:
        taken = operator
    else:
        changes_caches = any(name in extras for name in _OF_APPEND)
        taken = append_operator if changes_caches else extras_operator
    result, lse = taken(
        call.q,
        call.k_cache,
        call.v_cache,
        call.cache_seqlens,
        call.length,
        call.block_table,
        call.softmax_scale,
        call.causal,
        call.batch_invariant,
        *taken_apart(call.config),
        **extras,
    )
    if call.out is not None:
        result = call.out.copy_(result)
    return result, lse if with_lse else None


def _departing(extras: Extras) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    numbers = {
        name: value
        for name, value in zip(extras._fields, extras, strict=True)
        if not isinstance(value, torch.Tensor) and value != Extras._field_defaults[name]
    }
    return {**extras.tensors, **numbers}


#: By implementation: what its settings take, by name.
_LIMITS = {str(config_type.implementation): limits(config_type) for config_type in LEAN_CONFIGS}
#: Places of the words that settings may be.
_PLACES = {
    word: place
    for named in _LIMITS.values()
    for limit in named.values()
    if isinstance(limit, Words)
    for place, word in enumerate(limit.words)
}


def taken_apart(config: LeanConfig | None) -> tuple[list[int] | None, str | None]:
    """The config as an operator can take it: its values as numbers in the order of its fields, and
    its implementation; (None, None) for the default.
    """
    # All of it in one string would not do: where torch.compile makes symbols of sizes, it makes
    # them of these numbers.
    if config is None or config.implementation is None:
        return None, None
    values = [getattr(config, name) for name in _LIMITS[config.implementation]]
    numbers = [_PLACES[value] if isinstance(value, str) else int(value) for value in values]
    return numbers, config.implementation


@lru_cache(maxsize=1024)
def _put_together(numbers: tuple[int, ...], implementation: str) -> LeanConfig:
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
