"""Writing the documents again, and the pages and pictures that are made with them."""

from __future__ import annotations

from leanbench.report import write_report
from leanbench.report.evidence.documents import Evidence
from leanbench.report.evidence.pages import evidence_page, index_of, index_page
from leanbench.report.evidence.places import place_of
from leanbench.report.evidence.sources import EVIDENCE


def differing(evidence: Evidence) -> dict[str, str]:
    """What is not as it should be: names and what they should be."""
    indexes = {
        index_of(folder): index_page(evidence, folder) for folder in evidence.sources.folders
    }
    made = {EVIDENCE: evidence_page(evidence), **indexes, **evidence.pictures()}
    return {
        name: text
        for name, text in {**evidence.rendered(), **made}.items()
        if not (evidence.root / name).exists() or evidence.text(name) != text
    }


def write(evidence: Evidence) -> list[str]:
    """Writes what differs; the names."""
    texts = differing(evidence)
    for name, text in texts.items():
        (evidence.root / name).write_text(text, encoding="utf-8")
    return list(texts)


def write_pages(evidence: Evidence) -> list[str]:
    """Makes the pages of `leanbench report` again from their runs; the names."""
    for name, runs in evidence.declared.pages.items():
        first, *others = [source.path for source in evidence.runs(runs)]
        write_report(first, (evidence.root / place_of(name)).parent, ["html"], others)
    return [place_of(name).as_posix() for name in evidence.declared.pages]
