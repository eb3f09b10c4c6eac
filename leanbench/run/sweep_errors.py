"""Errors of a sweep file, in one sentence with file, line and key, and axes without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leanbench.core.axes import AXES
from leanbench.core.errors import OptionWithoutEffect, nearest
from leanbench.core.kinds import SAME

#: Table of a key: None for the top, the number of a `[[grid]]`, or "draw".
Table = int | str | None
_LETTERS = 80
_TABLE = re.compile(r"\s*(\[\[\s*grid\s*\]\]|\[\s*draw\s*\])")

#: Fixes by the type of pydantic's error.
_FIXES = {
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "string_type": "write text in quotes",
    "list_type": "write tables [[grid]]",
    "model_type": "write a table [draw], or [[grid]]",
    "literal_error": "write 'cold' or 'warm'",
}


def in_toml(value: Any) -> str:
    """Return a value in TOML syntax, truncated if long."""
    match value:
        case bool():
            text = "true" if value else "false"
        # Python writes no integer of thousands of digits.
        case int() if value.bit_length() > 1024:
            text = hex(value)
        case date() | time():
            text = value.isoformat()
        case list():
            text = f"[{', '.join(map(in_toml, value))}]"
        case dict():
            text = f"{{{', '.join(f'{key} = {in_toml(item)}' for key, item in value.items())}}}"
        case _:
            text = repr(value)
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}..."


def sentence(path: Path, text: str, error: ValidationError, keys: Iterable[str]) -> str:
    """Describe pydantic's first error.

    Args:
        keys: Keys at the top of a file.
    """
    first = error.errors()[0]
    location = list(first["loc"])
    key = str(next((part for part in reversed(location) if isinstance(part, str)), ""))
    table = _table(location)
    where = f"{path}, line {_line(text, key, table)}"
    if first["type"] == "extra_forbidden":
        known = {None: keys, "draw": ("count", "seed", "fill", *AXES)}.get(table, AXES)
        return f"{where}: there is no key {key!r}, {nearest(key, known)}"
    if first["type"] == "missing":
        example = "count = 300" if key == "count" else f'{key} = "my-sweep"'
        return f"{where}: the key {key!r} is missing, add for example {example}"
    if first["type"] == "string_pattern_mismatch":
        return (
            f"{where}, key {key!r}: {in_toml(first['input'])} cannot name a folder: "
            "use up to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        )
    if first["type"] == "value_error":
        return f"{where}, key {key!r}: {first.get('ctx', {}).get('error')}"
    fix = _FIXES.get(first["type"], f"{first['msg'][0].lower()}{first['msg'][1:]}")
    return f"{where}, key {key!r}: {in_toml(first['input'])} is invalid: {fix}"


def _table(location: list[int | str]) -> Table:
    if location[0] == "draw":
        return "draw"
    if location[0] == "grid" and len(location) > 1:
        return location[1]
    return None


def _line(text: str, key: str, table: Table) -> int:
    """Return the line that sets `key` in the table, or the table's line."""
    current: Table = None
    grids, line_number = -1, 1
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TABLE.match(line):
            grids += "grid" in heading[1]
            current = grids if "grid" in heading[1] else "draw"
            line_number = number if current == table else line_number
        elif current == table and re.match(
            rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""", line
        ):
            return number
    return line_number


#: Values of the axes of a sweep, by name.
Values = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class _Effect:
    """Condition under which the values of an axis beyond its default have an effect."""

    axis: str
    has_effect: Callable[[Values], bool]
    #: Values of other axes that would give it one, and why it has none now.
    needs: str
    why: str


_EFFECTS = (
    _Effect(
        "window_right",
        lambda values: (
            (max(values["q_len"]) > 1 or any(values["q_lens"])) and False in values["causal"]
        ),
        "causal noncausal and q_len 4",
        "a query token that is the last or has a causal mask sees no token after it",
    ),
    _Effect(
        "rotary_interleaved",
        lambda values: any(values["rotary_dim"]),
        "rotary_dim and append",
        "nothing is rotated",
    ),
    _Effect(
        "q_len",
        lambda values: None in values["q_lens"],
        "q_lens none",
        "q_lens sets the new tokens of each sequence",
    ),
    _Effect(
        "scaled",
        lambda values: any(value != SAME for value in values["kv_dtype"]),
        "kv_dtype e4m3",
        "only fp8 numbers have scales",
    ),
)


def check_effects(tables: Sequence[Values], given: Collection[str] = tuple(AXES)) -> None:
    """Reject values of the axes in `given` that have no effect in any of a sweep's tables."""
    for effect in _EFFECTS:
        if effect.axis not in given or any(map(effect.has_effect, tables)):
            continue
        axis = AXES[effect.axis]
        for value in (value for table in tables for value in table[axis.name]):
            if value != axis.default:
                option = f"{axis.name} {axis.write(value)}"
                raise OptionWithoutEffect(option, effect.needs, effect.why)
