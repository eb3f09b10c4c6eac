"""Problems that definitions and workloads of FlashInfer-Bench stand for: a file of either, a folder
that FLASHINFER_TRACE_DUMP wrote, or a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError
from leanbench.core.strict_json import parse
from leanbench.formats.definition import NoDecode, read_axes
from leanbench.formats.workload import read_lengths

#: Folders of a dataset.
DEFINITIONS, WORKLOADS = "definitions", "workloads"
#: Files that a sentence names.
_NAMED = 3

Axes = dict[str, tuple[Any, ...]]


@dataclass
class Imported:
    """Axes of grids: those of a definition, with lengths where there is a workload."""

    grids: list[Axes] = field(default_factory=list)
    #: What was left out, and why: ``rmsnorm_h4096: it is no decode attention``.
    left_out: list[str] = field(default_factory=list)

    @property
    def has_latent(self) -> bool:
        return any(grid.get("latent") == (True,) for grid in self.grids)

    @property
    def has_plain(self) -> bool:
        return any("latent" not in grid for grid in self.grids)

    def note(self) -> str | None:
        """A sentence about what was left out; None: nothing was."""
        if not self.left_out:
            return None
        more = len(self.left_out) - _NAMED
        named = "; ".join(self.left_out[:_NAMED])
        return (
            f"{len(self.left_out)} file{'s' * (len(self.left_out) > 1)} left out: {named}"
            f"{f'; and {more} more' if more > 0 else ''}"
        )


def is_dataset(path: Path) -> bool:
    """Whether the path is of files that `read_problems` reads, by its name."""
    return path.suffix in (".json", ".jsonl") or path.is_dir()


def read_problems(path: Path) -> Imported:
    """What a definition (.json), workloads (.jsonl) or a folder of them stand for. Of a definition
    with workloads in the folder, those alone.

    Raises:
        UserError: it cannot be read, or holds no decode attention; the sentence names the file.
    """
    if path.is_dir():
        return _read_folder(path)
    definition = _definition_of(path) if path.suffix == ".jsonl" else path
    try:
        axes = _axes_of(definition)
    except NoDecode as error:
        raise UserError(f"{definition} cannot be swept: {error}") from None
    except ValueError as error:
        raise UserError(
            f"{definition} is no definition of FlashInfer-Bench ({error}): give a sweep file"
            " (.toml), or what FLASHINFER_TRACE_DUMP wrote"
        ) from None
    return Imported([axes] if definition == path else list(_of_workloads(path, axes)))


def _read_folder(folder: Path) -> Imported:
    imported = Imported()
    below = folder / DEFINITIONS
    for path in sorted((below if below.is_dir() else folder).rglob("*.json")):
        try:
            axes = _axes_of(path)
        except NoDecode as error:
            imported.left_out.append(f"{path.stem}: {error}")
            continue
        except ValueError as error:
            imported.left_out.append(f"{path.stem}: it is no definition ({error})")
            continue
        workloads = folder / WORKLOADS / path.parent.name / f"{path.stem}.jsonl"
        given = workloads.is_file() and below.is_dir()
        imported.grids += _of_workloads(workloads, axes) if given else [axes]
    if not imported.grids:
        why = imported.note() or "there is no definition (.json) in it"
        raise UserError(f"{folder} holds no decode attention of FlashInfer-Bench: {why}")
    return imported


def _axes_of(path: Path) -> Axes:
    """Raises ValueError where the file is no definition, NoDecode where it is none of decode
    attention.
    """
    return read_axes(parse(_read(path)))


def _definition_of(workloads: Path) -> Path:
    """``definitions/OP/NAME.json`` of ``workloads/OP/NAME.jsonl``."""
    path = _root(workloads) / DEFINITIONS / workloads.resolve().parent.name / workloads.name
    path = path.with_suffix(".json")
    if not path.is_file():
        raise UserError(
            f"{workloads} has no definition at {path}: keep workloads in the dataset that they"
            " are from"
        )
    return path


def _root(workloads: Path) -> Path:
    """The folder of the dataset, of which the workloads are ``workloads/OP/NAME.jsonl``."""
    return workloads.resolve().parent.parent.parent


def _of_workloads(path: Path, axes: Axes) -> Iterator[Axes]:
    root = _root(path)
    [page_size] = axes["page_size"]
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            trace = parse(line)
            workload = trace.get("workload") if isinstance(trace, dict) else None
            lengths = read_lengths(workload, page_size, root)
        except ValueError as error:
            raise UserError(f"{path} line {number} is no workload: {error}") from None
        yield {**axes, **lengths}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
