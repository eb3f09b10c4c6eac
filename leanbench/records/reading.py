"""Reading of a run directory."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError, short
from leanbench.core.files import UnreadableFile, parse_json, read_if_there
from leanbench.core.problem import AttentionProblem
from leanbench.records.directory import not_a_row
from leanbench.records.manifest import MOST_MB, RESULTS, read_manifest

if TYPE_CHECKING:
    from leanbench.records.row import Row

RUNS = Path("runs")


@dataclass(frozen=True)
class Run:
    """Content of a run directory."""

    directory: Path
    #: As written. Any key can be missing.
    manifest: dict[str, Any]
    #: One pair a line of `results.jsonl`, in its order.
    results: tuple[tuple[Row, AttentionProblem], ...]
    #: Sentences about what was left out on reading.
    notes: tuple[str, ...] = ()
    #: Name that overrides the manifest's.
    other_name: str | None = None

    @property
    def name(self) -> str:
        return self.other_name or str(self.manifest.get("name") or self.directory.resolve().name)

    def section(self, key: str) -> dict[str, Any]:
        """Return an object of the manifest; empty if it is missing or malformed."""
        value = self.manifest.get(key)
        return value if isinstance(value, dict) else {}

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """Environments of the manifest by key; malformed ones are left out."""
        recorded = self.section("environments").items()
        return {str(key): fields for key, fields in recorded if isinstance(fields, dict)}

    def gpu_name(self, environment: str | None = None) -> str:
        """Return the product that the rows of an environment ran on or were predicted for."""
        gpu = self.section("gpu")
        product = self.environments.get(environment or "", {}).get("gpu_product")
        # The environment of a prediction is the machine that computed it.
        if self.manifest.get("source") == "predicted":
            product = None
        return str(product or gpu.get("product") or gpu.get("name") or "unknown GPU")

    @property
    def unfinished(self) -> str:
        """Return cells without a row, and the command that finishes them; empty if all have rows.

        For example ``2 of 40 cells have no row yet: finish it with `leanbench sweep --name x
        --resume```.
        """
        cells = self.manifest.get("cells")
        known = cells if isinstance(cells, list) else []
        wanted = {cell for cell in known if isinstance(cell, str)}
        left = len(wanted - {row.cell for row, _ in self.results})
        if not left:
            return ""
        have = "cell has" if len(wanted) == 1 else "cells have"
        return f"{left} of {len(wanted)} {have} no row yet: {self.go_on}"

    @property
    def go_on(self) -> str:
        """Return how to finish the run."""
        command = self.manifest.get("command")
        if not isinstance(command, str) or not command:
            return "finish it with its command and --resume"
        words = " ".join(command.split())
        with contextlib.suppress(ValueError):  # quotes without an end
            words = shlex.join(_without_out(shlex.split(words)))
        directory = self.directory.resolve()
        where = ["--name", directory.name, "--resume"]
        # It can have been moved.
        if directory.parent != RUNS.resolve():
            here = Path.cwd()
            parent = directory.parent
            parent = parent.relative_to(here) if parent.is_relative_to(here) else parent
            where = ["--out", str(parent), *where]
        return f"finish it with `{words} {shlex.join(where)}`"


def fastest(
    results: Iterable[tuple[Row, AttentionProblem]],
) -> dict[tuple[AttentionProblem, str], Row]:
    """Return the fastest timed row of each problem and kernel, which may have several configs."""
    from leanbench.core.quantities import TIMED

    rows: dict[tuple[AttentionProblem, str], Row] = {}
    for row, problem in results:
        if row.status in TIMED and row.latency_us is not None and row.latency_us > 0:
            best = rows.get((problem, row.kernel))
            if best is None or row.latency_us < (best.latency_us or 0):
                rows[problem, row.kernel] = row
    return rows


def _without_out(words: list[str]) -> list[str]:
    """Return a command's words without --out and its value."""
    return [
        word
        for before, word in itertools.pairwise(["", *words])
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]


def find_run(run: str) -> Path:
    """Return the directory of a run: a path, or a name under `runs/`.

    Raises:
        UserError: Neither exists. The message suggests the nearest run.
    """
    for directory in (Path(run), RUNS / run):
        if directory.is_dir():
            return directory
    name = Path(run).name
    # Shells complete a name with a slash.
    if "/" not in run.rstrip("/"):
        hint = (
            _nearest(name, RUNS, "") or f"{RUNS}/ holds no run yet, make one with `leanbench sweep`"
        )
        raise UserError(f"there is no run {short(run)}, {hint}")
    parent = Path(run).parent
    if Path(run).is_file():
        raise UserError(f"{run} is a file: name the folder it is in, {parent}")
    missing = f"{parent}/ holds no run" if parent.is_dir() else f"nor a folder {short(str(parent))}"
    hint = (
        _nearest(name, parent, f"{parent}/")
        or f"{missing}: name a run directory, or a run under {RUNS}/"
    )
    raise UserError(f"there is no folder {short(run)}, {hint}")


def _nearest(name: str, folder: Path, prefix: str) -> str:
    """Suggest a run in `folder` by its name; empty if there is no run."""
    try:
        known = sorted(path.name for path in folder.iterdir() if (path / RESULTS).is_file())
    except OSError:
        return ""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    # Names of runs end with GPU and time: the last ones are the newest.
    if name and (begun := [run for run in known if name in run]):
        return f"nearest in {folder}/: {', '.join(begun[-3:])}"
    runs = "1 run" if len(known) == 1 else f"{len(known)} runs"
    return f"{folder}/ holds {runs}: name one that `ls {folder}` lists, or a path" if known else ""


def read_run(directory: Path) -> Run:
    """Read a run. Leave out and note a truncated last line and copies of a row.

    Raises:
        UserError: It is no run directory, has another schema version, or a line is not a row.
    """
    manifest = read_manifest(directory)
    path = directory / RESULTS
    lines = read_if_there(path, MOST_MB).split(b"\n")

    # Rows end with a newline. Text after the last one was being written when the run was killed.
    written = [(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    notes = []
    if lines[-1].strip():
        try:
            parse_json(lines[-1])
        except ValueError:
            written.pop()
            notes.append(f"{RESULTS} line {len(lines)} was cut off in writing and is left out")
    # Rows have a time, so equal rows are copies.
    rows: dict[bytes, int] = {}
    for line, number in written:
        rows.setdefault(line, number)
    results = [_read_row(path, number, line) for line, number in rows.items()]
    cells = Counter(row.cell for row, _ in results)
    if several := sum(count > 1 for count in cells.values()):
        have = "1 cell has" if several == 1 else f"{several} cells have"
        notes.append(f"{RESULTS}: {have} several different rows, which all count")
    if copies := len(written) - len(rows):
        have = "1 row is a copy" if copies == 1 else f"{copies} rows are copies"
        notes.append(f"{RESULTS}: {have} of another row and left out")
    notes += _notes_of_samples(directory)
    return Run(directory, manifest, tuple(results), tuple(notes))


def _notes_of_samples(directory: Path) -> list[str]:
    from leanbench.records.samples import SAMPLES, whole_length

    try:
        content = read_if_there(directory / SAMPLES, MOST_MB)
    except UnreadableFile as error:
        return [f"{SAMPLES} cannot be read ({error.reason})"]
    whole = whole_length(content)
    if whole == len(content):
        return []
    if not whole:
        return [f"{SAMPLES} is damaged, it has no whole gzip member: there are no raw samples"]
    return [
        f"{SAMPLES} is cut off or damaged after {whole} of its {len(content)} bytes: raw samples"
        " that follow are left out"
    ]


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read several runs. Name runs of the same name by the ends of their paths.

    Raises:
        UserError: As `read_run`, or a run is repeated.
    """
    resolved = [directory.resolve() for directory in directories]
    for directory in directories:
        if resolved.count(directory.resolve()) > 1:
            raise UserError(f"run {str(directory)!r} is given twice: name each run once")
    runs = [read_run(directory) for directory in directories]
    names = [run.name for run in runs]
    alike = [number for number, name in enumerate(names) if names.count(name) > 1]
    parts = 0
    while len({*names}) < len(names):
        parts += 1
        for number in alike:
            names[number] = "/".join(resolved[number].parts[-parts:])
    return [
        run if run.name == name else replace(run, other_name=name)
        for run, name in zip(runs, names, strict=True)
    ]


def _read_row(path: Path, number: int, line: bytes) -> tuple[Row, AttentionProblem]:
    from leanbench.records.row import read_row

    try:
        return read_row(line)
    except ValueError as error:
        raise not_a_row(path, number, error) from error
