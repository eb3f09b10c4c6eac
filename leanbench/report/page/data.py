"""Data that the page's scripts draw from: every row once, and what can be drawn of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from leanbench.decode import BOUND
from leanbench.report.charts import charts_of, drawn_rows
from leanbench.report.facts.side_by_side import quantities, sides_of
from leanbench.report.frame import baseline_of, fastest_rows, kernel_order
from leanbench.report.maps import maps_of
from leanbench.report.styles import MARKS, PALETTE, kernel_styles
from leanbench.report.table import page_columns, page_rows

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def page_data(results: Results) -> dict[str, Any]:
    """As JSON types."""
    frame, axes = results.frame, results.axes
    columns = page_columns(frame, axes)
    return {
        "name": "-".join(run.name for run in results.runs),
        "baseline": baseline_of(frame),
        "bound": BOUND,
        "tag": " (predicted)" if "predicted" in results.sources else "",
        "kernels": [
            {"name": name, "color": color, "symbol": symbol}
            for name, (color, symbol) in kernel_styles(kernel_order(frame)).items()
        ],
        "colors": PALETTE,
        "margin": results.margin.share,
        "gpus": " and ".join(results.gpus),
        "l2": "warm" if results.l2 == "warm L2" else "",
        "columns": columns,
        "rows": page_rows(frame, columns),
        "axes": [
            {"name": a.name, "label": a.label, "values": _plain(a.values), "is_x": a.is_x}
            for a in axes
        ],
        "sides": _sides(results) if results.are_several else None,
        "maps": [asdict(map_) for map_ in maps_of(frame, results.margin)],
        "charts": [asdict(chart) for chart in charts_of(drawn_rows(frame), axes)],
    }


def _sides(results: Results) -> dict[str, Any]:
    """A line for each side, all of them different."""
    lines = []
    for index, side in enumerate(sides_of(results.runs)):
        # Another mark where the colours begin again.
        mark = MARKS[(index + index // len(PALETTE)) % len(MARKS)]
        lines.append({**asdict(side), "color": PALETTE[index % len(PALETTE)], "symbol": mark})
    return {"lines": lines, "quantities": quantities(fastest_rows(results.frame))}


def _plain(values: Any) -> list[Any]:
    """Python scalars, for JSON."""
    return [value.item() if hasattr(value, "item") else value for value in values]
