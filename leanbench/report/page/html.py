"""A report as one self-contained HTML page: no network, every text of a result file escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from leanbench.core.paths import REPORT_TEMPLATES
from leanbench.report.charts import charts_of, drawn_rows
from leanbench.report.frame import has_values
from leanbench.report.page.data import page_data
from leanbench.report.styles import MARKS

if TYPE_CHECKING:
    from typing import Any

    from jinja2 import Template

    from leanbench.report.document import Document
    from leanbench.report.facts.results import Results

#: Glyphs of `styles.MARKS`, for the legend.
GLYPHS = dict(zip(MARKS, "●■◆▲▼⬟✚★", strict=True))
#: `report_<name>.js`, in this order.
SCRIPTS = ("common", "table", "plot", "sides", "maps", "charts")


def html_text(document: Document, results: Results) -> str:
    """The whole page: the document, and the rows from which its scripts draw."""
    from markupsafe import Markup

    def raw(name: str) -> Markup:
        return Markup((REPORT_TEMPLATES / name).read_text(encoding="utf-8"))

    return _template().render(
        document=document,
        sections={section.key: section for section in document.sections},
        style=raw("report.css"),
        scripts=[raw(f"report_{part}.js") for part in SCRIPTS],
        page=page_data(results),
        legend=_legend(results),
    )


@cache
def _template() -> Template:
    """The page's frame, compiled once for all pages of a process."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Autoescape whatever the file is called: result files are input, not markup.
    templates = Environment(
        loader=FileSystemLoader(REPORT_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    templates.trim_blocks = templates.lstrip_blocks = True
    templates.filters["kind"] = lambda block: type(block).__name__
    return templates.get_template("report.html.j2")


def _legend(results: Results) -> dict[str, Any]:
    """Legend of the pictures' marks."""
    drawn = drawn_rows(results.frame)
    charts = charts_of(drawn, results.axes)
    floors = [
        chart.floor_name for chart in charts if chart.floor and has_values(drawn, chart.floor)
    ]
    return {
        "glyphs": GLYPHS,
        "floors": list(dict.fromkeys(floors)),
        "has_noisy": bool((drawn["status"] == "noisy").any()),
        "has_warnings": has_values(drawn, "warnings"),
        "margin": results.margin.words,
    }
