"""Faults of the evidence that writing the documents again does not mend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from leanbench.report.evidence.documents import (
    HISTORIES,
    Evidence,
    figures_by_hand,
    has_figure,
    paragraphs_without_marks,
    quotes_in_sample,
    typed_into_sentences,
    typed_passages,
)
from leanbench.report.evidence.places import folder_of, name_of, place_of
from leanbench.report.evidence.sources import Source

#: What only a link without a mark may say.
_CLAIM = re.compile(r"(?:kernels as they are|present kernels|current kernels|kernels of today)")
#: Relative: samples are written with four decimals, and a launch takes 4 us and more.
_ROUNDING = 2e-5
_NAMED = re.compile(r"`((?:tests|leanbench|kernels|docs)/[\w./-]+)`")


def faults(evidence: Evidence) -> list[str]:
    """A sentence for each; none where all is well."""
    return [
        *_undeclared(evidence),
        *_records(evidence),
        *_pictures(evidence),
        *_pages(evidence),
        *_unused(evidence),
        *_unquoted(evidence),
        *_reasons(evidence),
        *_seeds(evidence),
        *_rows(evidence),
        *(fault for name in evidence.documents for fault in _of_document(evidence, name)),
    ]


def _undeclared(evidence: Evidence) -> Iterator[str]:
    there, declared = evidence.sources.by_name.keys(), evidence.declared.purposes.keys()
    for name in sorted(there - declared):
        yield f"{place_of(name)}: say in [purposes] what it is there for, or delete it"
    for name in sorted(declared - there):
        yield f"[purposes] has {name}, which is not under {folder_of(name)}: leave it out"


def _records(evidence: Evidence) -> Iterator[str]:
    """Those that are not there, and those that present results are of."""
    declared = evidence.declared
    shown = {
        source.name: f"{quote.document}: {quote.kind} {quote.name}"
        for quote in evidence.quotes
        for source in quote.sources
        if quote.kind != "link"
    }
    for name, picture in declared.pictures.items():
        shown |= {source.name: f"picture {name}" for source in evidence.runs((picture.run,))}
    for name, runs in declared.pages.items():
        shown |= {source.name: f"page {name}" for source in evidence.runs(runs)}
    for name in sorted(evidence.sources.records):
        if name not in evidence.sources.by_name:
            yield f"[records] has {name}, which is not under {folder_of(name)}: leave it out"
        elif name in shown and name not in declared.shown_records:
            yield f"[records] has {name}, which {shown[name]} shows as a result: leave it out"
    for name in declared.shown_records:
        if name not in shown or name not in evidence.sources.records:
            yield f"shown_records has {name}, which is no record that is shown: leave it out"


def _pictures(evidence: Evidence) -> Iterator[str]:
    """Those that nothing draws again. `leanbench trace` writes its own."""
    folders = [evidence.root / folder for folder in evidence.sources.folders]
    for path in sorted(path for folder in folders for path in folder.rglob("*.svg")):
        name = name_of(path.relative_to(evidence.root))
        if path.name != "trace.svg" and name not in evidence.declared.pictures:
            yield f"{place_of(name)} is not in [pictures]: declare or delete it"


def _pages(evidence: Evidence) -> Iterator[str]:
    """Pages of `leanbench report` that were made before a run in them."""
    for name, runs in evidence.declared.pages.items():
        path = evidence.root / place_of(name)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for source in evidence.runs(runs):
            created = str(source.manifest["created"])[:16].replace("T", " ")
            if f"{created} UTC" not in text:
                yield (
                    f"{place_of(name)} lacks {source.name} of {created}: run `leanbench evidence"
                    " --pages`"
                )


def _unused(evidence: Evidence) -> Iterator[str]:
    used = {(quote.kind, quote.name) for quote in evidence.quotes}
    for kind, names in (("table", evidence.declared.tables), ("figure", evidence.declared.figures)):
        for name in names:
            if (kind, name) not in used:
                yield f"{kind} {name} is in no document: leave its declaration out"


def _unquoted(evidence: Evidence) -> Iterator[str]:
    quoted = {source.name for quote in evidence.quotes for source in quote.sources}
    for name, purpose in evidence.declared.purposes.items():
        files = [evidence.root / file for file in _NAMED.findall(purpose)]
        if name not in quoted and not any(_names(file, name) for file in files):
            yield (
                f"{place_of(name)} is quoted by no document: delete it, or name the file that uses"
                " it"
            )


def _reasons(evidence: Evidence) -> Iterator[str]:
    used = {
        reason
        for document in evidence.documents
        for reason, _ in typed_passages(evidence, document)
    }
    for reason in evidence.declared.typed:
        if reason not in used:
            yield f"[typed] has {reason}, for which no document has a figure: leave it out"


def _names(file: Path, name: str) -> bool:
    return file.is_file() and Path(name).name in file.read_text(encoding="utf-8")


def _seeds(evidence: Evidence) -> Iterator[str]:
    for source in evidence.sources.by_name.values():
        if source.seed and source.seed not in evidence.declared.seeds:
            yield f"{place_of(source.name)} was drawn from seed {source.seed}: add it to [seeds]"


def _rows(evidence: Evidence) -> Iterator[str]:
    """Rows of published runs that are not as they were taken."""
    published = [quote.sources for quote in evidence.quotes if quote.kind != "link"]
    for source in dict.fromkeys(source for sources in published for source in sources):
        if source.has_rows:
            yield from _rows_of(source)


def _rows_of(source: Source) -> Iterator[str]:
    from leanbench.records.samples import SAMPLES, read_samples

    rows = {row.cell: row for row, _ in source.run.results}
    try:
        samples = read_samples(source.path)
    except ValueError:
        yield f"{place_of(source.name)}/{SAMPLES} is damaged: put it back"
        return
    for cell, row in rows.items():
        taken = samples.get(cell)
        if row.latency_us is None:
            continue
        if taken is None:
            yield f"{place_of(source.name)}: {cell} has no samples: put them back"
        elif abs(median(taken.samples_us) / row.latency_us - 1) > _ROUNDING:
            yield f"{place_of(source.name)}: {cell} is not the median of its samples: put it back"
    # A run that was stopped lacks cells at its end alone.
    cells = source.manifest.get("cells") or []
    taken_at = [at for at, cell in enumerate(cells) if cell in rows]
    for cell in cells[: max(taken_at, default=0)]:
        if cell not in rows:
            yield f"{place_of(source.name)}: {cell} has no row, cells after it have: put it back"


def _of_document(evidence: Evidence, name: str) -> Iterator[str]:
    yield from paragraphs_without_marks(evidence, name)
    yield from quotes_in_sample(evidence, name)
    for line in evidence.text(name).splitlines():
        if line.lstrip().startswith(("<!-- figure:", "<!-- typed:")):
            start = line.lstrip()[:40]
            yield f"{name}: a line that starts with a marker is shown as HTML: move {start!r}"
    if name in HISTORIES:
        return
    for claim in _CLAIM.findall(evidence.text(name)):
        yield f"{name} says {claim!r}, which goes stale: link the run, which is marked when it is"
    for figure in typed_into_sentences(evidence, name):
        yield (
            f"{name}: a figure typed into a sentence, {figure!r}: make it from a run, or put `<!--"
            " typed: REASON -->` and `<!-- end -->` around it, with a reason of [typed]"
        )
    for reason, passage in typed_passages(evidence, name):
        if reason not in evidence.declared.typed:
            known = ", ".join(evidence.declared.typed)
            yield f"{name}: typed {reason!r} is not in [typed], choose from {known or 'none'}"
        if not has_figure(passage):
            yield f"{name}: {passage[:40]!r} has no figure: leave the markers around it out"
    if name not in evidence.declared.by_hand:
        for row in figures_by_hand(evidence, name):
            yield f"{name}: a figure typed into a table, {row[:60]!r}: make it from a run"
