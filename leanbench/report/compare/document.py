"""A comparison as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from leanbench.report.compare.core import Comparison, group
from leanbench.report.compare.pair import COMPARED
from leanbench.report.compare.selection import Selection
from leanbench.report.compare.sentences import (
    HOST,
    counted,
    difference,
    difference_of,
    interval,
    microseconds,
    outcome,
    sentences,
    warnings_words,
)
from leanbench.report.document import (
    Document,
    Section,
    Sentence,
    Sentences,
    Table,
    Text,
    Words,
    table,
    without_shared,
)

if TYPE_CHECKING:
    from leanbench.report.compare.pair import Pair

#: The quantity that `HOST` is about.
_HOST = tuple(quantity for quantity in COMPARED if quantity.name == "host_us")
#: Rows of the table on a terminal, unless all are wanted.
ROWS = 30


def comparison_document(comparison: Comparison, *, every: bool = True) -> Document:
    """Document of a comparison: its conclusion, what is compared, and every cell.

    Args:
        every: a terminal shows all rows, not the first `ROWS`.
    """
    cells = _table(comparison.pairs, comparison.source)
    if not every:
        cells = replace(cells, most=ROWS, rest=", use --all")
    below = _below(comparison.pairs)
    statements = tuple(map(Sentence, sentences(comparison)))
    outcome_line = Sentence(Text(f"{counted(comparison.pairs)}.", "strong", comparison.source))
    return Document(
        "",
        (
            Section("outcome", "", (Sentences((outcome_line,)),)),
            Section("sides", "", (Sentences(tuple(_sides(comparison)), "list"),)),
            Section("statistics", "", (Sentences(statements, "list"),)),
            Section("cells", f"Every cell ({len(comparison.pairs)})", (cells, *below), "closed"),
        ),
    )


def _sides(comparison: Comparison) -> list[Sentence]:
    """Both sides, and how their runs differ."""
    differences = [
        Sentence(
            f"{', '.join(difference.base)} → {', '.join(difference.new)}",
            f"they differ in {difference.field}",
        )
        for difference in comparison.differences
    ]
    return [_side("base", comparison.base), _side("new", comparison.new), *differences]


def _side(name: str, side: Selection) -> Sentence:
    created = str(side.run.manifest.get("created") or "")[:16].replace("T", " ")
    return Sentence(Text(side.name, "code", ", ".join(filter(None, (side.gpu, created)))), name)


def _below(pairs: Sequence[Pair]) -> list[Sentences]:
    """What marks and columns of the table mean that a reader may take for something else."""
    has_host = any(difference_of(pair, quantity) for pair in pairs for quantity in _HOST)
    return [
        Sentences((Sentence(words),)) for words in (warnings_words(pairs), HOST * has_host) if words
    ]


def _table(pairs: Sequence[Pair], source: str) -> Table:
    kernels = {pair.kernels for pair in pairs}
    shared, problems = without_shared([pair.problem_label for pair in pairs])
    # What is the same in every row stands above the table alone.
    subject = f"{pairs[0].kernels}, " if len(kernels) == 1 else ""
    title = f"{subject}{source}{f', all {shared}' if shared else ''}"
    headings = ["problem", "kernel", "base µs:", "new µs:", "difference:", "interval:"]
    headings += [f"{quantity.heading}:" for quantity in COMPARED]
    rows = [
        _row(pair, problem, pair.kernels if len(kernels) > 1 else "")
        for pair, problem in zip(pairs, problems, strict=True)
    ]
    return table([*headings, "verdict"], rows, title)


def _row(pair: Pair, problem: str, kernels: str) -> list[Words]:
    base_us, new_us = map(microseconds, pair.latencies_us)
    return [
        Text(problem, title=pair.label),
        kernels,
        base_us,
        new_us,
        difference(pair),
        interval(pair),
        *(difference_of(pair, quantity) for quantity in COMPARED),
        Text(outcome(pair), group(pair), note=pair.reason or ""),
    ]
