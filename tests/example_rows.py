"""Rows as the run directory holds them."""

from __future__ import annotations

from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.records.row import Row


def row(cell: str, **fields: Any) -> dict[str, Any]:
    """A row of `cell` with every field, as it is read back."""
    problem = AttentionProblem(1, 8, 8, 1024, 64)
    asked = {
        "problem": problem.to_dict(),
        "kernel": "lean",
        "decomposition": "stream_k",
        "kv_bytes": problem.kv_bytes,
    }
    taken = {
        "source": "predicted",
        "status": "ok",
        "wall_s": 0.1,
        "time": "2026-01-02T03:04:05",
        "environment": "e",
    }
    return Row.model_validate({"cell": cell, **asked, **taken, **fields}).model_dump(mode="json")
