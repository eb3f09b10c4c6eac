"""Rows that did not end `ok`, and warnings, as a section and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.report.document import Block, Section, Table, Text, sentences, table
from leanbench.report.warned import Warned, flagged

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def flagged_section(results: Results) -> Section:
    """The rows that did not end `ok`, by run."""
    hint = (
        "Every row whose status is not ok. Noisy rows count where kernels are compared, none of the"
        " others enters a statistic. Reasons that differ in numbers alone are one line, with the"
        " worst."
    )
    blocks: list[Block] = []
    for run in results.runs:
        if rows := flagged([row.model_dump() for row, _ in run.results]):
            shown = warnings_table(rows)
            blocks.append(Section("", run.name, (shown,)) if results.are_several else shown)
    if blocks:
        blocks.insert(0, sentences(hint, layout="hint"))
    return Section("flagged", "Flagged rows", tuple(blocks))


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
            ]
        )
    return table(["status", "kernel", "reason", "rows:", "problems"], rows, layout="list")


def _before(warned: Warned) -> str:
    """Words before a sentence that stands for several; a refusal is not worse than another."""
    if not warned.varies:
        return ""
    return "for example, " if warned.kind == "unsupported" else "at worst, "
