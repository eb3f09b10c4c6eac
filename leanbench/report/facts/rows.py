"""Every row, with the columns that a reader needs first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from leanbench.core.quantities import Quantity
from leanbench.report.columns import HIDDEN_WHEN_CONSTANT, NARROW
from leanbench.report.document import Section, table
from leanbench.report.frame import THE_BASELINE, baseline_in_words, has_values

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def rows_section(results: Results) -> Section:
    """A table that a page replaces by one of all columns."""
    frame = results.frame
    shown = [
        column
        for column in NARROW
        if has_values(frame, column.name)
        and (column.name not in HIDDEN_WHEN_CONSTANT or len({*frame[column.name]}) > 1)
    ]
    baseline = baseline_in_words(frame)
    headings = [
        column.head.replace(THE_BASELINE, baseline) + ":" * column.is_number for column in shown
    ]
    rows = [
        [_cell(row[column.name], column) for column in shown] for row in frame.to_dict("records")
    ]
    every = replace(table(headings, rows), layout="every row")
    return Section("rows", f"Every row ({len(frame)})", (every,), "closed")


def _cell(value: Any, column: Quantity) -> str:
    import pandas as pd

    return "" if pd.isna(value) else column.write(value)
