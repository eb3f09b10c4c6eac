"""The run directory: `manifest.json` says what was asked and where, `results.jsonl` holds one row a
line, `samples.jsonl.gz` the raw samples behind them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.files import (
    PART,
    UnreadableFile,
    append_whole,
    read_file,
    read_if_there,
    replace_file,
    whole_lines,
)
from leanbench.core.strict_json import parse
from leanbench.records.boards import Board
from leanbench.records.manifest import (
    MANIFEST,
    MOST_MB,
    RESULTS,
    read_manifest,
    refuse_differences,
    refuse_unlike_a_manifest,
)
from leanbench.records.samples import SAMPLES, Samples, length_to_resume, pack

if TYPE_CHECKING:
    from leanbench.records.row import Row

WORKER_LOG = "worker.log"
_LOCK = "lock"


class CannotWrite(UserError):
    """A run that cannot be written. `why` are the operating system's words."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.why = error.strerror


def read_rows(path: Path) -> list[Row]:
    """The rows of a run directory with every field, without a last line that was cut off while it
    was written.

    Raises:
        UserError: any other line is not a row; the line is named.
    """
    rows, _ = _parse_rows(path / RESULTS)
    return rows


def not_a_row(path: Path, number: int, error: ValueError) -> UserError:
    """The refusal of a line of `results.jsonl`."""
    return UserError(
        f"{path}, line {number} is not a row ({error}): delete that line, its cell will run again"
        " with --resume"
    )


def newest_run(parent: Path, sweep: str, cells: Collection[str]) -> Path:
    """The run of `sweep` under `parent` that was started last; one of just these cells, where there
    is any.

    Raises:
        UserError: there is none.
    """
    candidates: list[tuple[bool, str, Path]] = []
    for manifest in parent.glob(f"*/{MANIFEST}"):
        if manifest.parent.name.endswith(PART):
            # Of a merge that was killed.
            continue
        with contextlib.suppress(UnreadableFile, ValueError, KeyError, TypeError):
            content = parse(read_file(manifest, MOST_MB))
            if content["sweep"]["name"] == sweep:
                candidates.append(
                    (set(content["cells"]) == set(cells), str(content["created"]), manifest.parent)
                )
    if not candidates:
        raise UserError(
            f"there is no run of sweep {sweep!r} in {parent} to resume: start it without --resume"
        )
    return max(candidates)[2]


def make_new_folder(path: Path) -> Path:
    """Make a folder of this name, or with the next free suffix: ``NAME-2``.

    Sweeps that start in the same second get a folder each.

    Raises:
        CannotWrite: The folder cannot be made.
    """
    folder, count = path, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                count += 1
                folder = path.with_name(f"{path.name}-{count}")
    except OSError as error:
        raise _cannot_write(folder, error) from None


@dataclass
class RunDirectory:
    """A run directory that this process writes; nobody else can while it is open."""

    path: Path
    manifest: dict[str, Any]
    #: Keys of the cells that have a row.
    finished: set[str]
    _results: int

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: Path, manifest: dict[str, Any]) -> Iterator[RunDirectory]:
        """Makes the directory and its manifest, to which schema version, name, id and creation time
        are added.

        Raises:
            UserError: it holds something already, cannot be written, or another sweep writes it.
        """
        from leanbench.records.row import SCHEMA_VERSION

        _refuse_taken(path)
        with _writable(path):
            # Again: another sweep may have come and gone.
            _refuse_taken(path)
            created = datetime.now(UTC).isoformat(timespec="microseconds")
            head = {
                "schema_version": SCHEMA_VERSION,
                "name": path.name,
                "id": secrets.token_hex(6),
                "created": created,
            }
            with _appended(path / RESULTS) as results:
                run = cls(path, {**head, **manifest}, set(), results)
                run._write_manifest()
                yield run

    @classmethod
    @contextlib.contextmanager
    def resume(cls, path: Path, manifest: dict[str, Any]) -> Iterator[RunDirectory]:
        """Opens a run to finish it. A last line, or last samples, that were cut off are dropped;
        nothing else changes.

        One that was killed before it had a manifest begins anew.

        Raises:
            UserError: no such run, another version, another sweep or GPU than `manifest` says, a
                malformed row, damaged samples, or another sweep writes it.
        """
        if (path / _LOCK).exists() and not _is_taken(path):
            with cls.create(path, manifest) as run:
                yield run
            return
        read_manifest(path)  # before anything is made at a mistyped path
        with _writable(path):
            before = read_manifest(path)
            refuse_unlike_a_manifest(path, before)
            refuse_differences(path, before, manifest)
            rows, whole = _parse_rows(path / RESULTS)
            measured = [row.cell for row in rows if row.samples is not None]
            whole_samples = length_to_resume(path, measured)
            with _appended(path / RESULTS) as results:
                try:
                    os.ftruncate(results, whole)
                    if (path / SAMPLES).exists():
                        os.truncate(path / SAMPLES, whole_samples)
                except OSError as error:
                    raise _cannot_write(path, error) from None
                yield cls(path, before, {row.cell for row in rows}, results)

    def append(self, row: Row, samples: Samples | None = None) -> None:
        """Writes the samples, then the row without its nulls, each in one piece, and waits until it
        is on the disk.
        """
        if samples is not None:
            # Opened late: a predicted run has none.
            with _appended(self.path / SAMPLES) as file:
                self._write(file, pack(samples), SAMPLES)
        self._write(self._results, row.line(), RESULTS)
        self.finished.add(row.cell)

    def sort(self) -> None:
        """Puts the rows into the order of the manifest's cells, where they came in another; no row
        is appended afterwards.
        """
        path = self.path / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        places = {cell: place for place, cell in enumerate(self.manifest["cells"])}
        ordered = sorted(lines, key=lambda line: places[json.loads(line)["cell"]])
        if ordered != lines:
            replace_file(path, "".join(ordered))

    def _write(self, file: int, content: bytes, name: str) -> None:
        try:
            append_whole(file, content)
        except OSError as error:
            where = self.path / name
            raise CannotWrite(
                f"cannot write {where} ({error.strerror}): mend that, then go on with --resume",
                error,
            ) from None

    def add_board(self, board: Board) -> None:
        """Stores what rows of this board were taken on, software and hardware."""
        if board.key not in self.manifest["environments"]:
            self.manifest["environments"][board.key] = board.environment
            boards = self.manifest.setdefault("boards", {})
            boards[board.key] = {"gpu": board.gpu, "calibration_us": board.calibration_us}
            self._write_manifest()

    def _write_manifest(self) -> None:
        path = self.path / MANIFEST
        try:
            replace_file(path, json.dumps(self.manifest, indent=2) + "\n")
        except OSError as error:
            raise _cannot_write(path, error) from None


def _is_taken(path: Path) -> bool:
    """Whether there is more than what a sweep leaves that was killed before it had a manifest."""
    try:
        names = {file.name for file in path.iterdir() if not file.name.endswith(PART)}
        begun = names - {_LOCK, RESULTS}
        results = path / RESULTS
        is_empty = results.is_file() and results.stat().st_size == 0
        return bool(begun) or (RESULTS in names and not is_empty)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CannotWrite(
            f"cannot read {path} ({error.strerror}): choose another folder with --out", error
        ) from None


def _refuse_taken(path: Path) -> None:
    if _is_taken(path):
        raise UserError(
            f"{path} is not empty: add --resume to go on with it or choose another --name"
        )


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Makes the directory if need be and holds its lock, which the operating system drops when the
    process ends, however it ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path / _LOCK, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"another sweep is writing {path}: wait for it or choose another --name"
        ) from None
    except OSError as error:
        raise _cannot_write(path, error) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise _cannot_write(path, error) from None
    try:
        yield file
    finally:
        os.close(file)


def _cannot_write(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(
        f"cannot write {path} ({error.strerror}): choose another folder with --out", error
    )


def _parse_rows(path: Path) -> tuple[list[Row], int]:
    """The rows, and how many bytes of the file hold whole lines."""
    from leanbench.records.row import read_row

    content = read_if_there(path, MOST_MB)
    whole = whole_lines(content)
    rows = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            row, _ = read_row(line)
        except ValueError as error:
            raise not_a_row(path, number, error) from None
        rows.append(row)
    return rows, len(whole)
