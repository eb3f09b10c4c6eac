"""From run directories to files that people read: one self-contained `report.html`, CSV, Parquet
and Markdown, and to what other people's tools read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError, nearest
from leanbench.records.manifest import RESULTS

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results

#: Each format's file.
FILES = {
    "html": "report.html",
    "csv": "report.csv",
    "parquet": "report.parquet",
    "markdown": "report.md",
    "github-benchmark": "github-benchmark.json",
}
#: Folders of formats that have several files.
FOLDERS = {"flashinfer-bench": "flashinfer-bench"}
#: Those that are written unless others are named.
DEFAULT_FORMATS = ("html", "csv")


def write_report(
    run_dir: Path,
    out_dir: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    more_runs: Sequence[Path] = (),
    baseline: str | None = None,
    *,
    alone: bool = False,
) -> list[Path]:
    """Paths of the files of `FILES` and folders of `FOLDERS` that it writes into `out_dir`, one for
    each format.

    Args:
        more_runs: run directories that the report compares with the first.
        baseline: the kernel that others are compared with; None for lean, or the first that was
            timed, of each run.
        alone: nothing else has said how the runs ended: one that is not finished is named, and one
            without rows refused, so that it replaces no report.

    Raises:
        UserError: an unknown format, one whose library is missing or that has nothing of the runs,
            an `out_dir` that cannot be written, a run that cannot be read or is given twice, a
            baseline that did not run; where it is all there is, a run without rows.
    """
    known = {**FILES, **FOLDERS}
    for format_ in formats:
        if format_ not in known:
            raise UserError(f"there is no report format {format_!r}, {nearest(format_, known)}")
    targets = {format_: out_dir / known[format_] for format_ in formats}
    check_writable(out_dir, [targets[format_] for format_ in formats if format_ in FILES])

    from leanbench.records.reading import read_runs
    from leanbench.report.facts.results import Results

    runs = read_runs([run_dir, *more_runs])
    for run in runs:
        for note in run.notes:
            logging.getLogger(__name__).warning(f"{run.name}: {note}" if more_runs else note)
        if alone:
            _refuse_without_rows(run)
            if run.unfinished:
                logging.getLogger(__name__).warning(f"{run.directory}: {run.unfinished}")
    results = Results(runs, baseline)
    contents: dict[Path, str | bytes] = {}
    for format_, target in targets.items():
        if format_ in FILES:
            contents[target] = _render(format_, results)
        else:
            from leanbench.report.export.flashinfer_bench import dataset_files

            files = dataset_files(results.runs, results.baseline)
            contents |= {target / path: content for path, content in files.items()}
    for target, content in contents.items():
        write_whole(target, content)
    return list(targets.values())


def _refuse_without_rows(run: Run) -> None:
    if not run.results:
        raise UserError(
            f"{run.directory} has no row to report, its {RESULTS} is missing or empty: {run.go_on}"
        )


def _render(format_: str, results: Results) -> str | bytes:
    if format_ == "github-benchmark":
        from leanbench.report.export.github_benchmark import github_benchmark

        return github_benchmark(results.runs)
    if format_ in ("csv", "parquet"):
        from leanbench.report.frame import csv_text, results_frame

        frame = results_frame(*results.runs, baseline=results.baseline)
        return csv_text(frame) if format_ == "csv" else _parquet(frame)
    from leanbench.report.facts import facts

    document = facts(results)
    if format_ == "markdown":
        from leanbench.report.markdown import markdown_text

        return markdown_text(document)
    from leanbench.report.page.html import html_text

    return html_text(document, results)


def _parquet(frame: DataFrame) -> bytes:
    try:
        return frame.to_parquet(index=False)
    except ImportError as error:
        raise UserError(
            "a Parquet file needs pyarrow, which is not installed: pip install pyarrow"
        ) from error


def check_writable(out_dir: Path, targets: Iterable[Path]) -> None:
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # A real file: permission bits say nothing about read-only mounts, full disks or the root
        # user.
        tempfile.TemporaryFile(dir=out_dir).close()
    except OSError as error:
        raise _cannot_write(out_dir, error) from error
    for target in targets:
        if target.is_dir():
            raise UserError(
                f"cannot write {target}: it is a folder, move it away or choose another folder with"
                " --out"
            )


def write_whole(target: Path, content: str | bytes) -> None:
    """Whole or not at all: a report that is open in a browser is never seen half written."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _cannot_write(target, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    reason = (error.strerror or str(error)).lower()
    return UserError(f"cannot write {path} ({reason}): choose another folder with --out")
