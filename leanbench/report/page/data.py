"""What the page's scripts draw from: every row once, and what can be drawn of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.report.charts import charts_of, drawn_rows
from leanbench.report.compare.ratios import MARGIN
from leanbench.report.facts.side_by_side import quantities, sides_of
from leanbench.report.figures import figure
from leanbench.report.frame import SUBJECT, best_ok_rows, kernel_order
from leanbench.report.maps import map_figure, maps_of
from leanbench.report.page.sides import sides_figure
from leanbench.report.table import page_columns, page_rows

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def page_data(results: Results) -> dict[str, Any]:
    """As JSON types."""
    frame, axes = results.frame, results.axes
    columns = page_columns(frame, axes)
    kernels = kernel_order(frame)
    charts = charts_of(drawn_rows(frame), axes)
    return {
        "name": "-".join(run.name for run in results.runs),
        "subject": SUBJECT,
        "tag": " (predicted)" if "predicted" in results.sources else "",
        "kernels": kernels,
        "margin": MARGIN,
        "gpus": " and ".join(results.gpus),
        "l2": "warm" if results.l2 == "warm L2" else "",
        "columns": columns,
        "rows": page_rows(frame, columns),
        "axes": [
            {"name": a.name, "label": a.label, "values": _plain(a.values), "is_x": a.is_x}
            for a in axes
        ],
        "sides": _sides(results) if results.are_several else None,
        "maps": [
            {
                "key": each.key,
                "title": each.title,
                "figure": map_figure(each, kernels).to_plotly_json(),
            }
            for each in maps_of(frame)
        ],
        "charts": [
            {"title": chart.title, "figure": figure(chart, kernels).to_plotly_json()}
            for chart in charts
        ],
    }


def _sides(results: Results) -> dict[str, Any]:
    return {
        "figure": sides_figure(list(sides_of(results.runs))).to_plotly_json(),
        "quantities": quantities(best_ok_rows(results.frame)),
    }


def _plain(values: Any) -> list[Any]:
    """Python scalars, for JSON."""
    return [value.item() if hasattr(value, "item") else value for value in values]
