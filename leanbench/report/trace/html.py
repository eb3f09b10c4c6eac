"""Timelines as one offline page: zoom in time, hover over a CTA, a table of figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanbench.model import known_error
from leanbench.report.html import raw, template
from leanbench.report.trace.picture import (
    TILE_COLORS,
    Mark,
    Panel,
    instrumentation_cost,
    merge_to,
    microseconds,
    parts_by_name,
    percent,
    source_words,
)

#: Maximum number of marks. More take a browser a noticeable time for each redraw.
MOST_MARKS = 200_000
#: Initial length of a merged mark, as a share of the whole time.
_FINEST = 1e-5
#: Kinds by their number on the page, in the order of drawing.
KINDS = ("cta", "tiles", "wait", "reduction")

#: Parts of a latency that a timeline tells apart.
_PARTS = ("launch", "read", "tail", "merge")


def html_text(panels: Sequence[Panel]) -> str:
    """Render the page."""
    return template("trace.html.j2").render(
        style=raw("report.css") + raw("trace.css"), script=raw("trace.js"), **page_context(panels)
    )


def page_context(panels: Sequence[Panel]) -> dict[str, Any]:
    """Build the template's values except style and script."""
    first = panels[0].timeline
    end_us = max(panel.timeline.duration_us for panel in panels)
    most = MOST_MARKS // len(panels)
    drawn: list[Sequence[Mark]] = [
        panel.marks if len(panel.marks) <= most else merge_to(panel.marks, _FINEST * end_us, most)
        for panel in panels
    ]
    return {
        "label": first.problem.label,
        "source": first.source,
        "source_words": source_words(first),
        "gpu": first.gpu,
        "model_error": known_error(first.gpu, [panel.timeline.kernel for panel in panels]),
        "colors": TILE_COLORS,
        "has_bands": any(panel.lanes > 1 for panel in panels),
        "rows": [_row(panel) for panel in panels],
        "notes": [
            note
            for panel, marks in zip(panels, drawn, strict=True)
            if (note := _note(panel, marks))
        ],
        "page": {
            "end_us": round(end_us, 4),
            "colors": TILE_COLORS,
            "panels": [_panel(panel, marks) for panel, marks in zip(panels, drawn, strict=True)],
        },
    }


def _note(panel: Panel, marks: Sequence[Mark]) -> str | None:
    if len(marks) == len(panel.marks):
        return None
    longest = max(mark.end_us - mark.start_us for mark in marks if mark.merged > 1)
    return (
        f"{panel.timeline.name}: {len(panel.marks):,} CTAs and spans are drawn as {len(marks):,},"
        f" neighbours that together last up to {microseconds(longest)} µs as one; the trace file"
        " for Perfetto has them all"
    )


def _panel(panel: Panel, marks: Sequence[Mark]) -> dict[str, Any]:
    """Build the script's data. A mark is ten numbers in `marks`."""
    launches = list(dict.fromkeys(mark.launch for mark in marks))
    numbers: list[float] = []
    for mark in marks:
        tile = -1 if mark.output_tile is None else mark.output_tile
        numbers += (KINDS.index(mark.kind), mark.row, mark.lane, mark.lanes)
        numbers += (round(mark.start_us, 4), round(mark.end_us, 4))
        numbers += (launches.index(mark.launch), mark.cta, tile, mark.merged)
    return {
        "kernel": panel.timeline.name,
        "sms": panel.sm_order,
        "lanes": panel.lanes,
        "launches": launches,
        "marks": numbers,
    }


def _row(panel: Panel) -> dict[str, str]:
    """Build the kernel's figures of the table; an unknown one is empty."""
    figures, timeline = panel.figures, panel.timeline
    efficiency, cost = panel.quantisation_efficiency, instrumentation_cost(timeline)
    parts = parts_by_name(timeline)
    return {
        "kernel": timeline.name,
        "latency (µs)": "" if timeline.latency_us is None else microseconds(timeline.latency_us),
        **{f"{name} (µs)": microseconds(parts[name]) if name in parts else "" for name in _PARTS},
        "first start to last end (µs)": microseconds(timeline.duration_us),
        "SMs busy": percent(figures.busy_share),
        "of it merging": percent(figures.reduction_share),
        "SMs waiting": percent(figures.waiting_share),
        "SMs without a CTA": percent(figures.idle_share),
        "SMs used": f"{figures.working_sms} of {timeline.sms}",
        "CTAs": f"{len(timeline.ctas)}",
        "output tiles": f"{timeline.output_tiles}",
        "quantisation efficiency": "" if efficiency is None else percent(efficiency),
        "latency with events": "" if cost is None else f"{cost:.3f}x",
        "launch settings": ", ".join(f"{k} {v}" for k, v in (timeline.config or {}).items()),
    }
