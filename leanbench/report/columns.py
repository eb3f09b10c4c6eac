"""Columns of a report, in the order of tables: the axes of a problem, where a row was taken, the
quantities of rows, and those that are computed from them (`leanbench.report.frame.DERIVED`).
"""

from __future__ import annotations

from leanbench.core.quantities import GROUPS, Quantity
from leanbench.records.row import QUANTITIES
from leanbench.report.frame import COMPARED, DERIVED

PROBLEM = (
    Quantity(
        "max_context",
        "context",
        "problem",
        "tokens",
        "cached tokens; of the longest sequence in a ragged batch",
        "tokens",
    ),
    Quantity("batch", "batch", "problem", "count"),
    Quantity("q_heads", "query heads", "problem", "count"),
    Quantity("kv_heads", "KV heads", "problem", "count"),
    Quantity("head_dim", "head_dim", "problem", "count"),
    Quantity("q_len", "q_len", "problem", "count", "new tokens per sequence"),
    Quantity("ragged", "batch lengths", "problem", "text"),
    Quantity("dtype", "dtype", "problem", "text"),
    Quantity(
        "kv_layout",
        "layout",
        "problem",
        "text",
        "of K and V: HND is heads, tokens, head_dim; NHD is tokens, heads, head_dim",
    ),
    Quantity(
        "page_size",
        "page size",
        "problem",
        "text",
        "tokens of a page of K and V; none: a sequence's tokens lie in a row",
    ),
)
ORIGIN = (Quantity("run", "run", "row", "text"), Quantity("gpu", "GPU", "row", "text"))
COMMAND = Quantity(
    "command",
    "repeat",
    "repeat",
    "command",
    "copies the command that measures this row again",
    shown="page",
)


def _in_order() -> tuple[Quantity, ...]:
    measured = list(QUANTITIES)
    for derived in DERIVED:
        names = [quantity.name for quantity in measured]
        measured.insert(names.index(derived.after) + 1, derived.quantity)
    columns = [COMMAND, *PROBLEM, *ORIGIN, *measured]
    return tuple(sorted(columns, key=lambda column: GROUPS.index(column.group)))


COLUMNS = _in_order()
#: Stated in the head of a report when the same in every row.
HIDDEN_WHEN_CONSTANT = {column.name for column in PROBLEM[1:]} | set(COMPARED)
