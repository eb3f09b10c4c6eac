"""Columns of a report in the order of tables, docs/quantities.md, and the JSON schema of a row."""

from __future__ import annotations

import json

from leanbench.core.axes import LENGTHS
from leanbench.core.axis import Axis
from leanbench.core.problem import PROBLEM_AXES
from leanbench.core.quantities import EVERY_STATUS, GROUPS, RAN, Kind, Quantity
from leanbench.records.row import QUANTITIES, Row
from leanbench.report.frame import COMPARED, DERIVED

#: The axis `context` as one number per row; its own column is text for ragged batches.
CONTEXT = Quantity(
    "max_context",
    "context",
    "problem",
    "tokens",
    "cached tokens; of the longest sequence in a ragged batch",
    "tokens",
    "paper",
)


def _of_axis(axis: Axis) -> Quantity:
    kinds: dict[type, Kind] = {int: "count", float: "figure"}
    kind = kinds[axis.values.json_type] if axis.is_number else "text"
    return Quantity(axis.name, axis.title, "problem", kind, axis.meaning, shown="paper")


PROBLEM = (
    CONTEXT,
    *(_of_axis(axis) for axis in PROBLEM_AXES if axis.name != "context"),
    # In words: see leanbench.report.series.add_series_columns.
    Quantity(LENGTHS.name, LENGTHS.title, "problem", "text", shown="paper"),
)
ORIGIN = (
    Quantity("run", "run", "row", "text", shown="paper"),
    Quantity("gpu", "GPU", "row", "text", shown="paper"),
)
COMMAND = Quantity(
    "command",
    "repeat",
    "repeat",
    "command",
    "copies the command that measures this row again",
    shown="page",
)


def _with_derived() -> tuple[Quantity, ...]:
    columns = list(QUANTITIES)
    for derived in DERIVED:
        names = [column.name for column in columns]
        columns.insert(names.index(derived.after) + 1, derived.quantity)
    return tuple(columns)


#: Quantities of rows, and those derived from them.
ROW_COLUMNS = _with_derived()
COLUMNS = tuple(
    sorted(
        [COMMAND, *PROBLEM, *ORIGIN, *ROW_COLUMNS], key=lambda column: GROUPS.index(column.group)
    )
)
#: Columns that the head of a report states if they are constant.
HIDDEN_WHEN_CONSTANT = {column.name for column in PROBLEM[1:]} | set(COMPARED)
#: Columns of narrow tables: one label replaces the axes.
NARROW = (
    Quantity("problem", "problem", "problem", "text"),
    *(column for column in COLUMNS if column.group != "problem" and column.is_in("markdown")),
)

_HEAD = f"""\
# Quantities

What a row of `results.jsonl` holds and what a report computes from rows, as
`leanbench list quantities --format markdown` prints it. Each is declared once, in
`leanbench/records/` or in `DERIVED` of `leanbench/report/frame.py`. Names are those of
`results.jsonl`, CSV and Parquet; what was not measured is left out there, or an empty field. A row
that ran is {", ".join(RAN[:-1])} or {RAN[-1]}; the others carry no figures.
[measuring.md](measuring.md) says how figures are obtained.
"""


def quantities_text() -> str:
    """Render docs/quantities.md: a table per group."""
    lines = [_HEAD]
    for group in dict.fromkeys(quantity.group for quantity in ROW_COLUMNS):
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        lines += ["| name | in tables | unit | rows | what it is |", "|---|---|---|---|---|"]
        lines += [_line(quantity) for quantity in ROW_COLUMNS if quantity.group == group]
        lines.append("")
    return "\n".join(lines)


def _line(quantity: Quantity) -> str:
    rows = {EVERY_STATUS: "every", RAN: "that ran"}.get(quantity.statuses, "not ok")
    cells = [f"`{quantity.name}`", quantity.heading, stored_unit(quantity), rows, quantity.meaning]
    # A bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def schema_text() -> str:
    """Render the JSON schema of a line of `results.jsonl`."""
    return json.dumps(Row.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def stored_unit(quantity: Quantity) -> str:
    """Return a value's unit in files: bytes where tables show MB, 1 for 100%."""
    if quantity.kind in ("share", "change"):
        return "1 is 100%"
    return quantity.unit if quantity.kind == "bytes" else quantity.unit_text
