"""Declaration of what the documents publish, `reports/evidence.toml`: tables and figures with the
queries that make them, and what each run and log is there for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError

DECLARATION = Path("reports") / "evidence.toml"
#: Parts that are lists, and those whose values are.
_LISTS, _OF_LISTS = ("own", "shown_records"), ("sets", "pages", "records")


@dataclass(frozen=True)
class Table:
    """A table: a line for each problem of a run or each claim of the paper, or lines that are
    written out.
    """

    title: str
    #: A run, or a set of them: a line for each of its problems.
    run: str = ""
    #: A run, or a set of them: a line for each claim of the paper that they have measured.
    claims: str = ""
    #: Words of the labels of the problems that have a line.
    where: str = ""
    #: A query with a bound that they hold to.
    only: str = ""
    #: A query by whose figures they stand, the lowest first.
    sort: str = ""
    #: Labels of those problems in their order; a mapping gives each line its name. Of claims: those
    #: that have lines, ``7a: LA over FA2 at 512k``.
    rows: Sequence[str] | Mapping[str, str] = ()
    #: By heading: words about the problem (``{batch} x {context}``), or a query.
    columns: Mapping[str, str] = field(default_factory=dict)
    #: Headings of the lines below.
    head: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Picture:
    """A line chart: a line for each query over the problems of a run."""

    title: str
    below: str
    run: str
    #: Words of the labels of the problems.
    where: str
    #: Name of the x axis, and the word about a problem that stands at its place: ``context``.
    x: Sequence[str]
    #: Name and unit of the y axis.
    y: str
    #: Queries by the names of the lines.
    lines: Mapping[str, str]
    #: Of these, limits.
    limits: Sequence[str] = ()
    #: What figures are divided by: 1000 draws microseconds as milliseconds.
    divisor: float = 1


@dataclass(frozen=True)
class Scatter:
    """A scatter chart: a point for each problem of a run, over the bytes of its KV cache."""

    title: str
    #: Text with queries in braces.
    below: str
    #: A run, or a set of them.
    run: str
    x: str
    y: str
    #: A query: the ratio of a problem.
    ratio: str
    #: A query for the name that gives a point its colour, and what the names mean.
    colour: str
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """Content of the declaration."""

    tables: Mapping[str, Table]
    #: By file, named like a run.
    pictures: Mapping[str, Picture | Scatter]
    #: By name: text with queries in braces.
    figures: Mapping[str, str]
    #: Runs by the name of a set.
    sets: Mapping[str, Sequence[str]]
    #: What each run or log is there for.
    purposes: Mapping[str, str]
    #: Runs and logs that no change of the kernels makes stale, by the reason: what a choice was
    #: made with, what a library or the instrument did.
    records: Mapping[str, Sequence[str]]
    #: The runs in each page of `leanbench report`.
    pages: Mapping[str, Sequence[str]]
    #: Seeds that problems were drawn from: `tuning`, or the hashes of the kernels and settings of
    #: the first run, ``edda59e37ec4 71d3c2b0a9ff``.
    seeds: Mapping[str, str]
    #: What a word of a label is called in a table.
    words: Mapping[str, str]
    #: Beginnings of the names of this project's kernels: all others are libraries'.
    own: Sequence[str]
    #: Why a document has tables of figures that are not made from a run.
    by_hand: Mapping[str, str]
    #: Records that documents make figures of, with words beside them that say what they are of.
    shown_records: Sequence[str] = ()
    #: Why a figure of a sentence is typed: words of `<!-- typed: WORD -->` and what they mean.
    typed: Mapping[str, str] = field(default_factory=dict)


def read(root: Path) -> Declared:
    """The declaration of a checkout.

    Raises:
        UserError: there is none, or it is not as `Declared` says.
    """
    path = root / DECLARATION
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"there is no {path}: `leanbench evidence` runs in a checkout of leanbench"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML file ({error}): mend it") from None
    try:
        tables = {name: Table(**fields) for name, fields in content.pop("tables").items()}
        drawn = content.pop("pictures", {})
        pictures = {name: _picture(fields) for name, fields in drawn.items()}
        _refuse_other_types(content)
        return Declared(tables, pictures, **content)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no declaration of evidence ({error}): mend it") from None


def _refuse_other_types(content: Mapping[str, Any]) -> None:
    """Raises TypeError for the first value that is not of the type that `Declared` gives it."""
    for part, values in content.items():
        wanted, word = (list, "a list") if part in _LISTS + _OF_LISTS else (str, "text")
        for name, value in {"": values}.items() if part in _LISTS else values.items():
            if not isinstance(value, wanted):
                raise TypeError(f"{part} {name}".rstrip() + f" is {value!r}, not {word}")


def _picture(fields: Mapping[str, Any]) -> Picture | Scatter:
    return Scatter(**fields) if "ratio" in fields else Picture(**fields)


def as_dict(value: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """The labels of a table's problems by the names of their lines."""
    return dict(value) if isinstance(value, Mapping) else dict(zip(value, value, strict=True))
