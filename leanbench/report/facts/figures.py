"""The sections of pictures: which the rows fill, and the words around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.report.charts import charts_of, drawn_rows, note
from leanbench.report.document import Block, Figure, Figures, Section, sentences
from leanbench.report.maps import maps_of

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def maps_section(results: Results) -> Section:
    """Heat maps, where the rows fill them."""
    maps = [
        Figure(drawn.key, drawn.title, drawn.note, f"{drawn.title} over batch, heads and context")
        for drawn in maps_of(results.frame, results.margin)
    ]
    blocks = (Figures(tuple(maps), "maps"),) if maps else ()
    return Section("maps", "Maps over batch, heads and context", blocks)


def charts_section(results: Results) -> Section:
    """A chart for each quantity that was measured."""
    drawn = drawn_rows(results.frame)
    charts = [
        Figure(chart.key, chart.title, note(chart, drawn), f"{chart.title}: {chart.y_title}")
        for chart in charts_of(drawn, results.axes)
    ]
    nothing = "No row has a latency, so there is nothing to draw."
    block: Block = sentences(nothing, layout="empty")
    return Section("charts", "Charts", (Figures(tuple(charts), "charts") if charts else block,))
