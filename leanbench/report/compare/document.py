"""A comparison as a document, as JSON and as CSV.

JSON and CSV hold ratios of new over base; a missing value is null or an empty field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from leanbench.report.compare.core import Comparison, Selection, counts, group
from leanbench.report.compare.flips import flips_of
from leanbench.report.compare.pair import COMPARED
from leanbench.report.compare.sentences import (
    HOST,
    METHOD,
    best_gain,
    counted,
    difference,
    difference_of,
    interval,
    microseconds,
    outcome,
    sentences,
    summarise,
    warnings_words,
    worst_regression,
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
from leanbench.report.frame import csv_cell, problem_values

if TYPE_CHECKING:
    from leanbench.report.compare.pair import Pair

#: Maximum number of rows on a terminal, unless all are wanted.
ROWS = 30
#: Fields of each side's row in JSON and CSV.
_ROW_FIELDS = (
    "kernel",
    "status",
    "samples",
    *(quantity.name for quantity in COMPARED),
    "config",
    "warnings",
)


def comparison_document(comparison: Comparison, *, every: bool = True) -> Document:
    """Make a document: conclusion, sides, statistics and every cell.

    Args:
        every: show all rows on a terminal, not the first `ROWS`.
    """
    cells = _table(comparison.pairs, comparison.source)
    if not every:
        cells = replace(cells, most=ROWS, rest=", use --all")
    notes = [Sentences((Sentence(words),)) for words in _notes(comparison.pairs)]
    statements = tuple(map(Sentence, sentences(comparison)))
    outcome_line = Sentence(Text(f"{counted(comparison.pairs)}.", "strong", comparison.source))
    return Document(
        "",
        (
            Section("outcome", "", (Sentences((outcome_line,)),)),
            Section("sides", "", (Sentences(tuple(_sides(comparison)), "list"),)),
            Section("statistics", "", (Sentences(statements, "list"),)),
            Section("cells", f"Every cell ({len(comparison.pairs)})", (cells, *notes), "closed"),
        ),
    )


def _sides(comparison: Comparison) -> list[Sentence]:
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


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """Explain marks and columns that a reader may misread."""
    has_host = any(
        quantity.name == "host_us" and difference_of(pair, quantity)
        for pair in pairs
        for quantity in COMPARED
    )
    return [*filter(None, [warnings_words(pairs)]), *([HOST] if has_host else [])]


def _table(pairs: Sequence[Pair], source: str) -> Table:
    kernels = {pair.kernels for pair in pairs}
    shared, problems = without_shared([pair.problem_label for pair in pairs])
    subject = f"{pairs[0].kernels}, " if len(kernels) == 1 else ""
    title = f"{subject}{source}{f', all {shared}' if shared else ''}"
    headings = ["problem", "kernel", "base µs:", "new µs:", "difference:"]
    headings += ["verdict", "interval:"]
    headings += [f"{quantity.heading}:" for quantity in COMPARED]
    rows = [
        _row(pair, problem, pair.kernels if len(kernels) > 1 else "")
        for pair, problem in zip(pairs, problems, strict=True)
    ]
    return table(headings, rows, title)


def _row(pair: Pair, problem: str, kernels: str) -> list[Words]:
    base_us, new_us = map(microseconds, pair.latencies_us)
    return [
        Text(problem, title=pair.label),
        kernels,
        base_us,
        new_us,
        difference(pair),
        Text(outcome(pair), group(pair), note=pair.reason or ""),
        interval(pair),
        *(difference_of(pair, quantity) for quantity in COMPARED),
    ]


def json_text(comparison: Comparison) -> str:
    """Render one object: sides, differences of the runs, summary, and every pair."""
    pairs = comparison.pairs
    flips = flips_of(comparison)
    extremes = {"worst_regression": worst_regression(pairs), "best_gain": best_gain(pairs)}
    content = {
        "base": _side_record(comparison.base),
        "new": _side_record(comparison.new),
        "source": comparison.source,
        "margin": comparison.margin.share,
        "method": METHOD if comparison.source == "measured" else "medians alone, predicted",
        "pairs_without_samples": comparison.without_samples,
        "differences": [asdict(difference) for difference in comparison.differences],
        "counts": counts(pairs),
        "statistics": [
            {
                "cache": of.cache,
                "pairs": of.every.problems,
                "geomean": of.every.geomean,
                "changed": of.changed.problems if of.changed else 0,
                "changed_geomean": of.changed.geomean if of.changed else None,
                "median_difference": of.median_difference,
            }
            for of in summarise(pairs)
        ],
        **{
            name: pair and {"cell": pair.label, "ratio": pair.ratio}
            for name, pair in extremes.items()
        },
        "winners": flips and asdict(flips),
        "only_in_base": list(comparison.only_in_base),
        "only_in_new": list(comparison.only_in_new),
        "pairs": [{**_record(pair), "problem": pair.problem.to_dict()} for pair in pairs],
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(comparison: Comparison) -> str:
    """Render one line per pair, with the problem's fields as columns."""
    lines = [_flat(pair) for pair in comparison.pairs]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue()


def _side_record(side: Selection) -> dict[str, Any]:
    about = {name: side.run.manifest.get(name) for name in ("name", "command", "created")}
    return {"run": str(side.run.directory), "kernel": side.kernel, "gpu": side.gpu, **about}


def _record(pair: Pair) -> dict[str, Any]:
    sides = (("base", pair.base), ("new", pair.new))
    base_us, new_us = pair.latencies_us
    return {
        "cell": pair.label,
        "cache": pair.base.cache,
        "outcome": group(pair),
        "verdict": pair.verdict,
        "base_latency_us": base_us,
        "new_latency_us": new_us,
        "ratio": pair.ratio,
        "ratio_low": pair.ratio_low,
        "ratio_high": pair.ratio_high,
        "from_samples": pair.from_samples,
        **{f"{quantity.stem}_ratio": pair.ratio_of(quantity) for quantity in COMPARED},
        "reason": pair.reason,
        **{f"{side}_{name}": getattr(row, name) for name in _ROW_FIELDS for side, row in sides},
    }


def _flat(pair: Pair) -> dict[str, Any]:
    record = {"problem": pair.problem.label, **problem_values(pair.problem), **_record(pair)}
    for side, row in (("base", pair.base), ("new", pair.new)):
        settings = (row.config or {}).items()
        record[f"{side}_config"] = " ".join(f"{name}={value}" for name, value in settings)
        record[f"{side}_warnings"] = "; ".join(row.warnings or ())
    return record
