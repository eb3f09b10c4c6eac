"""`leanbench evidence`: what each published figure rests on."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.core.paths import KERNELS

if TYPE_CHECKING:
    from leanbench.report.evidence.documents import Evidence, Quote


def evidence(
    write: Annotated[
        bool,
        typer.Option("--write", help="Make the tables, figures and pages of the documents again."),
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages", help="Make the reports of their runs again.")
    ] = False,
) -> None:
    """What each table and figure of the documents rests on: run, day, commits to kernels/ since,
    and whether it is current.

    In a checkout. Exits with 1 if a document is not what `--write` makes of it, or has a figure
    that nothing makes.
    """
    from leanbench.report.evidence import writing
    from leanbench.report.evidence.documents import Evidence
    from leanbench.report.evidence.faults import faults

    documents = Evidence(KERNELS.parent)
    for name in writing.write_pages(documents) if pages else []:
        output.show(name)
    if write:
        for name in writing.write(documents):
            output.show(name)
        wrong = []
    elif pages:
        wrong = []
    else:
        _show(documents)
        again = "is not as `leanbench evidence --write` makes it"
        wrong = [f"{name} {again}" for name in writing.differing(documents)]
    wrong += faults(documents)
    for sentence in wrong:
        output.say(sentence)
    if wrong:
        raise typer.Exit(1)


def _show(documents: Evidence) -> None:
    from leanbench.report.evidence.sources import CURRENT, RECORD

    table = output.table(f"What the documents publish; kernels {documents.sources.kernels}")
    for column in ("in", "published", "run or log", "measured", "kernel commits since", "state"):
        table.add_column(column)
    quotes = [quote for quote in documents.quotes if not quote.is_record]
    for quote in quotes:
        table.add_row(*_line(documents, quote))
    output.show_table(table)
    states = [documents.state(quote.sources) for quote in quotes]
    records = states.count(RECORD)
    current = states.count(CURRENT)
    output.show(f"{current} of {len(states) - records} are current; records: {records}.")


def _line(documents: Evidence, quote: Quote) -> list[str]:
    dates = sorted({source.date for source in quote.sources if source.date})
    state = documents.state(quote.sources)
    since = "0" if state == "current" else _commits_since(documents.root, dates[0]) if dates else ""
    names = ", ".join(source.name for source in quote.sources)
    return [quote.document, f"{quote.kind} {quote.name}", names, ", ".join(dates), since, state]


@cache
def _commits_since(root: Path, date: str) -> str:
    """Commits to kernels/ since the start of that day; empty where there is no git."""
    command = ["git", "-C", str(root), "rev-list", "--count", f"--since={date}T00:00:00Z"]
    try:
        done = subprocess.run(
            [*command, "HEAD", "--", "kernels"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
