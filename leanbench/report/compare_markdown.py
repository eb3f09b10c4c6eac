"""A comparison as Markdown for a pull request: the outcome in the first line, every cell folded
away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.report.compare_summary import (
    counted,
    difference,
    energy_difference,
    interval,
    microseconds,
    outcome,
    sentences,
)
from leanbench.report.markdown_words import code, plain, table

if TYPE_CHECKING:
    from leanbench.report.compare import Comparison
    from leanbench.report.compare_pair import Pair


def markdown_text(comparison: Comparison) -> str:
    """GitHub's Markdown; names and reasons that a run brings along cannot break out of
    their place.
    """
    pairs = comparison.pairs
    names = f"{code(comparison.base.name)} → {code(comparison.new.name)}"
    gpus = " → ".join(dict.fromkeys((comparison.base.gpu, comparison.new.gpu)))
    lines = [f"**{counted(pairs)}** ({names}, {comparison.source}, {plain(gpus)})", ""]
    if comparison.differences:
        lines += ["The runs differ in:", ""]
        for each in comparison.differences:
            lines.append(
                f"- {plain(each.field)}: {code(', '.join(each.base))} → {code(', '.join(each.new))}"
            )
        lines.append("")
    lines += [f"- {plain(sentence)}" for sentence in sentences(comparison)]
    lines += [
        "",
        f"<details><summary>Every cell ({len(pairs)})</summary>",
        "",
        *_table(pairs),
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def _table(pairs: tuple[Pair, ...]) -> list[str]:
    with_energy = any(pair.energy_ratio is not None for pair in pairs)
    energy = ["energy:"] if with_energy else []
    headings = [
        "problem",
        "kernel",
        "base µs:",
        "new µs:",
        "difference:",
        "interval:",
        *energy,
        "verdict",
    ]
    rows = []
    for pair in pairs:
        cells = [plain(pair.problem_label), plain(pair.kernels)]
        cells += [*map(microseconds, pair.latencies_us), difference(pair), interval(pair)]
        if with_energy:
            cells.append(energy_difference(pair))
        rows.append([*cells, outcome(pair) + (f": {code(pair.reason)}" if pair.reason else "")])
    return table(headings, rows)
