"""Quantities of a row of `results.jsonl`, declared once as fields of `leanbench.records.row.Row`.

Tables of a report, the CSV header, the JSON schema and docs/quantities.md take heading, unit,
format and meaning from the declaration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field
from pydantic_core import PydanticUndefined

#: `noisy`: the stopping rule was not met, or another process used the GPU. `suspect`: the figures
#: contradict a physical limit, or the launches made them meaningless. See docs/measuring.md.
Status = Literal[
    "ok", "unsupported", "incorrect", "out_of_memory", "timeout", "crashed", "noisy", "suspect"
]
EVERY_STATUS: tuple[Status, ...] = get_args(Status)
#: The kernel ran and its output was compared with the reference: the row can have figures.
RAN: tuple[Status, ...] = ("ok", "noisy", "suspect", "incorrect")
#: The latency counts in comparisons of kernels.
TIMED: tuple[Status, ...] = ("ok", "noisy")

#: Groups in the order of tables.
Group = Literal[
    "repeat",
    "problem",
    "row",
    "latency",
    "whole model",
    "energy",
    "sustained",
    "samples",
    "memory",
    "occupancy",
    "correctness",
    "GPU state",
    "settings",
    "origin",
]
GROUPS: tuple[Group, ...] = get_args(Group)

#: Format of a value: `figure` with four significant digits, `fixed` with two decimals and `fixed3`
#: with three, `share` as a percentage (1.0 is 100%), `change` with a sign and `bytes` in MB.
Kind = Literal[
    "text",
    "outcome",
    "sentence",
    "command",
    "count",
    "tokens",
    "figure",
    "fixed",
    "fixed3",
    "share",
    "change",
    "bytes",
    "exponent",
]

#: Narrowest table with a column: `paper`, `markdown` or `page`; `data` (CSV and Parquet) has all.
Shown = Literal["paper", "markdown", "page", "data"]
WIDER: tuple[Shown, ...] = get_args(Shown)

#: Display units by suffix of a name.
UNITS = {
    "us": "µs",
    "s": "s",
    "tb_s": "TB/s",
    "mj": "mJ",
    "mj_us": "mJ µs",
    "w": "W",
    "mhz": "MHz",
    "c": "°C",
    "bytes": "bytes",
    "j": "J",
    "per_s": "per s",
    "x": "×",
}
#: Display units of kinds that convert their values.
_WRITTEN_IN: dict[Kind, str] = {"bytes": "MB", "share": "%", "change": "%"}
_FORMATS: dict[Kind, str] = {
    "count": "d",
    "tokens": "d",
    "figure": ".4g",
    "fixed": ".2f",
    "fixed3": ".3f",
    "share": ".1%",
    "change": "+.1%",
    "bytes": ".4g",
    "exponent": ".1e",
}


@dataclass(frozen=True)
class Quantity:
    """One quantity: a field of a row, or a column that a report computes from rows."""

    name: str
    #: Heading of a column.
    heading: str
    group: Group
    kind: Kind
    #: Tooltip text; empty if the heading is enough.
    meaning: str = ""
    #: Unit of the stored value, see `UNITS`; other words are displayed as they are.
    unit: str = ""
    shown: Shown = "page"
    #: Statuses of rows that can have it.
    statuses: tuple[Status, ...] = RAN
    #: `leanbench compare` shows it as a ratio of new over base.
    compared: bool = False
    #: Quantity with sentences for the tooltip of this one's cells.
    notes: str = ""

    @property
    def unit_text(self) -> str:
        """The unit of the value as tables write it: ``µs``, ``%``, ``MB``."""
        return _WRITTEN_IN.get(self.kind) or UNITS.get(self.unit, self.unit)

    @property
    def is_number(self) -> bool:
        """True if tables align it as a number."""
        return self.kind in _FORMATS

    @property
    def head(self) -> str:
        """Heading and unit in one line: ``latency µs``. Units that `write` appends are omitted."""
        unit = "" if self.unit_text in ("%", "×") else self.unit_text
        return f"{self.heading} {unit}".rstrip()

    def write(self, value: Any) -> str:
        """Format a value without its unit, except ``%``."""
        if not self.is_number:
            return str(value)
        if self.kind == "bytes":
            value /= 1e6
        if self.kind in ("bytes", "figure") and abs(value) >= 10_000:
            return f"{value:.0f}"  # no exponents in tables
        return format(value, _FORMATS[self.kind])

    @property
    def stem(self) -> str:
        """The name without its unit: ``energy`` of ``energy_mj``."""
        return self.name.removesuffix(f"_{self.unit}") if self.unit else self.name

    def is_in(self, place: Shown) -> bool:
        """Return True if tables of `place` have a column for it."""
        return WIDER.index(self.shown) <= WIDER.index(place)


def quantity(
    heading: str,
    unit: str = "",
    meaning: str = "",
    *,
    group: Group,
    kind: Kind,
    shown: Shown = "page",
    statuses: tuple[Status, ...] = RAN,
    compared: bool = False,
    notes: str = "",
    default: Any = None,
) -> Any:
    """Declare a field of `Row`; see `Quantity`.

    Args:
        default: Value of a row without it; ``...`` if every row must have it.
    """
    about = {
        "heading": heading,
        "unit": unit,
        "group": group,
        "kind": kind,
        "shown": shown,
        "statuses": list(statuses),
        "compared": compared,
        "notes": notes,
    }
    return Field(
        default=PydanticUndefined if default is ... else default,
        description=meaning or None,
        json_schema_extra={name: value for name, value in about.items() if value},
    )


def quantities(row: type[BaseModel]) -> tuple[Quantity, ...]:
    """Return the quantities that `row` declares, by group, then in field order."""
    declared = []
    for name, field in row.model_fields.items():
        about: Any = field.json_schema_extra
        if isinstance(about, dict):
            fields = {**about, "statuses": tuple(about["statuses"])}
            declared.append(Quantity(name=name, meaning=field.description or "", **fields))
    return tuple(sorted(declared, key=lambda quantity: GROUPS.index(quantity.group)))
