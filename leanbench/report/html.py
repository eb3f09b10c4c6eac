"""A report as one self-contained HTML page: no network, every text of a result file escaped."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import KINDS
from leanbench.core.paths import REPORT_TEMPLATES
from leanbench.core.quantities import Quantity
from leanbench.core.work import Roofs
from leanbench.decode import BOUND
from leanbench.report.charts import MARKS, PALETTE, charts_of, drawn_rows, kernel_styles, maps_of
from leanbench.report.columns import COLUMNS, HIDDEN_WHEN_CONSTANT
from leanbench.report.facts.side_by_side import quantities, sides_of
from leanbench.report.frame import (
    THE_BASELINE,
    baseline_in_words,
    baseline_of,
    fastest_rows,
    has_values,
    kernel_order,
)
from leanbench.report.parts import PARTS, gpu_of

if TYPE_CHECKING:
    from jinja2 import Template
    from pandas import DataFrame

    from leanbench.report.document import Document
    from leanbench.report.facts.results import Results
    from leanbench.report.series import VaryingAxis

#: Glyphs of `MARKS` in the legend.
GLYPHS = dict(zip(MARKS, "●■◆▲▼⬟✚★", strict=True))
#: Order of the scripts `report_<name>.js`.
SCRIPTS = ("common", "table", "plot", "sides", "maps", "charts")
#: Columns before the problem's.
_FIRST = ("command", "kernel", "latency_us", "status")
#: Columns that charts and maps read, even if no table shows them.
DATA = (
    *("problem", "group_size", "read_floor_tb_s", "baseline", "flop_per_byte"),
    *("latency_ci_low_us", "latency_ci_high_us", "window"),
)


def html_text(document: Document, results: Results) -> str:
    """Render the document, with the rows from which the page's scripts draw."""
    return template("report.html.j2").render(
        document=document,
        sections={section.key: section for section in document.sections},
        style=raw("report.css"),
        scripts=[raw(f"report_{part}.js") for part in SCRIPTS],
        page=page_data(results),
        legend=_legend(results),
    )


@cache
def template(name: str) -> Template:
    """Compile a page's template, once per process."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Autoescape whatever the file is called: result files are input, not markup.
    templates = Environment(
        loader=FileSystemLoader(REPORT_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters["kind"] = lambda block: type(block).__name__
    return templates.get_template(name)


def raw(name: str) -> Any:
    """Read a style sheet or a script, exempt from escaping."""
    from markupsafe import Markup

    return Markup((REPORT_TEMPLATES / name).read_text(encoding="utf-8"))


def _legend(results: Results) -> dict[str, Any]:
    drawn = drawn_rows(results.pictured)
    charts = charts_of(drawn, results.axes)
    floors = [
        chart.floor_name for chart in charts if chart.floor and has_values(drawn, chart.floor)
    ]
    return {
        "glyphs": GLYPHS,
        "floors": list(dict.fromkeys(floors)),
        "has_noisy": bool((drawn["status"] == "noisy").any()),
        "has_warnings": has_values(drawn, "warnings"),
        "level": results.margin.level,
    }


def page_data(results: Results) -> dict[str, Any]:
    """Build the data of the scripts, as JSON types: every row once, and what to draw."""
    frame, axes = results.pictured, results.axes
    columns = _columns(frame, axes)
    styles = kernel_styles(kernel_order(frame), frame.groupby("run")["kernel"].agg(set))
    return {
        "name": "-".join(run.name for run in results.runs),
        "baseline": baseline_of(frame),
        "bound": BOUND,
        "tag": " (predicted)" if "predicted" in results.sources else "",
        "kernels": [
            {"name": name, "color": color, "symbol": symbol}
            for name, (color, symbol) in styles.items()
        ],
        "colors": PALETTE,
        "margin": results.margin.share,
        "gpus": " and ".join(results.gpus),
        "roofs": _roofs(results),
        "l2": "warm" if results.l2 == "warm L2" else "",
        "columns": columns,
        "rows": _rows(frame, columns),
        "axes": [{**asdict(axis), "values": [*map(_scalar, axis.values)]} for axis in axes],
        "sides": _sides(results) if results.are_several else None,
        "maps": [asdict(map_) for map_ in maps_of(frame, results.margin)],
        "charts": [asdict(chart) for chart in charts_of(drawn_rows(frame), axes)],
    }


def _roofs(results: Results) -> dict[str, dict[str, float]]:
    """Return the limits of each run's GPU, if known."""
    gpus = {run.name: gpu_of(run) for run in results.runs}
    roofs = {name: None if gpu is None else Roofs.of(gpu) for name, gpu in gpus.items()}
    return {name: asdict(limits) for name, limits in roofs.items() if limits is not None}


def _sides(results: Results) -> dict[str, Any]:
    """Describe a line for each side, all different."""
    lines = []
    for index, side in enumerate(sides_of(results.runs)):
        # Colours repeat with another mark.
        mark = MARKS[(index + index // len(PALETTE)) % len(MARKS)]
        lines.append({**asdict(side), "color": PALETTE[index % len(PALETTE)], "symbol": mark})
    return {"lines": lines, "quantities": quantities(fastest_rows(results.frame))}


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _columns(frame: DataFrame, axes: list[VaryingAxis]) -> list[dict[str, Any]]:
    """Describe the columns that have values.

    A column of repeating texts lists them once in `texts`; rows hold their indices.
    """
    shown = [column for column in COLUMNS if column.is_in("page")]
    # A narrow window shows who took how long; most rows are plain attention: variants go last.
    shown.sort(key=lambda column: (column.name in KINDS, _place(column.name)))
    columns = [_described(column, frame) for column in shown]
    columns += [{**_described(column, frame), "shown": False} for column in PARTS]
    known = {column["name"] for column in columns}
    for name in dict.fromkeys([*DATA, *(axis.name for axis in axes)]):
        if name not in known:
            columns.append({"name": name, "shown": False})
    filled = [column for column in columns if has_values(frame, column["name"])]
    return [{**column, "texts": _texts(frame[column["name"]].tolist())} for column in filled]


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _described(column: Quantity, frame: DataFrame) -> dict[str, Any]:
    name = column.name
    baseline = baseline_in_words(frame)
    return {
        "name": name,
        "heading": column.heading.replace(THE_BASELINE, baseline),
        "unit": column.unit_text,
        "kind": column.kind,
        "is_number": column.is_number,
        "meaning": column.meaning.replace(THE_BASELINE, baseline),
        "notes": column.notes,
        "shown": name not in HIDDEN_WHEN_CONSTANT or len(set(frame[name].tolist())) > 1,
        "on_paper": column.is_in("paper"),
    }


def _rows(frame: DataFrame, columns: list[dict[str, Any]]) -> list[list[Any]]:
    """Convert the values of `columns` to JSON types or indices of `texts`; null if not measured."""
    lists = []
    for column in columns:
        values = [_json_value(value) for value in frame[column["name"]].tolist()]
        indices = {text: index for index, text in enumerate(column["texts"] or ())}
        lists.append([indices.get(value) for value in values] if indices else values)
    return [list(row) for row in zip(*lists, strict=True)]


def _texts(values: list[Any]) -> list[str] | None:
    """List the texts of a column if they number at most half of the values, else None."""
    known = [value for value in map(_json_value, values) if value is not None]
    texts = list(dict.fromkeys(known))
    are_texts = all(isinstance(text, str) for text in texts)
    return texts if are_texts and 2 * len(texts) <= len(known) else None


def _json_value(value: Any) -> Any:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    # No measurement has more than seven digits. The CSV has all.
    return float(f"{value:.7g}") if isinstance(value, float) else value
