"""Problems of FlashInfer-Bench: files or folders of definitions and workloads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanbench.core.axes import AXES
from leanbench.core.errors import UserError, short
from leanbench.core.files import UnreadableFile, parse_foreign_json, read_file
from leanbench.core.lengths import as_context, write_lengths
from leanbench.core.problem import AttentionProblem
from leanbench.formats.definition import NoDecode, read_axes
from leanbench.formats.workload import read_workload

#: Folders of a dataset.
DEFINITIONS, WORKLOADS = "definitions", "workloads"
#: Definitions and workloads that a sentence names.
_NAMED = 10
_DEFINITION_MB, _WORKLOADS_MB = 10, 500

Axes = dict[str, tuple[Any, ...]]


@dataclass
class Imported:
    """Axes of grids: those of a definition, with lengths if there is a workload."""

    grids: list[Axes] = field(default_factory=list)
    #: What was left out, and why: ``rmsnorm_h4096: it is no decode attention``.
    left_out: list[str] = field(default_factory=list)
    #: Workloads of a definition that was named alone.
    not_read: Path | None = None

    @property
    def has_latent(self) -> bool:
        return any(grid.get("latent") == (True,) for grid in self.grids)

    @property
    def has_plain(self) -> bool:
        return any("latent" not in grid for grid in self.grids)

    def note(self) -> str | None:
        """Return a sentence about what was left out, or None."""
        if self.not_read:
            return f"its workloads are not swept, name {self.not_read} for them"
        if not self.left_out:
            return None
        more = len(self.left_out) - _NAMED
        named = "; ".join(self.left_out[:_NAMED])
        return f"{len(self.left_out)} left out: {named}{f'; and {more} more' if more > 0 else ''}"


def is_dataset(path: Path) -> bool:
    """Return True for a path that `read_problems` reads, by its name."""
    return path.suffix in (".json", ".jsonl") or path.is_dir()


def read_problems(path: Path) -> Imported:
    """Read a definition (.json), workloads (.jsonl) or a folder of them.

    A definition in a folder stands for its workloads, if it has any. What does not fit is left out.

    Raises:
        UserError: The file cannot be read, or holds no decode attention.
    """
    if path.is_dir():
        imported = _read_folder(path)
    elif path.suffix == ".jsonl":
        imported, lines = Imported(), _lines(path)
        _add_workloads(imported, path, lines, _read_definition(_definition_of(path)))
    else:
        return Imported([_read_definition(path)], not_read=_workloads_of(path))
    if not imported.grids:
        why = imported.note() or "there is no definition (.json) in it"
        raise UserError(f"{path} holds no decode attention of FlashInfer-Bench: {why}")
    return imported


def _read_folder(folder: Path) -> Imported:
    imported = Imported()
    definitions = _definitions_in(folder)
    read = {_workloads_of(path) for path in definitions}
    for path in definitions:
        workloads = _workloads_of(path)
        try:
            axes = _axes_of(path)
        except NoDecode as error:
            imported.left_out.append(f"{path.stem}: {error}")
        except UnreadableFile as error:
            imported.left_out.append(f"{path.stem}: {error.reason}")
        except ValueError as error:
            imported.left_out.append(f"{path.stem}: it is no definition ({error})")
        else:
            if workloads is None:
                imported.grids.append(axes)
            else:
                _add_or_name(imported, workloads, axes)
    for workloads in sorted(folder.rglob("*.jsonl")):
        if _split_at(workloads, WORKLOADS) and Path(os.path.abspath(workloads)) not in read:
            try:
                axes = _read_definition(_definition_of(workloads))
            except UserError as error:
                imported.left_out.append(f"{workloads.name}: {error}")
            else:
                _add_or_name(imported, workloads, axes)
    return imported


def _definitions_in(folder: Path) -> list[Path]:
    """Return every .json file in a folder, but of a dataset in it its definitions alone."""
    rooms = [path for path in folder.rglob(DEFINITIONS) if path.is_dir()]
    datasets = {room.parent for room in rooms}
    loose = [path for path in folder.rglob("*.json") if datasets.isdisjoint(path.parents)]
    return sorted({*loose, *(path for room in rooms for path in room.rglob("*.json"))})


def _read_definition(path: Path) -> Axes:
    try:
        return _axes_of(path)
    except NoDecode as error:
        raise UserError(f"{path} cannot be swept: {error}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is no definition of FlashInfer-Bench ({error}): give a sweep file (.toml), or"
            " what FLASHINFER_TRACE_DUMP wrote"
        ) from None


def _axes_of(path: Path) -> Axes:
    """Read a definition.

    Raises:
        UnreadableFile: It cannot be read.
        ValueError: It is no definition; NoDecode: it is none of decode attention.
    """
    axes = read_axes(parse_foreign_json(read_file(path, _DEFINITION_MB)))
    try:
        _check_problem(axes)
    except UserError as error:
        raise NoDecode(str(error)) from None
    return axes


def _check_problem(axes: Axes) -> None:
    """Raise UserError if the axes make no problem, as with 7 query heads and 2 KV heads."""
    fields = {name: value for name, [value] in axes.items() if name not in ("batch", "lengths")}
    q_heads, kv_heads = fields.pop("heads")
    [lengths] = axes.get("lengths", [(1,)])
    AttentionProblem(len(lengths), q_heads, kv_heads, as_context(lengths), **fields)


def _split_at(path: Path, room: str) -> tuple[Path, Path] | None:
    """Return the dataset and the path in its folder of definitions or workloads.

    Links are not followed: in a cache of Hugging Face every file is one.
    """
    path = Path(os.path.abspath(path))
    room_of = next((parent for parent in path.parents if parent.name == room), None)
    return None if room_of is None else (room_of.parent, path.relative_to(room_of))


def _workloads_of(definition: Path) -> Path | None:
    """Return ``workloads/OP/NAME.jsonl`` of ``definitions/OP/NAME.json``, if there is one."""
    parts = _split_at(definition, DEFINITIONS)
    if parts is None:
        return None
    root, name = parts
    path = root / WORKLOADS / name.with_suffix(".jsonl")
    return path if os.path.lexists(path) else None


def _definition_of(workloads: Path) -> Path:
    """Return ``definitions/OP/NAME.json`` of ``workloads/OP/NAME.jsonl``."""
    root, name = _split_at(workloads, WORKLOADS) or (workloads.parent, Path(workloads.name))
    path = root / DEFINITIONS / name.with_suffix(".json")
    if not path.is_file():
        raise UserError(
            f"{workloads} has no definition at {path}: keep workloads in the dataset that they"
            " are from"
        )
    return path


def _add_or_name(imported: Imported, path: Path, axes: Axes) -> None:
    try:
        _add_workloads(imported, path, _lines(path), axes)
    except UnreadableFile as error:
        imported.left_out.append(f"{path.name}: {error.reason}")


def _lines(workloads: Path) -> list[tuple[int, bytes]]:
    """Read the lines that are not blank, with their numbers."""
    lines = read_file(workloads, _WORKLOADS_MB).splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _add_workloads(
    imported: Imported, path: Path, lines: list[tuple[int, bytes]], axes: Axes
) -> None:
    """Add the problem of every line. A line that is none is left out."""
    root, _ = _split_at(path, WORKLOADS) or (path.parent, path)
    if not lines:
        imported.left_out.append(f"{path.name}: it is empty")
    for number, line in lines:
        try:
            trace = parse_foreign_json(line)
            fields = trace if isinstance(trace, dict) else {}
            if (name := fields.get("definition", path.stem)) != path.stem:
                raise ValueError(f"it is for another definition, {short(name)}")
            problem = {**axes, **read_workload(fields.get("workload"), axes, root)}
            _check_problem(problem)
            lengths = tuple(map(write_lengths, problem["lengths"]))
            for text in lengths:
                AXES["lengths"].check(text)
        except (ValueError, UserError) as error:
            imported.left_out.append(f"{path.name} line {number}: {error}")
        else:
            imported.grids.append({**problem, "lengths": lengths})
