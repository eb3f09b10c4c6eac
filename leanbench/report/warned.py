"""Warnings of rows and reasons of those that did not end `ok`, gathered: the same sentence about
many rows is read once, with its worst example.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbench.core.problem import AttentionProblem

#: Problems named in full for one sentence.
NAMED = 20
#: `Warned.kind` of a warning; of a row that did not end `ok`, it is the row's status.
WARNING = "warning"

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_PERCENT = re.compile(rf"({_NUMBER.pattern}) ?%")


@dataclass(frozen=True)
class Warned:
    """Rows of one kernel of which one sentence is true, its numbers aside."""

    kernel: str
    kind: str
    #: The row's with the largest numbers, percentages first.
    sentence: str
    #: Labels of the first `NAMED` problems, that of `sentence` in front.
    problems: tuple[str, ...]
    #: Names of the runs that have them, if the rows say.
    runs: tuple[str, ...]
    #: Rows.
    count: int
    #: Not all rows have the very same sentence: `sentence` is the worst.
    varies: bool


def flagged(rows: Sequence[Mapping[str, Any]]) -> list[Warned]:
    """The rows of results.jsonl whose status is not `ok`, in their order."""
    reasons = [
        (index, row["status"], row.get("reason") or "no reason given")
        for index, row in enumerate(rows)
        if row["status"] != "ok"
    ]
    return _gather(rows, reasons)


def warned(rows: Sequence[Mapping[str, Any]]) -> list[Warned]:
    """The warnings of rows of results.jsonl, whatever their status, in their order."""
    warnings = [
        (index, WARNING, text)
        for index, row in enumerate(rows)
        for text in row.get("warnings") or ()
    ]
    return _gather(rows, warnings)


def label(row: Mapping[str, Any]) -> str:
    """The problem of a row of results.jsonl, for people."""
    return AttentionProblem.from_dict(row["problem"]).label


def _gather(
    rows: Sequence[Mapping[str, Any]], entries: Iterable[tuple[int, str, str]]
) -> list[Warned]:
    """`entries`: row, kind, sentence."""
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for index, kind, sentence in entries:
        by_row = groups.setdefault((rows[index]["kernel"], kind, _NUMBER.sub("#", sentence)), {})
        by_row[index] = max(by_row.get(index, sentence), sentence, key=_severity)
    gathered = []
    for (kernel, kind, _), by_row in groups.items():
        worst = max(by_row, key=lambda index: _severity(by_row[index]))
        first = [worst, *(index for index in by_row if index != worst)][:NAMED]
        problems = tuple(label(rows[index]) for index in first)
        runs = tuple(dict.fromkeys(filter(None, (rows[index].get("run") for index in by_row))))
        varies = len(set(by_row.values())) > 1
        gathered.append(Warned(kernel, kind, by_row[worst], problems, runs, len(by_row), varies))
    return gathered


def _severity(sentence: str) -> tuple[list[float], list[float]]:
    """How far something is off is nearly always given in per cent; the other numbers say where."""
    return _numbers(_PERCENT.findall(sentence)), _numbers(_NUMBER.findall(sentence))


def _numbers(texts: Iterable[str]) -> list[float]:
    # A version such as 2.11.0 is none.
    return [float(text.replace(",", "")) for text in texts if text.count(".") < 2]
