"""One self-contained HTML page: no network, plotly inlined once, every text of a result file escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.model import KNOWN_ERROR
from leanbench.paths import REPORT_TEMPLATES
from leanbench.report.figures import MARKERS, charts_of, figure, kernel_styles, note
from leanbench.report.frame import PROBLEM_COLUMNS, SUBJECT, gpu_name, has_values, kernel_order, where
from leanbench.report.series import add_series_columns, fixed_words, short_labels, varying_axes
from leanbench.report.summary import status_counts, summaries
from leanbench.report.table import flagged_groups, page_columns, page_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.run_files import Run

#: Glyphs of `figures.MARKERS`, for the legend.
GLYPHS = dict(zip(MARKERS, "●■◆▲▼⬟✚★", strict=True))
#: Statuses with a latency that was taken; `noisy` is drawn hollow and enters no statistic.
DRAWN = ("ok", "noisy")


def html_text(run: Run, frame: DataFrame) -> str:
    """The whole page. `frame` comes from `leanbench.report.frame.results_frame`."""
    import plotly.offline
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # Autoescape whatever the file is called: result files are input, not markup.
    templates = Environment(loader=FileSystemLoader(REPORT_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    templates.trim_blocks = templates.lstrip_blocks = True

    def raw(name: str) -> Markup:
        return Markup((REPORT_TEMPLATES / name).read_text(encoding="utf-8"))

    return templates.get_template("report.html.j2").render(
        style=raw("report.css"),
        script=Markup("\n").join(raw(f"report_{part}.js") for part in ("common", "charts", "table")),
        plotly=Markup(plotly.offline.get_plotlyjs()),
        **page_context(run, frame),
    )


def page_context(run: Run, frame: DataFrame) -> dict[str, Any]:
    """Everything the template shows, apart from the scripts."""
    frame = add_series_columns(frame.assign(read_floor_tb_s=frame["kv_bytes"] / frame["read_floor_us"] * 1e-6))
    drawn = where(frame, frame["status"].isin(DRAWN) & frame["latency_us"].notna())
    problems = frame.drop_duplicates([*PROBLEM_COLUMNS])
    kernels = kernel_order(frame)
    axes = varying_axes(frame)
    charts = charts_of(drawn, several_series=len(axes) > any(axis.is_x for axis in axes))
    sources = list(dict.fromkeys(frame["source"])) or [str(run.manifest.get("source", "measured"))]
    environments = _table_of(run.manifest.get("environments"))
    columns = page_columns(frame, axes)
    return {
        "run": run,
        "manifest": run.manifest,
        "subject": SUBJECT,
        "model_error": KNOWN_ERROR,
        "sources": sources,
        "gpus": list(dict.fromkeys(frame["gpu"])) or [gpu_name(run.manifest)],
        "versions": _versions(environments),
        "problem_count": len(problems),
        "fixed": fixed_words(frame),
        "row_count": len(frame),
        "kernels": [
            {"name": name, "color": color, "glyph": GLYPHS[marker]}
            for name, (color, marker) in kernel_styles(kernels).items()
        ],
        "summaries": summaries(frame),
        "short": short_labels(frame, axes),
        "statuses": status_counts(frame),
        "charts": charts,
        "notes": {chart.key: note(chart, drawn) for chart in charts},
        "has_floor": any(chart.floor and has_values(drawn, chart.floor) for chart in charts),
        "has_noisy": bool((drawn["status"] == "noisy").any()),
        "flagged": flagged_groups(frame),
        "environments": environments,
        "environment_fields": list(dict.fromkeys(field for each in environments.values() for field in each)),
        "gpu_fields": {name: _text(value) for name, value in _mapping(run.manifest.get("gpu")).items()},
        "page": {
            "name": run.name,
            "tag": " (predicted)" if "predicted" in sources else "",
            "gpus": " and ".join(dict.fromkeys(frame["gpu"])),
            "columns": columns,
            "rows": page_rows(frame, columns),
            "axes": [{"name": a.name, "label": a.label, "values": _plain(a.values), "is_x": a.is_x} for a in axes],
            "charts": [{"title": chart.title, "figure": figure(chart, kernels).to_plotly_json()} for chart in charts],
        },
    }


def _versions(environments: dict[str, dict[str, str]]) -> list[str]:
    """`torch 2.11.0` and the like, each value once, for the header."""
    found = []
    for field in ("driver", "torch", "triton", "leanbench"):
        values = dict.fromkeys(each[field] for each in environments.values() if each.get(field))
        if values:
            found.append(f"{field} {', '.join(values)}")
    return found


def _table_of(value: Any) -> dict[str, dict[str, str]]:
    """A mapping of mappings as text; what is not measured is left out."""
    return {
        str(key): {name: _text(item) for name, item in _mapping(fields).items() if item is not None}
        for key, fields in _mapping(value).items()
    }


def _text(value: Any) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(values: Any) -> list[Any]:
    """Python scalars, for JSON."""
    return [value.item() if hasattr(value, "item") else value for value in values]
