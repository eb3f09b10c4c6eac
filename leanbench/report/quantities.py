"""The quantities of rows as documents: docs/quantities.md, and a JSON schema of a row."""

from __future__ import annotations

import json

from leanbench.core.quantities import EVERY_STATUS, RAN, Quantity
from leanbench.records.row import Row
from leanbench.report.columns import ROW_COLUMNS

_HEAD = f"""\
# Quantities

What a row of `results.jsonl` holds and what a report computes from rows, as
`leanbench list quantities --format markdown` prints it. Each is declared once, in
`leanbench/records/` or in `DERIVED` of `leanbench/report/frame.py`. Names are those of
`results.jsonl`, CSV and Parquet; what was not measured is left out there, or an empty field. A row
that ran is {", ".join(RAN[:-1])} or {RAN[-1]}; the others carry no figures.
[measuring.md](measuring.md) says how figures are obtained.
"""


def markdown_text() -> str:
    """docs/quantities.md: a table for each group."""
    lines = [_HEAD]
    for group in dict.fromkeys(quantity.group for quantity in ROW_COLUMNS):
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        lines += ["| name | in tables | unit | rows | what it is |", "|---|---|---|---|---|"]
        lines += [_line(quantity) for quantity in ROW_COLUMNS if quantity.group == group]
        lines.append("")
    return "\n".join(lines)


def _line(quantity: Quantity) -> str:
    rows = {EVERY_STATUS: "every", RAN: "that ran"}.get(quantity.statuses, "not ok")
    cells = [f"`{quantity.name}`", quantity.heading, held_unit(quantity), rows, quantity.meaning]
    # A bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def schema_text() -> str:
    """The JSON schema of a line of `results.jsonl`."""
    return json.dumps(Row.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def held_unit(quantity: Quantity) -> str:
    """The unit of the value in files: bytes where tables write MB, 1 is 100% where they write %."""
    if quantity.kind in ("share", "change"):
        return "1 is 100%"
    return quantity.unit if quantity.kind == "bytes" else quantity.unit_text
