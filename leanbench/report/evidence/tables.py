"""Tables and figures that documents publish, made from the rows of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from leanbench.core.errors import UserError
from leanbench.report.evidence import claims
from leanbench.report.evidence.declared import Declared, Picture, Scatter, Table, as_dict
from leanbench.report.evidence.facts import fact
from leanbench.report.evidence.pictures import Line, chart
from leanbench.report.evidence.places import link, place_of
from leanbench.report.evidence.query import NOISE, VERBS, Figures, Measured, format_of
from leanbench.report.evidence.scatter import Point, scatter
from leanbench.report.evidence.sources import CURRENT, Source, Sources, boards_of
from leanbench.report.evidence.wording import problem_words
from leanbench.report.facts.measured_claims import MeasuredClaim

T = TypeVar("T")

#: ``{peers: geomean cudnn/lean}``, ``{check/fuzz.txt: /all (\d+) passed/}``
_HOLE = re.compile(r"\{([\w./+-]+): ([^{}]+)\}")
#: ``median /took ([0-9.]+) us/ as 1``
_OF_LOG = re.compile(r"(?:(?P<verb>\w+) )?/(?P<pattern>.+)/(?: as (?P<format>\S+))?")
#: Words of a label that a table's other columns say.
_PLAIN = re.compile(r"[bhndcp]\d\S*|fp16|bf16|HND|NHD|device|nragged\S+|model=\S+|latent|dv\d+")


@dataclass(frozen=True)
class Published:
    """A table or figure as text."""

    text: str
    sources: tuple[Source, ...]
    #: Whether a kernel has no figure for a problem.
    has_gaps: bool = False


@dataclass
class Press:
    """The tables and figures of a checkout."""

    declared: Declared
    sources: Sources
    _used: list[Source] = field(default_factory=list)
    _made: dict[tuple[str, str], Published] = field(default_factory=dict)
    _read: dict[str, Figures] = field(default_factory=dict)

    def published(self, kind: str, name: str) -> Published:
        """A table in Markdown, or a figure of a sentence.

        Raises:
            UserError: there is none of that name, or a query of it has no answer.
        """
        if (kind, name) not in self._made:
            self._used = []
            make = self._table if kind == "table" else self._figure
            self._made[kind, name] = make(name)
        return self._made[kind, name]

    def _table(self, name: str) -> Published:
        table = _known(self.declared.tables, name, "table")
        if table.claims:
            measured = self._measured_claims(table.claims)
            head, rows = claims.table(measured, table.rows)
        elif table.columns:
            head, rows = list(table.columns), self._problems(table)
        else:
            head, rows = list(table.head), self._lines(table)
        lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
        gaps = bool(table.columns) and any("" in row for row in rows)
        return Published("\n".join(lines), self._taken(), gaps)

    def _figure(self, name: str) -> Published:
        text = self._fill(_known(self.declared.figures, name, "figure"))
        return Published(text, self._taken())

    def picture(self, picture: Picture | Scatter) -> str:
        """A chart as SVG.

        Raises:
            UserError: a query of it has no answer.
        """
        return self._scatter(picture) if isinstance(picture, Scatter) else self._lines_of(picture)

    def _scatter(self, of: Scatter) -> str:
        figures = self._figures(of.run)
        ratios = [(at, figures.value(of.ratio, at)) for at in figures.problems]
        names = [figures.cell(of.colour, at) for at, _ in ratios]
        points = [
            Point(at.problem.kv_bytes, ratio, of.names.get(name, name))
            for (at, ratio), name in zip(ratios, names, strict=True)
            if ratio is not None
        ]
        return scatter(of.title, self._fill(of.below), of.x, of.y, points)

    def _lines_of(self, picture: Picture) -> str:
        figures = self._figures(picture.run)
        problems = [of for of in figures.problems if of.has_words(picture.where)]
        name, word = picture.x
        places = [problem_words(of.problem)[word] for of in problems]
        lines = [
            Line(
                of_line,
                tuple(_divided(figures.value(query, of), picture.divisor) for of in problems),
                of_line in picture.limits,
            )
            for of_line, query in picture.lines.items()
        ]
        return chart(picture.title, picture.below, (name, places), picture.y, lines)

    def _taken(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(self._used))

    def _problems(self, table: Table) -> list[list[str]]:
        figures = self._figures(table.run)
        rows = [
            [
                self._cell(text, figures, at, self._words(name, at))
                for text in table.columns.values()
            ]
            for name, at in self._chosen(table, figures)
        ]
        if table.sort:
            return rows
        # Lines that begin alike stand together.
        first = list(dict.fromkeys(row[0] for row in rows))
        return sorted(rows, key=lambda row: first.index(row[0]))

    def _chosen(self, table: Table, figures: Figures) -> list[tuple[str, Measured]]:
        """The problems of a table with the names of their lines."""
        if table.rows:
            present = {of.problem.label: of for of in figures.problems}
            names = as_dict(table.rows)
            for label in names.values():
                if label not in present:
                    raise UserError(f"{table.run} has no problem {label!r}: mend the table's rows")
            return [(name, present[label]) for name, label in names.items()]
        chosen = [of for of in figures.problems if of.has_words(table.where)]
        if table.only:
            chosen = [of for of in chosen if figures.holds(table.only, of)]
        if table.sort:
            chosen.sort(key=lambda of: figures.value(table.sort, of) or 0.0)
        return [(of.problem.label, of) for of in chosen]

    def _words(self, name: str, at: Measured) -> dict[str, str]:
        kind = self._kind(at.problem.label)
        return {**problem_words(at.problem), "name": name, "kind": kind}

    @staticmethod
    def _cell(text: str, figures: Figures, at: Measured, words: Mapping[str, str]) -> str:
        return text.format_map(words) if "{" in text else figures.cell(text, at)

    def _kind(self, label: str) -> str:
        special = [word for word in label.split() if not _PLAIN.fullmatch(word)]
        words = [self.declared.words.get(word, word) for word in special]
        return ", ".join(filter(None, words)) or "plain"

    def _lines(self, table: Table) -> list[list[str]]:
        return [[self._fill(cell) for cell in line] for line in table.lines]

    def _measured_claims(self, name: str) -> list[MeasuredClaim]:
        """What runs have to say of the paper's claims; the runs that are used are."""
        sources = self.sources_of((name,))
        measured = claims.measured([source.run for source in sources])
        runs = {claim.run for claim in measured}
        self._used += [source for source in sources if source.run.name in runs]
        return measured

    def _fill(self, text: str) -> str:
        return _HOLE.sub(lambda hole: self._hole(hole[1], hole[2]), text)

    def _hole(self, name: str, query: str) -> str:
        if of_log := _OF_LOG.fullmatch(query):
            return self._from_log(name, of_log)
        if query.startswith(claims.VERDICTS):
            return claims.verdicts(self._measured_claims(name), query)
        figures = self._figures(name)
        answer = fact(query, self.sources_of((name,)))
        return figures.answer(query) if answer is None else answer

    def _from_log(self, name: str, query: re.Match[str]) -> str:
        """What a pattern finds first in a log or a run's file, or a verb makes of all it finds."""
        path = self.sources.root / place_of(name)
        if not path.is_file():
            raise UserError(f"there is no log {place_of(name)}")
        self._used += self.sources.of_file(name)
        verb, pattern, format_ = query.groups()
        found = re.findall(pattern, path.read_text(encoding="utf-8"))
        if not found:
            raise UserError(f"{name} has no line like {pattern!r}: mend the pattern")
        if verb and verb not in VERBS:
            raise UserError(f"verb {verb!r} is not known, choose from {', '.join(VERBS)}")
        if not verb and not format_:
            return found[0]
        try:
            figures = [float(figure) for figure in found]
        except ValueError as error:
            raise UserError(f"{name}: {pattern!r} finds more than numbers: {error}") from error
        return format_of(format_ or "us")(VERBS[verb](figures) if verb else figures[0])

    def sources_of(self, names: Iterable[str]) -> tuple[Source, ...]:
        """Runs by their names, or the names of sets."""
        runs = [run for name in names for run in self.declared.sets.get(name, (name,))]
        return tuple(self.sources[run] for run in runs)

    def _figures(self, name: str) -> Figures:
        sources = self.sources_of((name,))
        self._used += sources
        if name not in self._read:
            runs = tuple(source.run for source in sources)
            self._read[name] = Figures(runs, tuple(self.declared.own))
        return self._read[name]


def caption(published: Published, sources: Sources, document: str) -> str:
    """The line below a table of a document: runs, days, GPUs, kernels, and what marks and gaps in
    the table mean.
    """
    alike: dict[tuple[str, str, str], list[Source]] = {}
    for source in published.sources:
        kernels = source.kernels[0] if source.kernels else ""
        alike.setdefault((source.date, sources.state(source), kernels), []).append(source)
    runs = "; ".join(_origin_words(of, state, document) for (_, state, _), of in alike.items())
    sentences = [f"{'Run' if len(published.sources) == 1 else 'Runs'}: {runs}."]
    if NOISE in published.text:
        sentences.append(f"{NOISE}: timed with noise.")
    if published.has_gaps:
        sentences.append("An empty cell: the kernel does not take it, or was not run.")
    return " ".join(sentences)


def _origin_words(of: Sequence[Source], state: str, document: str) -> str:
    links = [link(source.name, document) for source in of]
    kernels = f"kernels {of[0].kernels[0]}" if state == CURRENT else f"**{state}**"
    return ", ".join(filter(None, (*links, of[0].date, boards_of(of), kernels)))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _divided(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _known(things: Mapping[str, T], name: str, kind: str) -> T:
    if name not in things:
        raise UserError(f"no {kind} {name!r} is declared in reports/evidence.toml: declare it")
    return things[name]
