"""The table as CSV: every row, every column, full precision; not measured is an empty field."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


def csv_text(frame: DataFrame) -> str:
    """`leanbench.report.frame.results_frame` as comma-separated text with a header line."""
    return frame.to_csv(index=False, lineterminator="\n")
