"""Problems through a worker process on one target, a row for each cell, whatever happens to the
worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leanbench.core.registry import kernel
from leanbench.records.boards import Board
from leanbench.records.directory import WORKER_LOG
from leanbench.records.samples import Samples
from leanbench.run.cells import Cell
from leanbench.run.limits import Budget
from leanbench.run.worker_process import WorkerLost, WorkerProcess, WorkerTarget, WorkerTimeout


@dataclass(frozen=True)
class CellResult:
    """Row of a cell, validated, the raw samples behind it, and the board that it was taken on."""

    cell: Cell
    row: dict[str, Any]
    samples: Samples | None
    board: Board


class ProblemRunner:
    """One worker at a time, replaced when it dies, or where a problem needs a new one.

    Args:
        log: what the workers' stdout and stderr are appended to.
        gives_up: a worker that was killed ends `run`, as the problem can run elsewhere.
    """

    def __init__(
        self, target: WorkerTarget, timeout_s: float, log: Path, gives_up: bool = False
    ) -> None:
        self._target, self._timeout_s, self._log = target, timeout_s, log
        self._gives_up = gives_up
        self._worker: WorkerProcess | None = None
        self._board: Board | None = None

    def board(self) -> Board:
        """What rows stand for, as the worker says.

        Raises:
            UserError: the worker does not start.
        """
        self._started()
        assert self._board is not None
        return self._board

    def run(self, cells: Sequence[Cell], budget: Budget) -> Iterator[CellResult]:
        """One result for each cell of a problem.

        Whoever fails gets a row and leaves; the others are asked for again, of a new worker if need
        be, unless the budget is spent.

        Raises:
            UserError: a worker does not start.
            WorkerLost: it was killed, where that ends the problem.
        """
        left = {cell.kernel: cell for cell in cells}
        while left:
            worker, board = self._started(), self.board()
            begun = time.monotonic()
            usable = False
            try:
                outcomes, usable = worker.run(list(left.values()), self._timeout_s)
            except WorkerTimeout as late:
                reason = f"no result within {self._timeout_s:g} s, raise the limit with --timeout"
                outcomes = _blame(late.blamed, left, {"status": "timeout", "reason": reason})
            except WorkerLost as lost:
                if lost.was_killed and self._gives_up:
                    raise
                outcomes = _blame(
                    lost.blamed, left, {"status": "crashed", "reason": f"{lost}, see {WORKER_LOG}"}
                )
            if not usable:
                self.close()
            wall_s = (time.monotonic() - begun) / max(1, len(outcomes))
            for name, outcome in outcomes.items():
                yield result_of(left.pop(name), outcome, board, wall_s)
            if budget.is_spent:
                return

    def close(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.kill()

    def _started(self) -> WorkerProcess:
        if self._worker is None:
            self._worker = WorkerProcess(self._target, self._log)
            calibration_us = self._worker.calibration_us
            if calibration_us is None and self._board is not None:
                calibration_us = self._board.calibration_us
            self._board = Board(
                self._target.source,
                asdict(self._target.gpu),
                self._worker.environment,
                calibration_us,
            )
            # Once for all of its workers.
            self._target = replace(self._target, calibrate=False)
        return self._worker


def result_of(cell: Cell, outcome: dict[str, Any], board: Board, wall_s: float) -> CellResult:
    """The cell's result with these fields of its row; a row that says so where they, or the raw
    samples among them, are malformed.
    """
    from pydantic import ValidationError

    from leanbench.records.row import first_fault

    fields = {
        "cell": cell.key,
        "problem": cell.problem.to_dict(),
        "kernel": cell.kernel,
        "decomposition": kernel(cell.kernel).decomposition,
        "source": board.source,
        "kv_bytes": cell.problem.kv_bytes,
        "cache": cell.cache,
        "wall_s": round(wall_s, 3),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": board.key,
    }
    raw = outcome.pop("raw_samples", None)
    try:
        row = _row_of({**outcome, **fields})
        samples = None if raw is None else _samples_of(cell, raw)
    except (TypeError, ValueError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else str(error)
        reason = f"the kernel's result is malformed: {fault}"
        row = _row_of({**fields, "status": "crashed", "reason": reason})
        samples = None
    return CellResult(cell, row, samples, board)


def _row_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A row whose line can be read again: one that cannot would hide all others of its run.

    Raises:
        ValueError: these fields are no row, or one of them cannot be in a file.
    """
    from leanbench.records.row import Row, read_row

    row = Row.model_validate(fields).model_dump(mode="json")
    read_row(json.dumps(row))
    return row


def _samples_of(cell: Cell, raw: dict[str, Any]) -> Samples:
    """Samples that can be read again.

    Raises:
        TypeError: these are no keys and values.
        ValueError: these are no samples, or one is no finite number.
    """
    samples = Samples.model_validate({**raw, "cell": cell.key})
    return Samples.model_validate_json(samples.model_dump_json())


def _blame(
    name: str | None, left: Mapping[str, Cell], outcome: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The outcome for the kernel to blame; for all where that is nobody."""
    return {kernel: dict(outcome) for kernel in left if name in (None, kernel)}
