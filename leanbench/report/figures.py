"""The charts: plotly figures with axes, units and one styled trace a kernel, without data.

The page fills in the rows of the series that its reader selects (`reports/templates/report_charts.js`), so a run with
hundreds of problems holds each row once. Text and grid lines take their colours from the page's style sheet, for light,
dark and print.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from leanbench.report.frame import SUBJECT, has_values

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

#: Wong's colour-blind-safe set, darkened where needed for a contrast of 3:1 on white and on the dark page alike.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B85C93", "#A67C00", "#7B6FD0", "#8C7468", "#2E93A8")
MARKERS: tuple[str, ...] = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "cross", "star")
#: Colours that never change, whatever else runs.
FIXED = {name: index for index, name in enumerate((SUBJECT, "fa2", "fixed_split", "cudnn", "flashinfer"))}
NEUTRAL = "#808690"


@dataclass(frozen=True)
class Chart:
    """One chart. Columns are those of the frame."""

    key: str
    title: str
    #: What the marks mean, one line under the title.
    note: str
    y: str
    y_title: str
    #: `log`, `linear` (from zero) or `auto`: log when the values span more than a factor of 5.
    y_scale: str
    y_format: str
    #: Error bars, from and to.
    low: str | None = None
    high: str | None = None
    #: Drawn dashed: the same for every kernel.
    floor: str | None = None
    #: A horizontal line.
    line_at: float | None = None
    #: Every problem of the run against `kv_bytes`, whatever is selected.
    all_problems: bool = False


CHARTS = (
    Chart(
        key="latency",
        title="Latency",
        note="time of one launch",
        y="latency_us",
        y_title="latency (µs)",
        y_scale="log",
        y_format=",.4~r",
        low="latency_p25_us",
        high="latency_p75_us",
        floor="read_floor_us",
    ),
    Chart(
        key="bandwidth",
        title="Bandwidth",
        note="bytes of K and V over latency",
        y="bandwidth_tb_s",
        y_title="bandwidth (TB/s)",
        y_scale="linear",
        y_format=".3~f",
        floor="read_floor_tb_s",
    ),
    Chart(
        key="speedup",
        title=f"Speedup of {SUBJECT}",
        note=f"latency of each other kernel over that of {SUBJECT}; above 1, {SUBJECT} is faster",
        y="lean_speedup",
        y_title=f"speedup of {SUBJECT} (×)",
        y_scale="auto",
        y_format=".3~f",
        line_at=1.0,
    ),
    Chart(
        key="share",
        title="Share of the read floor, all problems",
        note="time of a kernel that only reads K and V, over latency; 100% is the physical limit",
        y="read_floor_share",
        y_title="share of the read floor (%)",
        y_scale="linear",
        y_format=".1%",
        line_at=1.0,
        all_problems=True,
    ),
    Chart(
        key="speedup_all",
        title=f"Speedup of {SUBJECT}, all problems",
        note=f"one mark a problem and kernel; above 1, {SUBJECT} is faster",
        y="lean_speedup",
        y_title=f"speedup of {SUBJECT} (×)",
        y_scale="auto",
        y_format=".3~f",
        line_at=1.0,
        all_problems=True,
    ),
)


def kernel_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each kernel.

    The known ones are fixed; another takes the entry its name hashes to, or the next one that is free in this run.
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


def charts_of(drawn: DataFrame, several_series: bool) -> list[Chart]:
    """The charts that these rows have values for.

    With one series, the speedups of all problems are those that the speedup chart shows already.
    """
    candidates = [chart for chart in CHARTS if several_series or chart.key != "speedup_all"]
    return [chart for chart in candidates if has_values(drawn, chart.y)]


def note(chart: Chart, drawn: DataFrame) -> str:
    """The chart's note, with what its marks mean where these rows have them."""
    marks = [chart.note]
    if chart.low and has_values(drawn, chart.low):
        marks.append("median, bars: quartiles")
    if chart.floor and has_values(drawn, chart.floor):
        marks.append("dashed: the read floor")
    return "; ".join(marks)


def figure(chart: Chart, kernels: Sequence[str]) -> Figure:
    """A plotly figure without data; `layout.meta` holds the chart's fields, `trace.meta` the kernel's name.

    The trace whose kernel is null is the read floor.
    """
    import plotly.graph_objects as go

    styles = kernel_styles(kernels)
    floor = []
    if chart.floor:
        line = {"color": NEUTRAL, "width": 1.5, "dash": "5px,3px"}
        hover = f"read floor: %{{y:{chart.y_format}}}<extra></extra>"
        floor.append(go.Scatter(name="read floor", meta={"kernel": None}, mode="lines", line=line, hovertemplate=hover))
    # What is drawn last lies on top: lean, the first of the kernels.
    traces = floor + [_trace(chart, name, *styles[name]) for name in reversed(kernels)]
    return go.Figure(traces, go.Layout(**_layout(chart)))


def _trace(chart: Chart, name: str, color: str, symbol: str):
    import plotly.graph_objects as go

    is_subject = name == SUBJECT
    error_bars = {"visible": True, "symmetric": False, "color": color, "thickness": 1, "width": 2}
    return go.Scatter(
        # Plotly reads a little markup in names; a kernel is named by text.
        name=name.replace("&", "&amp;").replace("<", "&lt;"),
        meta={"kernel": name},
        line={"color": color, "width": 2.5 if is_subject else 1.5},
        marker={"color": color, "symbol": symbol, "size": 7 if is_subject else 6},
        error_y=error_bars if chart.low else None,
        hovertemplate=f"%{{fullData.name}}: %{{y:{chart.y_format}}}%{{text}}<extra></extra>",
        cliponaxis=False,
    )


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
        y["tickformat"] = ".0%"
    if chart.y_scale == "linear":
        y["rangemode"] = "tozero"
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": chart.line_at, "y1": chart.line_at}
    return {
        "meta": {field.name: getattr(chart, field.name) for field in fields(chart)},
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#30343A"},
        "margin": {"l": 56, "r": 14, "t": 8, "b": 44},
        "showlegend": False,
        "legend": {"traceorder": "reversed"},
        "hovermode": "closest" if chart.all_problems else "x unified",
        "xaxis": {**axis, **(x if chart.all_problems else {"title": {"text": ""}})},
        "yaxis": {**axis, **y, "type": "log" if chart.y_scale == "log" else "linear"},
        "shapes": [{**line, "layer": "below", "line": {"color": NEUTRAL, "width": 1}}] if chart.line_at else [],
    }
