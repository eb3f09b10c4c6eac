"""The run directory: `manifest.json`, `results.jsonl` with one row a line, `samples.jsonl.gz`."""

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
    parse_json,
    read_file,
    read_if_there,
    replace_file,
    whole_lines,
)
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
from leanbench.records.standing import recorded_spread

if TYPE_CHECKING:
    from leanbench.records.row import Row

WORKER_LOG = "worker.log"
_LOCK = "lock"


@dataclass(eq=False)
class CannotWrite(UserError):
    """A run that cannot be written."""

    message: str
    #: The operating system's.
    why: str | None

    def __str__(self) -> str:
        return self.message


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a run directory. Ignore a truncated last line.

    Raises:
        UserError: Another line is not a row.
    """
    rows, _ = _parse_rows(path / RESULTS)
    return rows


def not_a_row(path: Path, number: int, error: ValueError) -> UserError:
    """Make the error for an invalid line of `results.jsonl`."""
    return UserError(
        f"{path}, line {number} is not a row ({error}): delete that line, its cell will run again"
        " with --resume"
    )


def newest_run(parent: Path, sweep: str, cells: Collection[str]) -> Path:
    """Return the newest run of `sweep` under `parent`, preferably with exactly these cells.

    Raises:
        UserError: There is none.
    """
    candidates: list[tuple[bool, str, Path]] = []
    for manifest in parent.glob(f"*/{MANIFEST}"):
        if manifest.parent.name.endswith(PART):
            # Remains of a killed merge.
            continue
        with contextlib.suppress(UnreadableFile, ValueError, KeyError, TypeError):
            content = parse_json(read_file(manifest, MOST_MB))
            if content["sweep"]["name"] == sweep:
                candidates.append(
                    (set(content["cells"]) == set(cells), str(content["created"]), manifest.parent)
                )
    if not candidates:
        raise UserError(
            f"{parent} has no run of sweep {sweep!r} to resume: start it without --resume"
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
    """A run directory that this process writes. It is locked while open."""

    path: Path
    manifest: dict[str, Any]
    #: Keys of the cells that have a row.
    finished: set[str]
    _results: int

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: Path, manifest: dict[str, Any]) -> Iterator[RunDirectory]:
        """Create the directory and its manifest, with schema version, name, id and creation time.

        Raises:
            UserError: It is not empty, cannot be written, or another sweep writes it.
        """
        from leanbench.records.row import SCHEMA_VERSION

        _refuse_taken(path)
        with _writable(path):
            # Again: another sweep can have created it.
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
        """Open a run to finish it. Drop a truncated last row, or truncated last samples.

        A run that was killed before it had a manifest starts again.

        Raises:
            UserError: The run does not exist, has another version, sweep or GPU than `manifest`, is
                damaged, or another sweep writes it.
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
        """Write the samples, then the row, and wait until both are on the disk."""
        if samples is not None:
            # Opened late, because predicted runs have none.
            with _appended(self.path / SAMPLES) as file:
                self._write(file, pack(samples), SAMPLES)
        self._write(self._results, row.line(), RESULTS)
        self.finished.add(row.cell)

    def sort(self) -> None:
        """Sort the rows by the cells of the manifest. No row can be appended afterwards."""
        path = self.path / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        order = {cell: index for index, cell in enumerate(self.manifest["cells"])}
        ordered = sorted(lines, key=lambda line: order[json.loads(line)["cell"]])
        if ordered != lines:
            replace_file(path, "".join(ordered))

    def _write(self, file: int, content: bytes, name: str) -> None:
        try:
            append_whole(file, content)
        except OSError as error:
            where = self.path / name
            raise CannotWrite(
                f"cannot write {where} ({error.strerror}): fix it, then continue with --resume",
                error.strerror,
            ) from None

    def add_board(self, board: Board) -> None:
        """Record the board of rows, with its software."""
        if board.key not in self.manifest["environments"]:
            self.manifest["environments"][board.key] = board.environment
            boards = self.manifest.setdefault("boards", {})
            boards[board.key] = {"gpu": board.gpu, "calibration_us": board.calibration_us}
            spread = recorded_spread(board.environment.get("gpu_uuid"))
            if spread is not None:
                self.manifest["process_spread"] = spread
            self._write_manifest()

    def _write_manifest(self) -> None:
        path = self.path / MANIFEST
        try:
            replace_file(path, json.dumps(self.manifest, indent=2) + "\n")
        except OSError as error:
            raise _cannot_write(path, error) from None


def _is_taken(path: Path) -> bool:
    """Return True if a folder has more than the remains of a sweep without a manifest."""
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
            f"cannot read {path} ({error.strerror}): choose another folder with --out",
            error.strerror,
        ) from None


def _refuse_taken(path: Path) -> None:
    if _is_taken(path):
        raise UserError(
            f"{path} is not empty: add --resume to continue it or choose another --name"
        )


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Create and lock the directory. The operating system drops the lock with the process."""
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
        f"cannot write {path} ({error.strerror}): choose another folder with --out",
        error.strerror,
    )


def _parse_rows(path: Path) -> tuple[list[Row], int]:
    """Return the rows, and the length of all whole lines in bytes."""
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
