"""Axis values that change nothing: a kind of attention that others of the sweep's axes rule out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbench.core.axes import AXES
from leanbench.core.errors import UserError
from leanbench.core.kinds import SAME

#: Values of the axes, by name.
Table = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class _Effect:
    """Where an axis' values beyond its default have an effect."""

    axis: str
    is_there: Callable[[Table], bool]
    #: Why there is none, and the fix.
    why: str


def _sees_later_tokens(table: Table) -> bool:
    several = max(table["q_len"]) > 1 or any(table["q_lens"])
    return several and False in table["causal"]


_EFFECTS = (
    _Effect(
        "window_right",
        _sees_later_tokens,
        "a query token that is the last or has a causal mask sees none after it: add causal"
        " noncausal and q_len 4, or leave window_right out",
    ),
    _Effect(
        "rotary_interleaved",
        lambda table: any(table["rotary_dim"]),
        "nothing is rotated: add rotary_dim and append, or leave rotary_interleaved out",
    ),
    _Effect(
        "q_len",
        lambda table: None in table["q_lens"],
        "q_lens say the new tokens of each sequence: leave q_len out, or q_lens",
    ),
    _Effect(
        "scaled",
        lambda table: any(value != SAME for value in table["kv_dtype"]),
        "only fp8 numbers have scales: add kv_dtype e4m3, or leave scaled out",
    ),
)


def refuse_without_effect(tables: Sequence[Table], given: Collection[str] = tuple(AXES)) -> None:
    """Refuses values that have an effect in no table of a sweep, of the axes that were given.

    Raises:
        UserError: there is one.
    """
    for effect in _EFFECTS:
        if effect.axis not in given:
            continue
        axis = AXES[effect.axis]
        others = [value for table in tables for value in table[axis.name] if value != axis.default]
        if others and not any(map(effect.is_there, tables)):
            raise UserError(f"{axis.name} {axis.write(others[0])} says nothing, {effect.why}")
