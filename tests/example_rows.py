"""Rows as the run directory holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from leanbench.cli.sweep_run import show_ending
from leanbench.core.problem import AttentionProblem
from leanbench.records.directory import RunDirectory
from leanbench.records.reading import Run
from leanbench.records.row import SCHEMA_VERSION, Row


def row(cell: str, **fields: Any) -> Row:
    """Return a row of `cell` with defaults for what every row has."""
    problem = AttentionProblem(1, 8, 8, 1024, 64)
    shared = {
        "problem": problem.to_dict(),
        "kernel": "lean",
        "decomposition": "stream_k",
        "kv_bytes": problem.kv_bytes,
    }
    taken = {
        "source": "predicted",
        "status": "ok",
        "latency_us": 1.5,
        "wall_s": 0.1,
        "time": "2026-01-02T03:04:05",
        "environment": "e",
    }
    return Row.model_validate({"cell": cell, **shared, **taken, **fields})


def opened(run: AbstractContextManager[RunDirectory]) -> set[str]:
    """Open and close a run. Return the cells that have a row."""
    with run as directory:
        return directory.finished


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what a sweep ends with. Rows need a problem, a kernel, a source and a status."""
    results = [
        (row(f"c{number}", **fields), AttentionProblem.from_dict(fields["problem"]))
        for number, fields in enumerate(rows)
    ]
    show_ending(Run(Path("runs/example"), {"schema_version": SCHEMA_VERSION}, tuple(results)))
