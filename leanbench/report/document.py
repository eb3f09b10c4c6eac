"""Document model that every renderer shares.

`leanbench.report.facts` and `leanbench.report.compare` make documents; `leanbench.report.markdown`,
`leanbench.report.html` and `leanbench.cli.document` render them. A document has no markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Text:
    """Words with a role; plain words are a `str`."""

    words: str
    #: `best`, `code`, `strong`, `status`, `verdict`, or empty.
    role: str = ""
    #: Small text after the words.
    note: str = ""
    #: Tooltip.
    title: str = ""
    #: Key of the section that the words link to.
    link: str = ""
    #: Further words, folded away, and the number of those that are not listed.
    more: tuple[str, ...] = ()
    unnamed: int = 0

    def __str__(self) -> str:
        return f"{self.words} ({self.note})" if self.note else self.words


Words = str | Text


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below headings."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Words, ...], ...]
    title: str = ""
    #: `cards`: a page shows each row as a card, with the second cell in large type. `list`: a
    #: terminal shows each row as a line. `every row`: a page shows its own table of all columns.
    layout: str = ""
    #: Maximum number of rows on a terminal; None for all.
    most: int | None = None
    #: Reference to the rows that a terminal omits.
    rest: str = ""
    #: Meaning of marks in the cells.
    note: str = ""


@dataclass(frozen=True)
class Sentence:
    """A statement with an optional name and an optional note on its origin."""

    words: Words
    name: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sentences:
    """A sequence of statements."""

    items: tuple[Sentence, ...]
    #: `headline`: large type. `facts`: under their names. `list`: a list. `hint` and `empty`: on a
    #: page only. `note` and `banner`: prominent.
    layout: str = "plain"


@dataclass(frozen=True)
class Figure:
    """A picture that only a page draws, from its rows."""

    key: str
    title: str
    note: str
    #: Text alternative.
    label: str


@dataclass(frozen=True)
class Figures:
    """Pictures side by side with one selection of the series."""

    items: tuple[Figure, ...]
    #: `charts`, `maps` or `sides`.
    kind: str


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    key: str
    heading: str
    blocks: tuple[Block, ...]
    #: `open` or `closed`: initial state of foldable blocks; empty if not foldable.
    folded: str = ""
    #: True if the document's tags follow the heading.
    tagged: bool = True


Block = Sentences | Table | Figures | Section


@dataclass(frozen=True)
class Document:
    """Sections under a title."""

    title: str
    sections: tuple[Section, ...]
    #: Properties of all figures that each must show: `predicted`, `warm L2`.
    tags: tuple[str, ...] = ()

    def only(self, *keys: str) -> Document:
        """Select sections by key, in the order of the keys."""
        by_key = {section.key: section for section in self.sections}
        return replace(self, sections=tuple(by_key[key] for key in keys if key in by_key))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Words]],
    title: str = "",
    layout: str = "",
    *,
    keep_empty: bool = False,
) -> Table:
    """Build a table without its empty columns, but with the first.

    Args:
        headings: a final colon marks a column of numbers.
    """
    columns = [
        Column(heading.removesuffix(":"), numeric=heading.endswith(":")) for heading in headings
    ]
    shown = [
        number
        for number in range(len(columns))
        if keep_empty or number == 0 or any(str(row[number]) for row in rows)
    ]
    return Table(
        tuple(columns[number] for number in shown),
        tuple(tuple(row[number] for number in shown) for row in rows),
        title,
        layout,
    )


def sentences(*words: Words, layout: str = "plain") -> Sentences:
    """Build statements without names."""
    return Sentences(tuple(Sentence(sentence) for sentence in words), layout)


def without_shared(labels: list[str]) -> tuple[str, list[str]]:
    """Split labels into their common words and the remaining ones; equal labels stay whole."""
    split = [label.split() for label in labels]
    shared = [word for word in split[0] if all(word in words for words in split)]
    rest = [" ".join(word for word in words if word not in shared) for words in split]
    return (" ".join(shared), rest) if all(rest) else ("", labels)
