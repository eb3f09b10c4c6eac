"""Sections of rows: pictures, and the table of every row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.report.charts import charts_of, drawn_rows, maps_of, note
from leanbench.report.columns import HIDDEN_WHEN_CONSTANT, NARROW
from leanbench.report.document import Block, Figure, Figures, Section, sentences, table
from leanbench.report.frame import THE_BASELINE, baseline_in_words, has_values

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def maps_section(results: Results) -> Section:
    """Make the heat maps that the rows fill."""
    maps = [
        Figure(drawn.key, drawn.title, drawn.note, f"{drawn.title} over batch, heads and context")
        for drawn in maps_of(results.frame, results.margin)
    ]
    blocks = (Figures(tuple(maps), "maps"),) if maps else ()
    return Section("maps", "Maps over batch, heads and context", blocks)


def charts_section(results: Results) -> Section:
    """Make a chart for each quantity that was measured."""
    drawn = drawn_rows(results.pictured)
    charts = [
        Figure(chart.key, chart.title, note(chart, drawn), f"{chart.title}: {chart.y_title}")
        for chart in charts_of(drawn, results.axes)
    ]
    nothing = "No row has a latency, so there is nothing to draw."
    block: Block = sentences(nothing, layout="empty")
    return Section("charts", "Charts", (Figures(tuple(charts), "charts") if charts else block,))


def rows_section(results: Results) -> Section:
    """Make a table of all rows, which a page replaces by one of all columns."""
    import pandas as pd

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
        ["" if pd.isna(row[column.name]) else column.write(row[column.name]) for column in shown]
        for row in frame.to_dict("records")
    ]
    every = replace(table(headings, rows), layout="every row")
    return Section("rows", f"Every row ({len(frame)})", (every,), "closed")
