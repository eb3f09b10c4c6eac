"""One self-contained HTML page: no network, plotly inlined once, every text of a result file
escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core.paths import REPORT_TEMPLATES
from leanbench.model import known_error
from leanbench.model.claims import SAMPLES, TOLERANCE
from leanbench.report.charts import Chart, charts_of, note
from leanbench.report.claims_table import claims_of_runs
from leanbench.report.figures import MARKERS, figure, kernel_styles
from leanbench.report.frame import (
    PROBLEM_COLUMNS,
    SUBJECT,
    best_ok_rows,
    gpu_name,
    has_values,
    kernel_order,
    where,
)
from leanbench.report.headline import headline, overview, parts_of, title
from leanbench.report.maps import map_figure, maps_of
from leanbench.report.series import (
    Axis,
    add_series_columns,
    fixed_words,
    short_labels,
    varying_axes,
)
from leanbench.report.side_by_side import beside, beside_figure, quantities, sides
from leanbench.report.summary import status_counts
from leanbench.report.table import page_columns, page_rows
from leanbench.report.trust import Fact, facts
from leanbench.report.warnings import flagged, warned
from leanbench.report.winners import MARGIN

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.records.reading import Run

#: Glyphs of `figures.MARKERS`, for the legend.
GLYPHS = dict(zip(MARKERS, "●■◆▲▼⬟✚★", strict=True))
#: Statuses with a latency that was taken; `noisy` is drawn hollow and enters no statistic.
DRAWN = ("ok", "noisy")
#: `report_<name>.js`, in this order.
SCRIPTS = ("common", "beside", "maps", "charts", "table")


def html_text(runs: Sequence[Run], frame: DataFrame) -> str:
    """The whole page. `frame` comes from `leanbench.report.frame.results_frame`."""
    import plotly.offline
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # Autoescape whatever the file is called: result files are input, not markup.
    templates = Environment(
        loader=FileSystemLoader(REPORT_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    templates.trim_blocks = templates.lstrip_blocks = True

    def raw(name: str) -> Markup:
        return Markup((REPORT_TEMPLATES / name).read_text(encoding="utf-8"))

    return templates.get_template("report.html.j2").render(
        style=raw("report.css"),
        script=Markup("\n").join(raw(f"report_{part}.js") for part in SCRIPTS),
        plotly=Markup(plotly.offline.get_plotlyjs()),
        **page_context(runs, frame),
    )


def page_context(runs: Sequence[Run], frame: DataFrame) -> dict[str, Any]:
    """Everything the template shows, apart from the scripts."""
    frame = add_series_columns(
        frame.assign(read_floor_tb_s=frame["kv_bytes"] / frame["read_floor_us"] * 1e-6)
    )
    drawn = where(frame, frame["status"].isin(DRAWN) & frame["latency_us"].notna())
    kernels = kernel_order(frame)
    axes = varying_axes(frame)
    charts = charts_of(drawn, several_series=len(axes) > any(axis.is_x for axis in axes))
    caches = sorted(set(frame["cache"]))
    sources = list(dict.fromkeys(frame["source"])) or [
        str(run.manifest.get("source", "measured")) for run in runs[:1]
    ]
    floors = [
        chart.floor_name for chart in charts if chart.floor and has_values(drawn, chart.floor)
    ]
    about = [_about(run, where(frame, frame["run"] == run.name)) for run in runs]
    several_alike = len(runs) > 1 and all(
        each["versions"] == about[0]["versions"] for each in about
    )
    parts = parts_of(frame)
    found = overview(parts)
    return {
        "title": title([run.name for run in runs], found),
        "runs": about,
        # What several runs have in common is said once.
        "versions": about[0]["versions"] if several_alike else [],
        "subject": SUBJECT,
        "sources": sources,
        # A run with a cold L2 alone, as in serving, says nothing of it.
        "l2": f"{' and '.join(caches)} L2" if "warm" in caches else "",
        "problem_count": len(frame.drop_duplicates([*PROBLEM_COLUMNS])),
        "fixed": fixed_words(frame),
        "row_count": len(frame),
        "kernels": [
            {"name": name, "color": color, "glyph": GLYPHS[marker]}
            for name, (color, marker) in kernel_styles(kernels).items()
        ],
        "summaries": [(part.summary, headline(part), part.short) for part in parts],
        "overview": found,
        "margin": f"{MARGIN:.0%}",
        "short": short_labels(frame, axes),
        "statuses": status_counts(frame),
        "beside": beside(frame) if len(runs) > 1 else [],
        "maps": maps_of(frame),
        "charts": charts,
        "notes": {chart.key: note(chart, drawn) for chart in charts},
        "floors": list(dict.fromkeys(floors)),
        "has_noisy": bool((drawn["status"] == "noisy").any()),
        "has_warnings": has_values(drawn, "warnings"),
        "claims": claims_of_runs(runs),
        "tolerance": f"{TOLERANCE:.0%}",
        "samples": SAMPLES,
        "page": {
            "tag": " (predicted)" if "predicted" in sources else "",
            **_page(runs, frame, axes, charts),
        },
    }


def _about(run: Run, frame: DataFrame) -> dict[str, Any]:
    """What the page says of one run; `frame` has its rows."""
    rows = [row.model_dump() for row, _ in run.results]
    environments = _table_of(run.manifest.get("environments"))
    return {
        "name": run.name,
        "sources": list(dict.fromkeys(frame["source"]))
        or [str(run.manifest.get("source", "measured"))],
        "gpus": list(dict.fromkeys(frame["gpu"])) or [gpu_name(run.manifest)],
        "model_error": known_error(gpu_name(run.manifest)),
        "versions": _versions(environments),
        "created": str(run.manifest.get("created") or ""),
        "command": run.manifest.get("command"),
        "notes": run.notes,
        "trust": _trust(run),
        "warned": warned(rows),
        "flagged": flagged(rows),
        "environments": environments,
        "environment_fields": list(
            dict.fromkeys(field for each in environments.values() for field in each)
        ),
        "gpu_fields": {
            name: _text(value) for name, value in _mapping(run.manifest.get("gpu")).items()
        },
        "sweep": run.manifest.get("sweep"),
    }


def _page(
    runs: Sequence[Run], frame: DataFrame, axes: list[Axis], charts: list[Chart]
) -> dict[str, Any]:
    """What the page's scripts read."""
    columns = page_columns(frame, axes)
    kernels = kernel_order(frame)
    return {
        "name": "-".join(run.name for run in runs),
        "subject": SUBJECT,
        "kernels": kernels,
        "margin": MARGIN,
        "gpus": " and ".join(dict.fromkeys(frame["gpu"])),
        "l2": "warm" if set(frame["cache"]) == {"warm"} else "",
        "columns": columns,
        "rows": page_rows(frame, columns),
        "axes": [
            {"name": a.name, "label": a.label, "values": _plain(a.values), "is_x": a.is_x}
            for a in axes
        ],
        "beside": _beside(best_ok_rows(frame)) if len(runs) > 1 else None,
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


def _beside(ok: DataFrame) -> dict[str, Any]:
    return {"figure": beside_figure(sides(ok)).to_plotly_json(), "quantities": quantities(ok)}


def _trust(run: Run) -> list[tuple[str, list[Fact]]]:
    """What is known of each GPU's and L2 state's measurements, under a heading."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row, _ in run.results:
        name = f"{gpu_name(run.manifest, row.environment)}, {row.cache} L2"
        groups.setdefault(name, []).append(row.model_dump())
    return [(name, found) for name, group in groups.items() if (found := facts(group))]


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
