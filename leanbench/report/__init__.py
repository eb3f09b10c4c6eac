"""From a run directory to files that people read: `report.csv` and one self-contained `report.html`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leanbench.errors import UserError, nearest

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.run_files import Run

FORMATS = ("html", "csv")


def write_report(
    run_dir: Path, out_dir: Path, formats: Sequence[str] = FORMATS, beside: Sequence[Path] = ()
) -> list[Path]:
    """Write `report.<format>` into `out_dir` for each format, and return their paths in that order.

    Args:
        beside: more run directories, which the report sets beside the first.

    Raises:
        UserError: an unknown format, an `out_dir` that cannot be written, a run that cannot be read or is given twice.
    """
    for format_ in formats:
        if format_ not in FORMATS:
            raise UserError(f"there is no report format {format_!r}, {nearest(format_, FORMATS)}")
    targets = {format_: out_dir / f"report.{format_}" for format_ in formats}
    check_writable(out_dir, targets.values())

    from leanbench.report.frame import results_frame
    from leanbench.report.run_files import read_runs

    runs = read_runs([run_dir, *beside])
    for run in runs:
        for note in run.notes:
            logging.getLogger(__name__).warning(f"{run.name}: {note}" if beside else note)
    frame = results_frame(*runs)
    for format_, target in targets.items():
        write_whole(target, _render(format_, runs, frame))
    return list(targets.values())


def _render(format_: str, runs: Sequence[Run], frame: DataFrame) -> str:
    if format_ == "csv":
        from leanbench.report.csv import csv_text

        return csv_text(frame)
    from leanbench.report.html import html_text

    return html_text(runs, frame)


def check_writable(out_dir: Path, targets: Iterable[Path]) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # A real file: permission bits say nothing about read-only mounts, full disks or the root user.
        tempfile.TemporaryFile(dir=out_dir).close()
    except OSError as error:
        raise _cannot_write(out_dir, error) from error
    for target in targets:
        if target.is_dir():
            raise UserError(f"cannot write {target}: it is a folder, move it away or choose another folder with --out")


def write_whole(target: Path, text: str) -> None:
    """Whole or not at all: a report that is open in a browser is never seen half written."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _cannot_write(target, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(f"cannot write {path} ({reason}): choose another folder with --out")
