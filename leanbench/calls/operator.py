"""The operator under traced calls: `torch.ops.leanbench.lean_attn_with_kvcache`.

Graphs that torch traces hold it as one node: shapes are checked while they are traced, settings are
chosen and the kernel is launched when they run. It is registered without `torch.library.custom_op`,
whose checks take 80 us of host time a call.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from leanbench.calls.call import Call
from leanbench.calls.prepared import attend
from leanbench.core.config import TAG, Switch, Words, limits, read_config
from leanbench.kernels.lean.configs import LEAN_CONFIGS, LeanConfig

#: Arguments as the fields of leanbench.calls.call.Call, `config` and `implementation` as
#: `taken_apart` makes them; output and LSE.
_SCHEMA = (
    "lean_attn_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens,"
    " SymInt? length, Tensor? block_table, float? softmax_scale, bool causal, bool batch_invariant,"
    " SymInt[]? config, str? implementation) -> (Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("leanbench", "DEF")
_LIBRARY.define(_SCHEMA, tags=torch.Tag.pt2_compliant_tag)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    Call(q, k_cache, v_cache, cache_seqlens, block_table=block_table, causal=causal).check()
    batch, q_len, q_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, q_heads, q_len), dtype=torch.float32)


_LIBRARY.impl("lean_attn_with_kvcache", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("leanbench::lean_attn_with_kvcache", _shapes, lib=_LIBRARY)
operator = torch.ops.leanbench.lean_attn_with_kvcache.default


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
