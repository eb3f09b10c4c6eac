"""Documents of runs: every figure and sentence, once for all renderers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from leanbench.report.document import Document, Section
from leanbench.report.facts.claims import claims_section
from leanbench.report.facts.decompositions import decompositions_section
from leanbench.report.facts.environment import environment_section, links_section
from leanbench.report.facts.headline import (
    banner_section,
    head_section,
    overview_of,
    summary_section,
    title,
)
from leanbench.report.facts.problems import problems_section
from leanbench.report.facts.results import Results
from leanbench.report.facts.rows import charts_section, maps_section, rows_section
from leanbench.report.facts.side_by_side import side_by_side_section
from leanbench.report.facts.trust import flagged_section, trust_section

SECTIONS: dict[str, Callable[[Results], Section]] = {
    "banner": banner_section,
    "head": head_section,
    "links": links_section,
    "summary": summary_section,
    "problems": problems_section,
    "decompositions": decompositions_section,
    "claims": claims_section,
    "maps": maps_section,
    "charts": charts_section,
    "side-by-side": side_by_side_section,
    "trust": trust_section,
    "flagged": flagged_section,
    "rows": rows_section,
    "environment": environment_section,
}
#: Sections that stay open in a report of many runs.
OPEN = ("banner", "head", "links", "summary", "rows")
#: Sections on a terminal after a sweep. The conclusion comes last.
ENDING = ("links", "problems", "trust", "flagged", "summary")


def facts(results: Results, keys: Sequence[str] | None = None) -> Document:
    """Make a document of the sections that are not empty.

    Args:
        keys: keys of `SECTIONS`; None for those of a report.
    """
    sections = _report(results) if keys is None else [SECTIONS[key](results) for key in keys]
    tags = []
    if "predicted" in results.sources:
        tags.append("predicted" if len(results.sources) == 1 else "measured and predicted")
    tags += [results.l2] if results.l2 else []
    names = [run.name for run in results.runs]
    return Document(
        title(names, overview_of(results.parts)),
        tuple(section for section in sections if section.blocks),
        tuple(tags),
    )


def _report(results: Results) -> list[Section]:
    figures = ["maps", "charts", "decompositions", "claims"]
    if results.are_several:
        # Several GPUs are compared first. Runs of one GPU differ in their problems.
        at = 0 if len(results.gpus) > 1 else len(figures)
        figures.insert(at, "side-by-side")
    first, last = ["banner", "head", "links", "summary"], ["trust", "flagged", "rows"]
    between = [] if results.frame.empty else [*figures, *last]
    makers = {**SECTIONS, "summary": partial(summary_section, under_banner=True)}
    sections = [makers[key](results) for key in (*first, *between, "environment")]
    if overview_of(results.parts) is None:
        return sections
    return [
        section if section.key in OPEN else replace(section, folded="closed")
        for section in sections
    ]
