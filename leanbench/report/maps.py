"""Heat maps over batch x heads x context: which are drawn, as plotly figures without data.

The page fills them in (`reports/templates/report_maps.js`), as it does the charts. Colours are
translucent, so that they suit a light page, a dark one and paper alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.compare.ratios import MARGIN
from leanbench.report.figures import LOOK, NEUTRAL, PALETTE, kernel_styles
from leanbench.report.frame import SUBJECT, best_ok_rows, has_values

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class HeatMap:
    """One map; `key` says to the page what a cell holds."""

    key: str
    title: str
    note: str


WINNER = HeatMap(
    "winner",
    "Fastest kernel",
    f"how many times as long the second takes; grey: several within {MARGIN:.0%}; blank: no two"
    " kernels ok",
)
SPEEDUP = HeatMap("speedup", f"Speedup of {SUBJECT}", f"blue: {SUBJECT} is faster, orange: slower")
FLOOR = HeatMap(
    "floor",
    "Share of the read floor",
    "time of a kernel that only reads K and V, over latency, in %",
)


def maps_of(frame: DataFrame) -> list[HeatMap]:
    """The maps that these rows fill: at least two rows and two columns of cells."""
    ok = best_ok_rows(frame)
    if (
        len(set(ok["max_context"])) < 2
        or len(ok.drop_duplicates(["batch", "q_heads", "kv_heads"])) < 2
    ):
        return []
    kernels = {*ok["kernel"]}
    found = [WINNER] if len(kernels) > 1 else []
    if len(kernels) > 1 and SUBJECT in kernels:
        found.append(SPEEDUP)
    return [*found, FLOOR] if has_values(ok, "read_floor_share") else found


def map_figure(shown: HeatMap, kernels: Sequence[str]) -> Figure:
    """A plotly figure without data: one heat map, whose `meta` is the map's key.

    Cells of `winner` are indices into `kernels`, or their number where several are the fastest; of
    `speedup` base 2 logarithms; of `floor` shares.
    """
    import plotly.graph_objects as go

    scale, low, high = {
        "winner": (_winner_scale(kernels), -0.5, len(kernels) + 0.5),
        "speedup": (
            [[0, _rgba(PALETTE[1], 0.8)], [0.5, _rgba(NEUTRAL, 0.08)], [1, _rgba(PALETTE[0], 0.8)]],
            -1,
            1,
        ),
        "floor": ([[0, _rgba(PALETTE[0], 0.0)], [1, _rgba(PALETTE[0], 0.75)]], 0, 1),
    }[shown.key]
    trace = go.Heatmap(
        meta=shown.key,
        colorscale=scale,
        zmin=low,
        zmax=high,
        showscale=False,
        xgap=1,
        ygap=1,
        texttemplate="%{text}",
        hovertemplate="%{hovertext}<extra></extra>",
    )
    axis = {
        "type": "category",
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "automargin": True,
    }
    layout = go.Layout(
        **LOOK,
        margin={"l": 56, "r": 14, "t": 44, "b": 8},
        xaxis={**axis, "side": "top", "title": {"text": "context (tokens)", "standoff": 4}},
        yaxis={**axis, "autorange": "reversed", "title": {"text": "batch, heads", "standoff": 8}},
    )
    return go.Figure([trace], layout)


def _winner_scale(kernels: Sequence[str]) -> list[list[object]]:
    """A step for each kernel, and the last one for ties."""
    colors = [
        *(_rgba(color, 0.7) for color, _ in kernel_styles(kernels).values()),
        _rgba(NEUTRAL, 0.35),
    ]
    steps = len(colors)
    return [
        [edge / steps, color] for index, color in enumerate(colors) for edge in (index, index + 1)
    ]


def _rgba(color: str, alpha: float) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
