"""Merging of the runs of shards: every cell once, every row unchanged."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.files import PART, UnreadableFile, read_file
from leanbench.records.boards import Board, boards_of, difference
from leanbench.records.directory import WORKER_LOG, CannotWrite, RunDirectory, read_rows
from leanbench.records.manifest import MOST_MB, read_manifest, refuse_unlike_a_manifest
from leanbench.records.samples import read_whole_samples

if TYPE_CHECKING:
    from leanbench.records.row import Row

#: Keys that manifests must share, with their names in messages.
_SAME = {"source": "source", "sweep": "request", "measure": "settings of measuring"}


@dataclass(frozen=True)
class _Part:
    path: Path
    manifest: dict[str, Any]
    #: Rows by cell.
    rows: dict[str, Row]

    @property
    def wanted(self) -> list[str]:
        """Return the cells of the whole sweep, in order."""
        return self.manifest.get("shard", self.manifest)["cells"]

    @property
    def origin(self) -> dict[str, Any]:
        """Return the origin for the merged manifest."""
        shard = self.manifest.get("shard")
        words = {} if shard is None else {"shard": f"{shard['index']}/{shard['count']}"}
        return {name: self.manifest.get(name) for name in ("name", "id", "created")} | words


def merge_runs(paths: Sequence[Path], out: Path, mix_boards: bool = False) -> list[str]:
    """Write the run `out` with rows and samples of all runs, in the order of the sweep.

    Returns:
        A phrase for each accepted difference of boards.

    Raises:
        UserError: The runs differ in request, target, leanbench, kernels or settings, or in boards
            unless `mix_boards`. A cell has two rows or none. `out` exists or cannot be written.
    """
    parts = [_read(path) for path in paths]
    _refuse_twice(parts)
    for part in parts[1:]:
        _refuse_other_request(parts[0], part)
    differences = list(_differences(parts, mix_boards))
    _refuse_cells(parts)
    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    unfinished = out.with_name(f".{out.name}{PART}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _write(parts, out.name, unfinished)
        unfinished.rename(out)
    except (CannotWrite, OSError) as error:
        # Name `out`, not the unfinished folder.
        why = error.strerror if isinstance(error, OSError) else error.why
        raise UserError(
            f"cannot write {out} ({why}): make room, or choose another folder with --out"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return differences


def _read(path: Path) -> _Part:
    manifest = read_manifest(path)
    refuse_unlike_a_manifest(path, manifest)
    return _Part(path, manifest, {row.cell: row for row in read_rows(path)})


def _refuse_twice(parts: Sequence[_Part]) -> None:
    resolved = [part.path.resolve() for part in parts]
    for part in parts:
        if resolved.count(part.path.resolve()) > 1:
            raise UserError(f"run {str(part.path)!r} is given twice: name each run once")


def _refuse_other_request(first: _Part, other: _Part) -> None:
    for name, what in _SAME.items():
        if first.manifest.get(name) != other.manifest.get(name):
            raise UserError(
                f"{other.path} has another {what} than {first.path}"
                f" ({_what_differs(first.manifest.get(name), other.manifest.get(name))}): merge"
                " only runs of one command"
            )
    if first.wanted != other.wanted:
        raise UserError(
            f"{other.path} has other cells than {first.path} ({len(other.wanted)} and"
            f" {len(first.wanted)} in all): merge only runs of one command"
        )


def _what_differs(first: Any, other: Any) -> str:
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return f"{other}, not {first}"
    return ", ".join(name for name in {**first, **other} if first.get(name) != other.get(name))


def _differences(parts: Sequence[_Part], mix_boards: bool) -> Iterator[str]:
    """Yield accepted differences of boards from the first one."""
    boards = [(part.path, board) for part in parts for board in boards_of(part.manifest)]
    for path, board in boards[1:]:
        found = difference(boards[0][1], board)
        if found is None:
            continue
        phrase = f"{_at(path, board)}: {found.phrase} as in {_at(*boards[0])}"
        if not found.mixable:
            raise UserError(f"{phrase}: run its cells again, merge takes one of each")
        if not mix_boards:
            raise UserError(f"{phrase}: run its cells on an equal GPU, or add --mix-boards")
        yield phrase


def _at(path: Path, board: Board) -> str:
    return f"{path} ({board.label})"


def _refuse_cells(parts: Sequence[_Part]) -> None:
    """Reject cells with two rows or none."""
    owners: dict[str, _Part] = {}
    for part in parts:
        for cell in part.rows:
            if cell in owners:
                raise UserError(
                    f"cell {cell} has a row in {owners[cell].path} and in {part.path}: leave one of"
                    " the two runs out"
                )
            owners[cell] = part
    missing = [cell for cell in parts[0].wanted if cell not in owners]
    if missing:
        unfinished = [
            part.path for part in parts if not set(part.manifest["cells"]) <= part.rows.keys()
        ]
        where = (
            f"finish {unfinished[0]} with --resume"
            if unfinished
            else "name the runs that have them"
        )
        raise UserError(
            f"{len(missing)} of {len(parts[0].wanted)} cells have no row, such as {missing[0]}:"
            f" {where}"
        )


def _write(parts: Sequence[_Part], name: str, path: Path) -> None:
    first = parts[0].manifest
    manifest = {
        "name": name,
        "command": _without_shard(str(first.get("command", ""))),
        **{key: first[key] for key in ("source", "sweep", "measure", "gpu") if key in first},
        "environments": {},
        "boards": {},
        "cells": parts[0].wanted,
        "merged": [part.origin for part in parts],
    }
    for key in ("environments", "boards"):
        for part in parts:
            manifest[key] |= part.manifest.get(key, {})
    samples = {cell: raw for part in parts for cell, raw in read_whole_samples(part.path).items()}
    rows = {cell: row for part in parts for cell, row in part.rows.items()}
    with RunDirectory.create(path, manifest) as run:
        for cell in manifest["cells"]:
            run.append(rows[cell], samples.get(cell))
    logs = [part.path / WORKER_LOG for part in parts if (part.path / WORKER_LOG).is_file()]
    if logs:
        (path / WORKER_LOG).write_bytes(b"".join(map(_read_log, logs)))


def _read_log(log: Path) -> bytes:
    try:
        return read_file(log, MOST_MB)
    except UnreadableFile as error:
        raise UserError(
            f"cannot read {log} ({error.reason}): make it readable, or remove it"
        ) from None


def _without_shard(command: str) -> str:
    words = shlex.split(command)
    if "--shard" in words:
        at = words.index("--shard")
        del words[at : at + 2]
    return shlex.join(words)
