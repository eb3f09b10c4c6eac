"""Rows that did not end `ok`, and warnings, as a section and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.report.document import Section, Table, Text, sentences, table
from leanbench.report.warned import Warned, flagged

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def flagged_section(results: Results) -> Section:
    """Make a line for each reason for which rows did not end `ok`."""
    hint = (
        "Every row whose status is not ok. Noisy rows count where kernels are compared, none of the"
        " others enters a statistic. Reasons that differ in numbers alone are one line, with the"
        " worst."
    )
    rows = of_runs(results, flagged)
    blocks = (sentences(hint, layout="hint"), warnings_table(rows)) if rows else ()
    return Section("flagged", "Flagged rows", blocks)


def of_runs(
    results: Results, gather: Callable[[Sequence[Mapping[str, Any]]], list[Warned]]
) -> list[Warned]:
    """Gather over the rows of all runs, each with its run if there are several."""
    return gather(
        [
            {**row.model_dump(), "run": run.name if results.are_several else ""}
            for run in results.runs
            for row, _ in run.results
        ]
    )


def warnings_table(warnings: Sequence[Warned]) -> Table:
    """A row for each sentence."""
    rows = []
    for warned in warnings:
        first, *more = warned.problems
        unnamed = warned.count - len(warned.problems)
        problems = Text(first, more=tuple(more), unnamed=unnamed)
        kind = Text(warned.kind, "status")
        rows.append(
            [
                kind,
                warned.kernel,
                f"{_before(warned)}{warned.sentence}",
                str(warned.count),
                problems,
                ", ".join(warned.runs),
            ]
        )
    return table(["status", "kernel", "reason", "rows:", "problems", "runs"], rows, layout="list")


def _before(warned: Warned) -> str:
    """Words before a sentence that stands for several; a refusal is not worse than another."""
    if not warned.varies:
        return ""
    return "for example, " if warned.kind == "unsupported" else "at worst, "
