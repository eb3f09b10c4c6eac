"""The charts: plotly figures with axes, units and one styled trace a kernel, without data.

The page fills in the rows of the series that its reader selects
(`reports/templates/report_charts.js`), so a run with hundreds of problems holds each row once. Text
and grid lines take their colours from the page's style sheet, for light, dark and print.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from leanbench.report.charts import Chart
from leanbench.report.frame import SUBJECT

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

#: Wong's colour-blind-safe set, darkened where needed for a contrast of 3:1 on white and on the
#: dark page alike.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B85C93", "#A67C00", "#7B6FD0", "#8C7468", "#2E93A8")
MARKERS: tuple[str, ...] = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "pentagon",
    "cross",
    "star",
)
#: Colours that never change, whatever else runs.
FIXED = {
    name: index for index, name in enumerate((SUBJECT, "fa2", "fixed_split", "cudnn", "flashinfer"))
}
NEUTRAL = "#808690"
#: Of every figure's layout: the page's background shows through.
LOOK: dict[str, Any] = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#30343A"},
}


def kernel_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each kernel.

    The known ones are fixed; another takes the entry its name hashes to, or the next one that is
    free in this run.
    """
    taken: dict[str, int] = {name: FIXED[name] for name in names if name in FIXED}
    for name in sorted(set(names) - set(FIXED)):
        start = zlib.crc32(name.encode())
        candidates = [(start + step) % len(PALETTE) for step in range(len(PALETTE))]
        free = [index for index in candidates if index not in taken.values()]
        # The first entries belong to lean, fa2 and fixed_split even when those did not run.
        free = [index for index in free if index > 2] or free or candidates
        taken[name] = free[0]
    return {name: (PALETTE[taken[name]], MARKERS[taken[name]]) for name in names}


def figure(chart: Chart, kernels: Sequence[str]) -> Figure:
    """A plotly figure without data; `layout.meta` holds the chart's fields, `trace.meta` the
    kernel's name.

    The trace whose kernel is null is the floor; one whose meta names a column draws that one beside
    the kernel's.
    """
    import plotly.graph_objects as go

    styles = kernel_styles(kernels)
    floor = []
    if chart.floor:
        line = {"color": NEUTRAL, "width": 1.5, "dash": "5px,3px"}
        name = chart.floor_name
        hover = f"{name}: %{{y:{chart.y_format}}}<extra></extra>"
        floor.append(
            go.Scatter(
                name=name, meta={"kernel": None}, mode="lines", line=line, hovertemplate=hover
            )
        )
    # What is drawn last lies on top: lean, the first of the kernels.
    order = list(reversed(kernels))
    beside = [_beside(chart, name, *styles[name]) for name in order if chart.beside]
    traces = [*floor, *beside, *(_trace(chart, name, *styles[name]) for name in order)]
    return go.Figure(traces, go.Layout(**_layout(chart)))


def _trace(chart: Chart, name: str, color: str, symbol: str):
    import plotly.graph_objects as go

    is_subject = name == SUBJECT
    error_bars = {"visible": True, "symmetric": False, "color": color, "thickness": 1, "width": 2}
    return go.Scatter(
        name=plain_name(name),
        meta={"kernel": name},
        line={"color": color, "width": 2.5 if is_subject else 1.5},
        marker={"color": color, "symbol": symbol, "size": 7 if is_subject else 6},
        error_y=error_bars if chart.low else None,
        hovertemplate=f"%{{fullData.name}}: %{{y:{chart.y_format}}}%{{text}}<extra></extra>",
        cliponaxis=False,
    )


def _beside(chart: Chart, name: str, color: str, symbol: str):
    import plotly.graph_objects as go

    return go.Scatter(
        name=plain_name(name),
        meta={"kernel": name, "column": chart.beside},
        mode="lines",
        line={"color": color, "width": 1.5, "dash": "dot"},
        marker={"color": color, "symbol": symbol},
        hovertemplate=(
            f"%{{fullData.name}}, {chart.beside_name}: %{{y:{chart.y_format}}}<extra></extra>"
        ),
        showlegend=False,
    )


def plain_name(name: str) -> str:
    """Plotly reads a little markup in names; a kernel is named by text."""
    return name.replace("&", "&amp;").replace("<", "&lt;")


def _layout(chart: Chart) -> dict[str, Any]:
    axis = {
        "showline": True,
        "linecolor": NEUTRAL,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": NEUTRAL,
        "gridcolor": "#E4E6EA",
        "zeroline": False,
        "automargin": True,
    }
    x = {"title": {"text": "K and V read (bytes)"}}
    y: dict[str, Any] = {"title": {"text": chart.y_title, "standoff": 8}}
    if chart.y_format.endswith("%"):
        y["tickformat"] = ".2~%"
    if chart.y_scale == "linear":
        y["rangemode"] = "tozero"
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": chart.line_at,
        "y1": chart.line_at,
    }
    line |= {"layer": "below", "line": {"color": NEUTRAL, "width": 1}}
    return {
        "meta": {field.name: getattr(chart, field.name) for field in fields(chart)},
        **LOOK,
        "margin": {"l": 56, "r": 14, "t": 8, "b": 44},
        "showlegend": False,
        "legend": {"traceorder": "reversed"},
        "hovermode": "closest" if chart.all_problems else "x unified",
        "xaxis": {**axis, **(x if chart.all_problems else {"title": {"text": ""}})},
        "yaxis": {**axis, **y, "type": "log" if chart.y_scale == "log" else "linear"},
        "shapes": [] if chart.line_at is None else [line],
    }
