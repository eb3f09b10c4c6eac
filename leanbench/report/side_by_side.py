"""Runs side by side: the same kernel on the same problem in two runs, say on two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.report.charts import CHARTS
from leanbench.report.figures import LOOK, MARKERS, PALETTE, plain_name
from leanbench.report.frame import (
    COMPARED,
    PROBLEM_COLUMNS,
    best_ok_rows,
    has_values,
    kernel_order,
    where,
)
from leanbench.report.summary import geomean

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

#: What a figure of several runs can show: keys of charts.
QUANTITIES = ("latency", "bandwidth", "energy", "power")


@dataclass(frozen=True)
class Side:
    """The rows of one run and source on one GPU in one state of the L2."""

    run: str
    source: str
    gpu: str
    cache: str
    #: Run and GPU, and what else tells it from the others.
    name: str


@dataclass(frozen=True)
class Beside:
    """One kernel in two runs, over the problems that are `ok` in both. Ratios are the other's over
    the base's.
    """

    kernel: str
    base: Side
    other: Side
    problems: int
    #: Latency: geometric mean, lowest and highest, and where.
    geomean: float
    lowest: float
    lowest_at: str
    highest: float
    highest_at: str
    #: Geometric means of the read floor's share; null where one was not measured.
    base_floor_share: float | None
    other_floor_share: float | None
    #: Geometric mean of energy; null where not measured in both.
    energy: float | None


def sides(frame: DataFrame) -> list[Side]:
    """In the order of the runs; a run on several GPUs, or with a cold and a warm L2, has
    several.
    """
    keys = list(dict.fromkeys(frame[list(COMPARED)].itertuples(index=False, name=None)))
    tell = [
        column
        for column, name in enumerate(COMPARED)
        if name in ("source", "cache") and _differ(keys, column)
    ]
    return [
        Side(*key, name=", ".join([key[0], key[2], *(key[column] for column in tell)]))
        for key in keys
    ]


def _differ(keys: Sequence[tuple[str, ...]], column: int) -> bool:
    return len({key[column] for key in keys}) > 1


def beside(frame: DataFrame) -> list[Beside]:
    """Each later side over the first one with the same state of the L2, kernel by kernel."""
    best = best_ok_rows(frame)
    found = []
    all_sides = sides(frame)
    for index, other in enumerate(all_sides):
        base = next((side for side in all_sides[:index] if side.cache == other.cache), None)
        if base is None:
            continue
        both = _rows(best, base).merge(
            _rows(best, other), on=["kernel", *PROBLEM_COLUMNS], suffixes=("", "_other")
        )
        for kernel in kernel_order(frame):
            rows = where(both, both["kernel"] == kernel)
            if len(rows):
                found.append(_beside(kernel, base, other, rows))
    return found


def _rows(frame: DataFrame, side: Side) -> DataFrame:
    key = [getattr(side, name) for name in COMPARED]
    return where(frame, (frame[list(COMPARED)] == key).all(axis=1) & (frame["latency_us"] > 0))


def _beside(kernel: str, base: Side, other: Side, rows: DataFrame) -> Beside:
    ratios = [float(ratio) for ratio in rows["latency_us_other"] / rows["latency_us"]]
    labels = rows["problem"].tolist()
    return Beside(
        kernel,
        base,
        other,
        len(ratios),
        geomean(ratios),
        min(ratios),
        labels[ratios.index(min(ratios))],
        max(ratios),
        labels[ratios.index(max(ratios))],
        _mean(rows["read_floor_share"]),
        _mean(rows["read_floor_share_other"]),
        _mean(rows["energy_mj_other"] / rows["energy_mj"]),
    )


def _mean(column: Any) -> float | None:
    values = [float(value) for value in column.dropna() if value > 0]
    return geomean(values) if values else None


def beside_figure(shown: Sequence[Side]) -> Figure:
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


def quantities(frame: DataFrame) -> list[dict[str, str]]:
    """What the figure can show: columns that several runs may have, with their axis titles."""
    return [
        {"column": chart.y, "title": chart.title, "y_title": chart.y_title, "scale": chart.y_scale}
        for chart in CHARTS
        if chart.key in QUANTITIES and has_values(frame, chart.y)
    ]
