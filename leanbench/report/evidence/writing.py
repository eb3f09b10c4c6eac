"""Writing the documents again, and the pages and pictures that are made with them."""

from __future__ import annotations

from leanbench.report import write_report
from leanbench.report.evidence.documents import Evidence
from leanbench.report.evidence.pages import INDEX, evidence_page, index_page
from leanbench.report.evidence.sources import EVIDENCE, FOLDER


def differing(evidence: Evidence) -> dict[str, str]:
    """What is not as it should be: names and what they should be."""
    made = {EVIDENCE: evidence_page(evidence), INDEX: index_page(evidence), **evidence.pictures()}
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
        write_report(first, (evidence.sources.folder / name).parent, ["html"], others)
    return [(FOLDER / name).as_posix() for name in evidence.declared.pages]
