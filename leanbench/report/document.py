"""A report as a document: what it says, for every renderer.

`leanbench.report.facts` and `leanbench.report.compare` make documents; `markdown`, `terminal` and
`page` show them. A document holds words, never markup.
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
    #: Smaller words behind these.
    note: str = ""
    #: What a pointer that rests on the words shows.
    title: str = ""
    #: Key of the section that the words lead to.
    link: str = ""
    #: Further words, folded away, and how many more there are that are not named.
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
    #: What a pointer that rests on the heading shows.
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells below headings."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Words, ...], ...]
    title: str = ""
    #: `cards`: a page shows each row as a card, with the second cell in large type. `list`: a
    #: terminal shows each row as a line. `wide`: a terminal may break it into several tables.
    #: `every row`: a page shows its own table of all columns in place of this one.
    layout: str = ""
    #: Rows that a terminal shows; None for all.
    most: int | None = None
    #: Where the rows are that a terminal leaves out.
    rest: str = ""
    #: What marks in the cells mean.
    note: str = ""


@dataclass(frozen=True)
class Sentence:
    """A statement, perhaps under a name, perhaps with a note on how it was come by."""

    words: Words
    name: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sentences:
    """Statements below one another."""

    items: tuple[Sentence, ...]
    #: `headline`: in large type. `facts`: under their names. `list`: a list. `hint` and `empty`:
    #: for who reads a page, of no use on a terminal. `note` and `banner`: must be seen.
    layout: str = "plain"


@dataclass(frozen=True)
class Figure:
    """A picture that only a page draws, from the rows that it holds."""

    key: str
    title: str
    note: str
    #: What the picture shows, for who does not see it.
    label: str


@dataclass(frozen=True)
class Figures:
    """Pictures side by side, whose reader chooses one series for all."""

    items: tuple[Figure, ...]
    #: `charts`, `maps` or `sides`.
    kind: str


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    key: str
    heading: str
    blocks: tuple[Block, ...]
    #: `open` or `closed`: a reader can fold the blocks away, or has to unfold them.
    folded: str = ""
    #: The tags of the document stand behind the heading.
    tagged: bool = True


Block = Sentences | Table | Figures | Section


@dataclass(frozen=True)
class Document:
    """Sections under a title."""

    title: str
    sections: tuple[Section, ...]
    #: What holds for all figures and must be seen with each: `predicted`, `warm L2`.
    tags: tuple[str, ...] = ()

    def only(self, *keys: str) -> Document:
        """The document of the sections of these keys, in this order; of those that it has."""
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
    """A table; columns without words are left out, but for the first.

    Args:
        headings: one that ends with a colon is of a column of numbers.
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
    """Statements without names."""
    return Sentences(tuple(Sentence(sentence) for sentence in words), layout)


def without_shared(labels: list[str]) -> tuple[str, list[str]]:
    """The words that all labels share, and each label without them; labels that are all alike stay
    as they are.
    """
    split = [label.split() for label in labels]
    shared = [word for word in split[0] if all(word in words for words in split)]
    rest = [" ".join(word for word in words if word not in shared) for words in split]
    return (" ".join(shared), rest) if all(rest) else ("", labels)
