"""A comparison for programs: JSON and CSV. Ratios are new over base, not measured is null or an
empty field.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from leanbench.report.compare.core import counts, group
from leanbench.report.compare.pair import COMPARED
from leanbench.report.compare.sentences import METHOD, best_gain, summarise, worst_regression
from leanbench.report.frame import csv_cell, problem_values

if TYPE_CHECKING:
    from leanbench.report.compare.core import Comparison
    from leanbench.report.compare.pair import Pair
    from leanbench.report.compare.selection import Selection

#: Fields of the rows that both formats show for each side.
_OF_ROWS = (
    "kernel",
    "status",
    "samples",
    *(quantity.name for quantity in COMPARED),
    "config",
    "warnings",
)


def json_text(comparison: Comparison) -> str:
    """One object: both sides, how the runs differ, summary, and every pair."""
    pairs = comparison.pairs
    extremes = {"worst_regression": worst_regression(pairs), "best_gain": best_gain(pairs)}
    content = {
        "base": _side(comparison.base),
        "new": _side(comparison.new),
        "source": comparison.source,
        "margin": comparison.margin.share,
        "method": METHOD if comparison.source == "measured" else "medians alone, predicted",
        "pairs_without_samples": comparison.without_samples,
        "differences": [asdict(difference) for difference in comparison.differences],
        "counts": counts(pairs),
        "statistics": [asdict(statistics) for statistics in summarise(pairs)],
        **{
            name: pair and {"cell": pair.label, "ratio": pair.ratio}
            for name, pair in extremes.items()
        },
        "only_in_base": list(comparison.only_in_base),
        "only_in_new": list(comparison.only_in_new),
        "pairs": [{**_record(pair), "problem": pair.problem.to_dict()} for pair in pairs],
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(comparison: Comparison) -> str:
    """One line a pair, with the problem's fields as columns and a header line."""
    lines = [_flat(pair) for pair in comparison.pairs]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue()


def _side(side: Selection) -> dict[str, Any]:
    manifest = side.run.manifest
    about = {name: manifest.get(name) for name in ("name", "command", "created")}
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
        **{f"{side}_{name}": getattr(row, name) for name in _OF_ROWS for side, row in sides},
    }


def _flat(pair: Pair) -> dict[str, Any]:
    settings = {
        f"{side}_config": " ".join(f"{name}={value}" for name, value in (row.config or {}).items())
        for side, row in (("base", pair.base), ("new", pair.new))
    }
    warnings = {
        f"{side}_warnings": "; ".join(row.warnings or ())
        for side, row in (("base", pair.base), ("new", pair.new))
    }
    return {
        "problem": pair.problem.label,
        **problem_values(pair.problem),
        **_record(pair),
        **settings,
        **warnings,
    }
