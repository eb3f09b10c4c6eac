"""Quantities: what a row of `results.jsonl` can hold, each declared once, as a field of
`leanbench.records.row.Row`.

The tables of a report, the CSV header, the JSON schema and docs/quantities.md take heading, unit,
format and meaning from that declaration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field
from pydantic_core import PydanticUndefined

#: `noisy`: the figures are there, but the stopping rule was not met or something else used the GPU.
#: `suspect`: the figures contradict a physical limit, or the launches did something that makes them
#: meaningless. docs/measuring.md explains both.
Status = Literal[
    "ok", "unsupported", "incorrect", "out_of_memory", "timeout", "crashed", "noisy", "suspect"
]
EVERY_STATUS: tuple[Status, ...] = get_args(Status)
#: The kernel ran and its output was compared with the reference: such a row may carry figures.
RAN: tuple[Status, ...] = ("ok", "noisy", "suspect", "incorrect")
#: The latency counts where kernels are compared: a rival that was timed with noise is a rival.
TIMED: tuple[Status, ...] = ("ok", "noisy")

#: In the order of tables.
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

#: How a value is written: `figure` with four significant digits, `fixed` with two decimals and
#: `fixed3` with three, `share` as a percentage (1.0 is 100%), `change` as one with its sign and
#: `bytes` in MB.
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

#: Where a column is shown: on `paper` and in everything wider, in `markdown` and on the page, on
#: the `page`, or in no table but in the `data` (CSV and Parquet, which have every column).
Shown = Literal["paper", "markdown", "page", "data"]
WIDER: tuple[Shown, ...] = get_args(Shown)

#: Units as they end a name, and as people read them.
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
#: Units of the kinds whose values are not written in the unit in which they are held.
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
    #: What a table calls it.
    heading: str
    group: Group
    kind: Kind
    #: One line for whoever hovers over the heading; empty where the heading says it.
    meaning: str = ""
    #: Of the value as it is held, see `UNITS`; other words stand as they are.
    unit: str = ""
    shown: Shown = "page"
    #: The statuses whose rows may carry it.
    statuses: tuple[Status, ...] = RAN
    #: `leanbench compare` shows it as a ratio of new over base.
    compared: bool = False
    #: The quantity whose sentences show where a reader points at this one.
    notes: str = ""

    @property
    def unit_text(self) -> str:
        """The unit of the value as tables write it: ``µs``, ``%``, ``MB``."""
        return _WRITTEN_IN.get(self.kind) or UNITS.get(self.unit, self.unit)

    @property
    def is_number(self) -> bool:
        """Whether a table aligns it as a number."""
        return self.kind in _FORMATS

    @property
    def head(self) -> str:
        """Heading and unit in one line: ``latency µs``. What `write` ends with is left out."""
        unit = "" if self.unit_text in ("%", "×") else self.unit_text
        return f"{self.heading} {unit}".rstrip()

    def write(self, value: Any) -> str:
        """A value as text, without its unit but for ``%``."""
        if not self.is_number:
            return str(value)
        if self.kind == "bytes":
            value /= 1e6
        if self.kind in ("bytes", "figure") and abs(value) >= 10_000:
            # An exponent says nothing in a table.
            return f"{value:.0f}"
        return format(value, _FORMATS[self.kind])

    @property
    def stem(self) -> str:
        """The name without its unit: ``energy`` of ``energy_mj``."""
        return self.name.removesuffix(f"_{self.unit}") if self.unit else self.name

    def is_in(self, place: Shown) -> bool:
        """Whether tables of `place` have a column for it."""
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
    """A field of `Row`, declared with all that is said of it anywhere; see `Quantity`.

    Args:
        default: of a row that does not carry it; ``...`` where every row must.
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
    """The quantities that `row` declares, by group and in each group as declared."""
    declared = []
    for name, field in row.model_fields.items():
        about: Any = field.json_schema_extra
        if isinstance(about, dict):
            fields = {**about, "statuses": tuple(about["statuses"])}
            declared.append(Quantity(name=name, meaning=field.description or "", **fields))
    return tuple(sorted(declared, key=lambda quantity: GROUPS.index(quantity.group)))
