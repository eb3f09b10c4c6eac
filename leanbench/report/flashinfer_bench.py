"""A dataset of FlashInfer-Bench: a run's problems as definitions and workloads, `lean` as their
solution, and its rows as traces.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.quantities import Status
from leanbench.formats.definition import can_be_defined, definition_of
from leanbench.formats.safetensors import write_int32
from leanbench.formats.sources import AUTHOR, solution_name, solution_of
from leanbench.formats.workload import blob_path, index_tensors, workload_of
from leanbench.report.command import sweep_command

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Kernel that the solutions call.
SOLVED_BY = "lean"
#: Statuses of traces by those of rows. Other rows have no trace.
_STATUSES: dict[Status, str] = {
    "ok": "PASSED",
    "noisy": "PASSED",
    "incorrect": "INCORRECT_NUMERICAL",
    "crashed": "RUNTIME_ERROR",
    "timeout": "TIMEOUT",
}
_RIGHT = "PASSED"
_TAKES = (
    "it takes one query token a sequence without windows, biases, fp8 or several GPUs, and with"
    " pages lengths on the device and an exact capacity"
)


def dataset_files(runs: Sequence[Run], baseline: str | None) -> dict[str, str | bytes]:
    """Render the dataset's files by path.

    Args:
        baseline: kernel whose latency is the reference's; None if no reference was timed.

    Raises:
        UserError: no problem of the runs can be defined.
    """
    problems: dict[AttentionProblem, list[tuple[Run, Row]]] = {}
    for run in runs:
        for row, problem in run.results:
            problems.setdefault(problem, []).append((run, row))
    defined = {problem: definition_of(problem) for problem in problems if can_be_defined(problem)}
    if not defined:
        raise UserError(f"no problem of this run can be a definition of FlashInfer-Bench: {_TAKES}")
    if left_out := len(problems) - len(defined):
        logging.getLogger(__name__).warning(
            f"{left_out} of {len(problems)} problems are left out of FlashInfer-Bench: {_TAKES}"
        )
    files: dict[str, str | bytes] = {}
    lines: dict[str, list[str]] = {}
    for problem, definition in defined.items():
        workload = workload_of(problem, definition)
        files |= _described(problem, definition, workload["uuid"])
        traced = {"definition": definition["name"], "workload": workload}
        file = f"{definition['op_type']}/{definition['name']}.jsonl"
        unsolved = _line({**traced, "solution": None, "evaluation": None})
        lines.setdefault(f"workloads/{file}", []).append(unsolved)
        for evaluation in _evaluations(problem, problems[problem], baseline):
            solved = {"solution": solution_name(definition), "evaluation": evaluation}
            lines.setdefault(f"traces/{AUTHOR}/{file}", []).append(_line({**traced, **solved}))
    return files | {path: "".join(of_file) for path, of_file in lines.items()}


def _described(
    problem: AttentionProblem, definition: Mapping[str, Any], workload: str
) -> dict[str, str | bytes]:
    """Render a problem's definition, its solution and its workload's tensors."""
    path = f"{definition['op_type']}/{definition['name']}"
    solution = solution_of(problem, definition)
    solved = f"solutions/{AUTHOR}/{path}/{solution['name']}.json"
    files: dict[str, str | bytes] = {
        f"definitions/{path}.json": json.dumps(definition, indent=2) + "\n",
        solved: json.dumps(solution, indent=2) + "\n",
    }
    if tensors := index_tensors(problem):
        files[blob_path(definition, workload)] = write_int32(tensors)
    return files


def _line(trace: Mapping[str, Any]) -> str:
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _evaluations(
    problem: AttentionProblem, rows: Sequence[tuple[Run, Row]], baseline: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the solution's evaluations, with the baseline of the same run as the reference."""
    timed = {
        run.name: row.latency_us
        for run, row in rows
        if row.kernel == baseline and row.status == "ok"
    }
    for run, row in rows:
        evaluation = _evaluation(row, problem, run, timed.get(run.name))
        if evaluation is not None:
            yield evaluation


def _evaluation(
    row: Row, problem: AttentionProblem, run: Run, reference_us: float | None
) -> dict[str, Any] | None:
    """Convert a row; None for other kernels, predictions and statuses that traces lack."""
    status = _STATUSES.get(row.status)
    if row.kernel != SOLVED_BY or row.source != "measured" or row.cache != "cold" or status is None:
        return None
    evaluation: dict[str, Any] = {
        "status": status,
        "environment": _environment(row, run),
        "timestamp": row.time,
        "log": "\n".join(filter(None, [row.reason, sweep_command(row, problem, run)])),
    }
    if status in (_RIGHT, _STATUSES["incorrect"]):
        evaluation["correctness"] = _correctness(row)
    if status == _RIGHT and row.latency_us is not None:
        evaluation["performance"] = {"latency_ms": row.latency_us * 1e-3}
        if reference_us is not None:
            evaluation["performance"] |= {
                "reference_latency_ms": reference_us * 1e-3,
                "speedup_factor": reference_us / row.latency_us,
            }
    return evaluation


def _environment(row: Row, run: Run) -> dict[str, Any]:
    recorded = run.environments.get(row.environment, {})
    libs = {name: str(value) for name, value in recorded.items() if value is not None}
    return {"hardware": run.gpu_name(row.environment).replace(" ", "_"), "libs": libs}


def _correctness(row: Row) -> dict[str, Any]:
    """Return the errors of rows. Elementwise errors, which rows lack, are NaN."""
    measured = {"relative_error_of_norms": row.relative_error, "lse_error": row.lse_error}
    return {
        "max_relative_error": str(math.nan),
        "max_absolute_error": str(math.nan),
        "extra": {name: value for name, value in measured.items() if value is not None},
    }
