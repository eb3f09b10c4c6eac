"""The picture of one kernel in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.report.figures import LOOK, MARKERS, PALETTE, plain_name
from leanbench.report.frame import COMPARED

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from leanbench.report.facts.side_by_side import Side


def sides_figure(shown: Sequence[Side]) -> Figure:
    """A plotly figure without data: one line a side, whose `meta` names it. The page fills
    it in.
    """
    import plotly.graph_objects as go

    axis = {
        "showline": True,
        "linecolor": "#808690",
        "gridcolor": "#E4E6EA",
        "zeroline": False,
        "automargin": True,
    }
    traces = [
        go.Scatter(
            name=plain_name(side.name),
            meta={name: getattr(side, name) for name in COMPARED},
            mode="lines+markers",
            line={"color": PALETTE[index % len(PALETTE)], "width": 2, "dash": _dash(side)},
            marker={"color": PALETTE[index % len(PALETTE)], "symbol": _marker(index), "size": 7},
            hovertemplate="%{fullData.name}: %{y:,.4~r}<extra></extra>",
        )
        for index, side in enumerate(shown)
    ]
    layout = go.Layout(
        **LOOK,
        margin={"l": 56, "r": 14, "t": 8, "b": 44},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="x unified",
        xaxis={**axis, "type": "category"},
        yaxis=axis,
    )
    return go.Figure(traces, layout)


def _marker(index: int) -> str:
    """Another one where the colours begin again."""
    return MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]


def _dash(side: Side) -> str:
    """A prediction is dotted: nobody measured that line."""
    return "dot" if side.source == "predicted" else "solid"
