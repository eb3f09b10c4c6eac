"""Documents with what they quote: tables and figures between markers, and links to runs and logs.

    <!-- table: NAME -->
    ...
    <!-- end -->
    `lean` has <!-- figure: NAME -->1.10x<!-- end --> its speed ([run](reports/h200/peers))
    a row is noisy above <!-- typed: REASON -->0.5%<!-- end -->

What stands between the markers of tables and figures, and the words behind a link to a run that is
not current, are written by `leanbench evidence --write`. A figure that is typed into a sentence has
a reason of `[typed]` in the declaration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from leanbench.core.errors import UserError
from leanbench.report.evidence import declared
from leanbench.report.evidence.places import name_of, place_of
from leanbench.report.evidence.sources import (
    CURRENT,
    EVIDENCE,
    OLDER,
    OTHER_SETTINGS,
    RECORD,
    Source,
    Sources,
)
from leanbench.report.evidence.tables import Press, Published, caption

#: Entries of these are of the kernels of their day, as they say at their head.
HISTORIES = ("docs/performance-log.md", "CHANGELOG.md")
_TABLE = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure: ([a-z0-9-]+) -->).*?(<!-- end -->)")
#: States that a link is marked with.
_STALE = (OLDER, OTHER_SETTINGS)
_LINK = re.compile(rf"(\]\(([^)\s]+)\))(?: \((?:{'|'.join(_STALE)})\))?")
#: What a section says of drawn problems that are not held out.
IN_SAMPLE = "in sample"
_MARKER = re.compile(r"<!-- (table|figure): ([a-z0-9-]+) -->")
#: What somebody has measured: ``1.20x``, ``92%``, ``8.72 us``, ``17``.
_UNIT = r" ?(?:x|%|us|ms|TB/s|GB/s|mJ)"
_MEASURED = rf"(?:\d[\d,]*\.\d+(?:{_UNIT})?|\d[\d,]*{_UNIT})"
#: A line of a table with a cell that is a figure which somebody has measured.
_FIGURE_ROW = re.compile(rf"^ *\|.*\| *[\\*]*{_MEASURED}[\\*]*(?: \([^|]*\))? *\|.*$", re.MULTILINE)
#: A passage that is typed and has figures which no run answers, with a reason of `[typed]`.
_TYPED = re.compile(r"<!-- typed: ([a-z-]+) -->((?:(?!<!--).)*)<!-- end -->", re.DOTALL)
#: Figures of sentences: ``1.39x``, ``4.6%``, ``1,605.5 us``, ``259 of the 287``, ``1.3 times``.
_OF_SENTENCE = re.compile(
    r"\b\d+(?:\.\d+)?x(?!\w)|\b\d[\d.,]* ?(?:%|(?:us|µs|ms|TB/s|GB/s|mJ|J)\b)"
    r"|\b\d+ of (?:the |its )?\d+\b|\b\d+\.\d+ times\b"
)
#: Code, lines of tables, where links lead, and what an interval is called.
_NO_SENTENCE = re.compile(
    r"^```.*?^```|^(?: {4}|\t| *\|).*?$|`[^`]*`|\]\([^)]*\)|\b95%\s(?:confidence\s)?interval",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Quote:
    """One table, figure or link of a document."""

    document: str
    #: `table`, `figure` or `link`.
    kind: str
    name: str
    sources: tuple[Source, ...]

    @property
    def is_record(self) -> bool:
        """Of the kernels of its day, whatever they are now."""
        return self.kind == "link" and self.document in HISTORIES


class Evidence:
    """The documents of a checkout and what they rest on.

    Raises:
        UserError: the declaration cannot be read, or a query in it has no answer.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.declared = declared.read(root)
        self.sources = Sources(root, chain(*self.declared.records.values()))
        self._press = Press(self.declared, self.sources)

    @cached_property
    def documents(self) -> list[str]:
        """Those that are written by people, relative to the checkout."""
        docs = sorted(path.relative_to(self.root) for path in self.root.glob("docs/*.md"))
        named = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *map(Path.as_posix, docs)]
        return [name for name in named if (self.root / name).exists() and name != EVIDENCE]

    def rendered(self) -> dict[str, str]:
        """What they should be, by name."""
        return {name: self._rendered(name) for name in self.documents}

    def pictures(self) -> dict[str, str]:
        """The declared charts as they should be, by file."""
        drawn = self.declared.pictures.items()
        return {place_of(name).as_posix(): self._press.picture(picture) for name, picture in drawn}

    def text(self, name: str) -> str:
        """Raises UserError where it is no text."""
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.root / name} is not UTF-8 text: mend it") from None

    @cached_property
    def quotes(self) -> list[Quote]:
        """All of all documents."""
        return [quote for name in self.documents for quote in self._quotes(name)]

    def state(self, sources: tuple[Source, ...]) -> str:
        """The worst of theirs."""
        states = [self.sources.state(source) for source in sources]
        return next((state for state in (*_STALE, RECORD) if state in states), CURRENT)

    def held_out(self, source: Source) -> str:
        """Return ``yes`` if a run's problems were drawn after the last change of its kernels and
        settings, or why that cannot be said. Empty for a grid.
        """
        if not source.seed:
            return ""
        first = self.declared.seeds.get(source.seed, "")
        if first == "tuning":
            return f"no: {IN_SAMPLE}, settings were chosen on the problems of seed {source.seed}"
        if first.split() != [*source.kernels, *source.settings]:
            return f"no: seed {source.seed} was used before, with {first or 'unknown'}"
        if source.of_grid and (known := self._measured_before(source)):
            return f"no: {IN_SAMPLE}, runs of earlier kernels have {known} of the problems"
        ids = {row.run_id for row, _ in source.run.results}
        if None in ids:
            return "not shown: rows without a run id"
        # Of a merged run: those of its shards.
        parts = source.manifest.get("merged") or [source.manifest]
        return (
            "yes" if ids <= {part.get("id") for part in parts} else f"no: rows of {len(ids)} runs"
        )

    def _measured_before(self, source: Source) -> int:
        """Count the problems of a run that a run of earlier kernels has."""
        earlier = (
            {problem for _, problem in other.run.results}
            for other in self.sources.by_name.values()
            if other.has_rows and other.kernels != source.kernels and other.date <= source.date
        )
        return len({problem for _, problem in source.run.results} & set().union(*earlier))

    def published(self, kind: str, name: str) -> Published:
        return self._press.published(kind, name)

    def runs(self, names: Iterable[str]) -> tuple[Source, ...]:
        """Runs by their names, or the names of sets."""
        return self._press.sources_of(names)

    def _rendered(self, name: str) -> str:
        def table(block: re.Match[str]) -> str:
            published = self.published("table", block[2])
            below = caption(published, self.sources, name)
            return f"{block[1]}{published.text}\n\n{below}\n{block[3]}"

        def figure(block: re.Match[str]) -> str:
            return f"{block[1]}{self.published('figure', block[2]).text}{block[3]}"

        def link(block: re.Match[str]) -> str:
            state = self.state(self._target(name, block[2]))
            return f"{block[1]} ({state})" if state in _STALE else block[1]

        text = self.text(name)
        if name not in HISTORIES:
            text = "".join(
                part if _TABLE.fullmatch(part) else _LINK.sub(link, part) for part in _parts(text)
            )
        return _FIGURE.sub(figure, _TABLE.sub(table, text))

    def _quotes(self, name: str) -> Iterator[Quote]:
        text = self.text(name)
        for kind, pattern in (("table", _TABLE), ("figure", _FIGURE)):
            for block in pattern.finditer(text):
                sources = self.published(kind, block[2]).sources
                yield Quote(name, kind, block[2], sources)
        outside = "".join(_outside(text))
        linked = [self._target(name, block[2]) for block in _LINK.finditer(outside)]
        for sources in dict.fromkeys(filter(None, linked)):
            yield Quote(name, "link", sources[0].name, sources)

    def _target(self, document: str, link: str) -> tuple[Source, ...]:
        """The run or log that a link of a document leads to, or those in a page or picture."""
        if "://" in link:
            return ()
        name = name_of(Path(os.path.normpath(Path(document).parent / link.partition("#")[0])))
        if name in self.declared.pages:
            return self.runs(self.declared.pages[name])
        if name in self.declared.pictures:
            return self.runs((self.declared.pictures[name].run,))
        return self.sources.of_file(name)


def _parts(text: str) -> list[str]:
    """The text cut into tables between markers and what is around them."""
    parts, end = [], 0
    for block in _TABLE.finditer(text):
        parts += [text[end : block.start()], block[0]]
        end = block.end()
    return [*parts, text[end:]]


def paragraphs_without_marks(evidence: Evidence, name: str) -> list[str]:
    """Paragraphs with a figure that is not current and without the words that say so."""
    faults = []
    for paragraph in re.split(r"\n\s*\n", evidence.text(name)):
        for block in _FIGURE.finditer(paragraph):
            state = evidence.state(evidence.published("figure", block[2]).sources)
            if state in _STALE and state not in paragraph:
                faults.append(f"{name}: figure {block[2]} is of {state}: link its run beside it")
    return faults


def quotes_in_sample(evidence: Evidence, name: str) -> list[str]:
    """Name drawn tables and figures that are not held out, in sections that do not say so."""
    return [
        f"{name}: {kind} {quoted} is of {source.name}, held out: {state}: draw from a new seed, or"
        f" say that it is {IN_SAMPLE}"
        for section in re.split(r"^(?=#)", evidence.text(name), flags=re.MULTILINE)
        if IN_SAMPLE not in section
        for kind, quoted in _MARKER.findall(section)
        for source in evidence.published(kind, quoted).sources
        if (state := evidence.held_out(source)) not in ("", "yes")
    ]


def figures_by_hand(evidence: Evidence, name: str) -> list[str]:
    """Lines of tables with figures outside markers."""
    return [row for part in _outside(evidence.text(name)) for row in _FIGURE_ROW.findall(part)]


def typed_into_sentences(evidence: Evidence, name: str) -> list[str]:
    """Figures of sentences, outside markers."""
    return _OF_SENTENCE.findall(_TYPED.sub("", _sentences(evidence, name)))


def typed_passages(evidence: Evidence, name: str) -> list[tuple[str, str]]:
    """Reasons and words of the passages that say why their figures are typed."""
    return _TYPED.findall(_sentences(evidence, name))


def has_figure(passage: str) -> bool:
    """Whether a passage has what would be a fault outside markers."""
    return bool(_OF_SENTENCE.search(passage))


def _sentences(evidence: Evidence, name: str) -> str:
    """A document without its code, tables, links' targets, and figures between markers."""
    return _NO_SENTENCE.sub("", _FIGURE.sub("", "".join(_outside(evidence.text(name)))))


def _outside(text: str) -> list[str]:
    """What is between the tables between markers."""
    return [part for part in _parts(text) if not _TABLE.fullmatch(part)]
