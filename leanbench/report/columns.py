"""Columns of a report, in the order of tables: the axes of a problem, where a row was taken, the
quantities of rows, and those that are computed from them (`leanbench.report.frame.DERIVED`).
"""

from __future__ import annotations

from leanbench.core.axes import LENGTHS
from leanbench.core.axis import Axis
from leanbench.core.problem import PROBLEM_AXES
from leanbench.core.quantities import GROUPS, Kind, Quantity
from leanbench.records.row import QUANTITIES
from leanbench.report.frame import COMPARED, DERIVED

#: The axis `context` with a number for each row; its own column is text where batches are ragged.
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


#: The quantities of rows, and those that are computed from them.
ROW_COLUMNS = _with_derived()
COLUMNS = tuple(
    sorted(
        [COMMAND, *PROBLEM, *ORIGIN, *ROW_COLUMNS], key=lambda column: GROUPS.index(column.group)
    )
)
#: Stated in the head of a report when the same in every row.
HIDDEN_WHEN_CONSTANT = {column.name for column in PROBLEM[1:]} | set(COMPARED)
#: Where a line has little room: one label in place of the axes.
NARROW = (
    Quantity("problem", "problem", "problem", "text"),
    *(column for column in COLUMNS if column.group != "problem" and column.is_in("markdown")),
)
