"""`lean` as a solution of FlashInfer-Bench: Python that calls the installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.formats import sources

#: Of solutions and traces, and a folder of both.
AUTHOR = "leanbench"
_ENTRY = "main.py"


def solution_of(problem: AttentionProblem, definition: Mapping[str, Any]) -> dict[str, Any]:
    """The solution of the problem's definition."""
    return {
        "name": solution_name(definition),
        "definition": definition["name"],
        "author": AUTHOR,
        "description": "LeanAttention (stream-K), with the launch settings that leanbench finds for"
        " the GPU. Needs the package leanbench.",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": f"{_ENTRY}::run",
            "dependencies": ["leanbench"],
            "destination_passing_style": False,
        },
        "sources": [
            {"path": _ENTRY, "content": sources.solution(list(definition["inputs"]), problem)}
        ],
    }


def solution_name(definition: Mapping[str, Any]) -> str:
    return f"leanbench_lean_{definition['name']}"
