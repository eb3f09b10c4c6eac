"""Warnings of rows, and reasons of rows that are not `ok`, grouped.

Sentences that differ only in numbers are one group, shown by the worst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    from leanbench.records.row import Row

#: Maximum number of problems named in a group.
NAMED = 20
#: `Warned.kind` of a warning. Otherwise it is the row's status.
WARNING = "warning"

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_PERCENT = re.compile(rf"({_NUMBER.pattern}) ?%")

#: Rows with the names of their runs; an empty name is not shown.
RunRows = Sequence[tuple["Row", str]]


@dataclass(frozen=True)
class Warned:
    """Rows of a kernel that share a sentence, except for its numbers."""

    kernel: str
    kind: str
    #: Sentence with the largest numbers, percentages first.
    sentence: str
    #: Labels of the first `NAMED` problems, the worst first.
    problems: tuple[str, ...]
    #: Names of the runs.
    runs: tuple[str, ...]
    #: Number of rows.
    count: int
    #: True if the sentences of the rows differ.
    varies: bool


def flagged(rows: RunRows) -> list[Warned]:
    """Group the rows that are not `ok` by status and reason."""
    return _group(
        (row, run, row.status, row.reason or "no reason given")
        for row, run in rows
        if row.status != "ok"
    )


def warned(rows: RunRows) -> list[Warned]:
    """Group the warnings of rows of any status."""
    return _group((row, run, WARNING, text) for row, run in rows for text in row.warnings or ())


def label(row: Row) -> str:
    return AttentionProblem.from_dict(row.problem).label


def _group(entries: Iterable[tuple[Row, str, str, str]]) -> list[Warned]:
    """Group entries of row, run, kind and sentence."""
    groups: dict[tuple[str, str, str], dict[int, tuple[Row, str, str]]] = {}
    for row, run, kind, sentence in entries:
        by_row = groups.setdefault((row.kernel, kind, _NUMBER.sub("#", sentence)), {})
        _, _, previous = by_row.get(id(row), (row, run, sentence))
        by_row[id(row)] = row, run, max(previous, sentence, key=_severity)
    result = []
    for (kernel, kind, _), by_row in groups.items():
        members = list(by_row.values())
        worst = max(members, key=lambda member: _severity(member[2]))
        first = [worst, *(member for member in members if member is not worst)][:NAMED]
        problems = tuple(label(row) for row, _, _ in first)
        runs = tuple(dict.fromkeys(run for _, run, _ in members if run))
        varies = len({sentence for _, _, sentence in members}) > 1
        result.append(Warned(kernel, kind, worst[2], problems, runs, len(members), varies))
    return result


def _severity(sentence: str) -> tuple[list[float], list[float]]:
    """Rank a sentence by its percentages, then by its other numbers."""
    return _numbers(_PERCENT.findall(sentence)), _numbers(_NUMBER.findall(sentence))


def _numbers(texts: Iterable[str]) -> list[float]:
    # A version such as 2.11.0 is no number.
    return [float(text.replace(",", "")) for text in texts if text.count(".") < 2]
