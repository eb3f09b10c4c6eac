"""`leanbench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the name of one under runs/.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write.", show_default="the run directory")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="LIST", help="Any of html and csv, separated by commas.")
    ] = "html,csv",
) -> None:
    """Write report.html and report.csv from the rows of a run, and print their paths.

    The HTML is one file that works offline: summary, charts, environment, flagged rows, and every row in a table.
    """
    from leanbench.report import write_report
    from leanbench.report.run_files import find_run

    directory = find_run(run)
    formats = list(dict.fromkeys(name.strip() for name in format_.split(",")))
    for path in write_report(directory, out or directory, formats):
        typer.echo(path)
