"""`leanbench merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from leanbench.cli import output
from leanbench.cli.options import MixBoards, Runs, option, switch


def merge(
    runs: Runs,
    out: Annotated[str, option("--out", "NAME", "The new run: a name under runs/, or a path.")],
    mix_boards: MixBoards = False,
    no_report: Annotated[bool, switch("--no-report", "Write no HTML and CSV.")] = False,
) -> None:
    """Put the runs of all shards of a sweep together into one run, with HTML and CSV.

    They must be of one request, one GPU model, one leanbench with one set of kernels and settings;
    GPUs are compared by their calibration cell, clocks, driver and versions. Every cell of the
    sweep must have one row.
    """
    from leanbench.core.errors import UserError
    from leanbench.records.merging import merge_runs
    from leanbench.records.reading import RUNS, find_run
    from leanbench.report import write_report

    if not out.strip("./"):
        raise UserError(f"--out {out!r} names no run: give a name such as merged")
    path = RUNS / out if "/" not in out else Path(out)
    for difference in merge_runs([find_run(run) for run in runs], path, mix_boards):
        output.say(f"! {difference}.")
    output.say(f"Run directory: {path}")
    if not no_report:
        for written in write_report(path, path, ["html", "csv"]):
            output.show_whole(str(written))
