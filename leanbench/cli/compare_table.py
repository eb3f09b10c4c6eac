"""The table of `leanbench compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.cli import output
from leanbench.report.compare import Comparison, Selection, group
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
    from rich.table import Table

    from leanbench.report.compare_pair import Pair

#: Rows without --all.
ROWS = 30

_STYLES = {
    "broken": "bold red",
    "slower": "red",
    "ambiguous": "yellow",
    "faster": "green",
    "mended": "green",
}


def show_comparison(comparison: Comparison, *, every: bool) -> None:
    """What is compared, what differs between the runs, the cells, and what it comes to."""
    shown = comparison.pairs if every else comparison.pairs[:ROWS]
    output.show(f"base  {_described(comparison.base)}")
    output.show(f"new   {_described(comparison.new)}")
    for each in comparison.differences:
        output.show(f"they differ in {each.field}: {', '.join(each.base)} → {', '.join(each.new)}")
    output.show("")
    output.show_table(_table(shown, comparison.source))
    if len(shown) < len(comparison.pairs):
        output.show(f"{len(comparison.pairs) - len(shown)} more, use --all")
    output.show("")
    for pair in shown:
        if pair.reason:
            output.show(f"{pair.label}: {pair.reason}")
    output.show(f"{counted(comparison.pairs)}.")
    for sentence in sentences(comparison):
        output.show(sentence)


def _described(side: Selection) -> str:
    created = str(side.run.manifest.get("created") or "")[:16].replace("T", " ")
    return f"{side.name} ({', '.join(filter(None, (side.gpu, created)))})"


def _table(pairs: Sequence[Pair], source: str) -> Table:
    from rich.markup import escape
    from rich.text import Text

    kernels = {pair.kernels for pair in pairs}
    shared, problems = output.without_shared([pair.problem_label for pair in pairs])
    # What is the same in every row stands above the table alone.
    subject = f"{pairs[0].kernels}, " if len(kernels) == 1 else ""
    table = output.table(escape(f"{subject}{source}{f', all {shared}' if shared else ''}"))
    table.add_column("problem", no_wrap=True)
    if len(kernels) > 1:
        table.add_column("kernel", no_wrap=True)
    with_energy = any(pair.energy_ratio is not None for pair in pairs)
    with_interval = any(interval(pair) != "-" for pair in pairs)
    optional = [*(["interval"] if with_interval else []), *(["energy"] if with_energy else [])]
    for heading in ("base µs", "new µs", "difference", *optional):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    for pair, problem in zip(pairs, problems, strict=True):
        names = [problem, Text(pair.kernels)] if len(kernels) > 1 else [problem]
        figures = [*map(microseconds, pair.latencies_us), difference(pair)]
        if with_interval:
            figures.append(interval(pair))
        if with_energy:
            figures.append(energy_difference(pair))
        table.add_row(*names, *figures, Text(outcome(pair), style=_STYLES.get(group(pair), "")))
    return table
