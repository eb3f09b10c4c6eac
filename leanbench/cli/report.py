"""`leanbench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leanbench.cli.options import Baseline, Runs, option


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        option("--out", "DIR", "Where to write.", show_default="the run; below runs/ if published"),
    ] = None,
    format_: Annotated[
        str,
        option(
            "--format",
            "LIST",
            "Any of html, csv, parquet, markdown, github-benchmark, flashinfer-bench,"
            " aiconfigurator; by commas.",
        ),
    ] = "html,csv",
    baseline: Baseline = None,
) -> None:
    """Write report.html and report.csv, or other people's formats, from the rows of a run.

    It prints the paths of what it wrote. The HTML is one file that works offline: who wins where
    and by how much, the paper's claims next to the run, maps and charts to save as SVG or PNG, and
    every row with the command that repeats it. Several runs, say of several GPUs, stand side by
    side; --out is then needed.
    docs/formats.md has the other formats; Parquet needs pyarrow.
    """
    from leanbench.core.errors import UserError
    from leanbench.core.paths import REPORTS
    from leanbench.records.reading import RUNS, find_run
    from leanbench.report import write_report

    first, *others = map(find_run, runs)
    if others and out is None:
        raise UserError(
            "a report of several runs belongs to none of them: say with --out which folder to write"
        )
    if out is None:
        out, place = first, first.resolve()
        if place.is_relative_to(REPORTS):
            out = RUNS / place.relative_to(REPORTS)
    formats = list(dict.fromkeys(name.strip() for name in format_.split(",")))
    for path in write_report(first, out, formats, others, baseline, alone=True):
        typer.echo(path)
