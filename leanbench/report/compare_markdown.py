"""A comparison as Markdown for a pull request: the outcome in the first line, every cell folded away."""

from __future__ import annotations

import re
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

if TYPE_CHECKING:
    from leanbench.report.compare import Comparison
    from leanbench.report.compare_pair import Pair


def markdown_text(comparison: Comparison) -> str:
    """GitHub's Markdown; names and reasons that a run brings along cannot break out of their place."""
    pairs = comparison.pairs
    names = f"{_code(comparison.base.name)} → {_code(comparison.new.name)}"
    gpus = " → ".join(dict.fromkeys((comparison.base.gpu, comparison.new.gpu)))
    lines = [f"**{counted(pairs)}** ({names}, {comparison.source}, {_plain(gpus)})", ""]
    if comparison.differences:
        lines += ["The runs differ in:", ""]
        for each in comparison.differences:
            lines.append(f"- {_plain(each.field)}: {_code(', '.join(each.base))} → {_code(', '.join(each.new))}")
        lines.append("")
    lines += [f"- {_plain(sentence)}" for sentence in sentences(comparison)]
    lines += ["", f"<details><summary>Every cell ({len(pairs)})</summary>", "", *_table(pairs), "", "</details>"]
    return "\n".join(lines) + "\n"


def _table(pairs: tuple[Pair, ...]) -> list[str]:
    with_energy = any(pair.energy_ratio is not None for pair in pairs)
    energy = [" energy |", "---:|"] if with_energy else ["", ""]
    lines = [
        f"| problem | kernel | base µs | new µs | difference | interval |{energy[0]} verdict |",
        f"|---|---|---:|---:|---:|---:|{energy[1]}---|",
    ]
    for pair in pairs:
        cells = [_plain(pair.problem_label), _plain(pair.kernels)]
        cells += [*map(microseconds, pair.latencies_us), difference(pair), interval(pair)]
        if with_energy:
            cells.append(energy_difference(pair))
        cells.append(outcome(pair) + (f": {_code(pair.reason)}" if pair.reason else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _plain(text: str) -> str:
    """Text with no markup in it."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Text in which nothing links, mentions or ends a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '¦')}`"
