"""Reports of runs: a self-contained HTML page, Markdown, CSV, Parquet, and other tools' formats."""

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

    from leanbench.report.facts.results import Results

#: Formats of one file.
FILES = {
    "html": "report.html",
    "csv": "report.csv",
    "parquet": "report.parquet",
    "markdown": "report.md",
    "github-benchmark": "github-benchmark.json",
}
#: Formats of several files.
FOLDERS = {"flashinfer-bench": "flashinfer-bench", "aiconfigurator": "aiconfigurator"}
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
    """Write a report and return its file or folder for each format.

    Args:
        more_runs: run directories that the report compares with the first.
        baseline: kernel that others are compared with; None for lean, or each run's first timed
            kernel.
        alone: warn of unfinished runs and reject runs without rows. False right after a sweep,
            which has printed how it ended.

    Raises:
        UserError: an unknown format, a missing library, nothing to write in a format, an `out_dir`
            that cannot be written, a run that is unreadable or given twice, a baseline that did not
            run, with `alone` a run without rows.
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
        if alone and not run.results:
            raise UserError(
                f"{run.directory} has no row to report, its {RESULTS} is missing or empty:"
                f" {run.go_on}"
            )
        if alone and run.unfinished:
            logging.getLogger(__name__).warning(f"{run.directory}: {run.unfinished}")
    results = Results(runs, baseline)
    contents: dict[Path, str | bytes] = {}
    for format_, target in targets.items():
        if format_ in FILES:
            contents[target] = _render(format_, results)
        else:
            files = _files(format_, results)
            contents |= {target / path: content for path, content in files.items()}
    for target, content in contents.items():
        write_whole(target, content)
    if folder := targets.get("aiconfigurator"):
        # Tables of another kernel or run would count as these.
        for old in {*folder.glob("generation_*_perf.*")} - contents.keys():
            if old.is_file():
                old.unlink()
    return list(targets.values())


def _files(format_: str, results: Results) -> dict[str, str | bytes]:
    """Render a format of several files."""
    if format_ == "aiconfigurator":
        from leanbench.report.aiconfigurator import planner_files

        return planner_files(results.runs, results.baseline)
    from leanbench.report.flashinfer_bench import dataset_files

    return dataset_files(results.runs, results.baseline)


def _render(format_: str, results: Results) -> str | bytes:
    if format_ == "github-benchmark":
        from leanbench.report.github_benchmark import github_benchmark

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
    from leanbench.report.html import html_text

    return html_text(document, results)


def _parquet(frame: DataFrame) -> bytes:
    try:
        return frame.to_parquet(index=False)
    except ImportError as error:
        raise UserError(
            "a Parquet file needs pyarrow, which is not installed: pip install pyarrow"
        ) from error


def check_writable(out_dir: Path, targets: Iterable[Path]) -> None:
    """Create a folder and check that files can be written into it.

    Raises:
        UserError: it cannot be written, or one of `targets` is a folder.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # Permission bits do not cover read-only mounts, full disks and the root user.
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
    """Replace a file atomically, so that a browser never sees half a report."""
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
