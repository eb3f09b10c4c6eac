"""From runs to a document: every figure and every sentence, once for all renderers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from leanbench.report.document import Document, Section
from leanbench.report.facts.claims import claims_section
from leanbench.report.facts.decompositions import decompositions_section
from leanbench.report.facts.environment import environment_section, links_section
from leanbench.report.facts.figures import charts_section, maps_section
from leanbench.report.facts.head import banner_section, head_section
from leanbench.report.facts.headline import overview_of, title
from leanbench.report.facts.outcome import summary_section
from leanbench.report.facts.problems import problems_section
from leanbench.report.facts.results import Results
from leanbench.report.facts.rows import rows_section
from leanbench.report.facts.side_by_side import side_by_side_section
from leanbench.report.facts.trust import trust_section
from leanbench.report.facts.warnings import flagged_section

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
#: What a terminal shows after a sweep: the conclusion last, where the eye is.
ENDING = ("links", "problems", "trust", "flagged", "summary")


def facts(results: Results, keys: Sequence[str] | None = None) -> Document:
    """The document of the sections of these keys, those that have something to say.

    Args:
        keys: of `SECTIONS`; None for a report's, in the order in which it is read.
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
    """All sections of a report, in the order in which it is read."""
    figures = ["maps", "charts", "decompositions", "claims"]
    if results.are_several:
        # Several GPUs are what a reader compares; runs of one GPU differ in what they ran.
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
