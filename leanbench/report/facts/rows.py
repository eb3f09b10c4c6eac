"""Every row, with the columns that a reader needs first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from leanbench.report.document import Section, table
from leanbench.report.frame import SUBJECT, has_values

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results

#: Columns: heading, and how a number is written; those without any value are left out.
ROWS = {
    "run": ("run", ""),
    "gpu": ("GPU", ""),
    "source": ("source", ""),
    "problem": ("problem", ""),
    "cache": ("L2", ""),
    "kernel": ("kernel", ""),
    "status": ("status", ""),
    "latency_us": ("latency µs:", ".4g"),
    "bandwidth_tb_s": ("TB/s:", ".2f"),
    "read_floor_share": ("of the floor:", ".1%"),
    "lean_speedup": (f"speedup of {SUBJECT}:", ".2f"),
    "energy_mj": ("energy mJ:", ".4g"),
    "config": ("config", ""),
}
#: Left out where all rows have the same.
LEFT_OUT_WHEN_CONSTANT = ("run", "gpu", "source", "cache")


def rows_section(results: Results) -> Section:
    """A table that a page replaces by one of all columns."""
    frame = results.frame
    shown = [name for name in ROWS if has_values(frame, name)]
    shown = [
        name for name in shown if name not in LEFT_OUT_WHEN_CONSTANT or len({*frame[name]}) > 1
    ]
    rows = [[_cell(row[name], ROWS[name][1]) for name in shown] for row in frame.to_dict("records")]
    every = replace(table([ROWS[name][0] for name in shown], rows), layout="every row")
    return Section("rows", f"Every row ({len(frame)})", (every,), "closed")


def _cell(value: Any, form: str) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return format(value, form) if form else str(value)
