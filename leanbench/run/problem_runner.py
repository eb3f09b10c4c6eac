"""Problems through a worker process on one target, with a row for each cell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.registry import kernel
from leanbench.records.boards import Board
from leanbench.records.directory import WORKER_LOG
from leanbench.records.samples import Samples
from leanbench.run.cells import Cell
from leanbench.run.worker_process import WorkerLost, WorkerProcess, WorkerTarget, WorkerTimeout

if TYPE_CHECKING:
    from leanbench.records.row import Row


@dataclass(frozen=True)
class Limits:
    """Limits of a sweep, in seconds."""

    #: One kernel on one problem, in total.
    timeout_s: float = 120.0
    #: No cell starts or is retried after this; None for no limit.
    budget_s: float | None = None


class Budget:
    """Time from now in which cells can start; unlimited without seconds."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end_s = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else self._end_s - time.monotonic()

    @property
    def is_spent(self) -> bool:
        return self._end_s is not None and time.monotonic() >= self._end_s


@dataclass(frozen=True)
class CellResult:
    """Row of a cell, its raw samples and its board."""

    cell: Cell
    row: Row
    samples: Samples | None
    board: Board


class ProblemRunner:
    """Runs problems in one worker at a time. Replaces a worker that died or cannot continue.

    Args:
        log: Receives the output of the workers.
        gives_up: Let a worker that was killed end `run`: the problem can run elsewhere.
    """

    def __init__(
        self, target: WorkerTarget, timeout_s: float, log: Path, gives_up: bool = False
    ) -> None:
        self._target, self._timeout_s, self._log = target, timeout_s, log
        self._gives_up = gives_up
        self._worker: WorkerProcess | None = None
        self._board: Board | None = None

    def board(self) -> Board:
        """Return the board of the rows; raise UserError if the worker does not start."""
        self._started()
        assert self._board is not None
        return self._board

    def run(self, cells: Sequence[Cell], budget: Budget) -> Iterator[CellResult]:
        """Yield one result for each cell of a problem.

        A failing kernel is recorded and dropped. The others are retried, in a new worker if
        necessary, unless the budget is spent.

        Raises:
            UserError: A worker does not start.
            WorkerLost: It was killed, and `gives_up` is set.
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
            # Only the first worker calibrates.
            self._target = replace(self._target, calibrate=False)
        return self._worker


def result_of(cell: Cell, outcome: dict[str, Any], board: Board, wall_s: float) -> CellResult:
    """Return the result of a cell; a row that is crashed if its fields or samples are malformed."""
    from pydantic import ValidationError

    from leanbench.records.row import first_fault, make_row

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
        row = make_row({**outcome, **fields})
        samples = None if raw is None else Samples.model_validate({**raw, "cell": cell.key})
    except (TypeError, ValueError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else str(error)
        reason = f"the kernel's result is malformed: {fault}"
        row, samples = make_row({**fields, "status": "crashed", "reason": reason}), None
    return CellResult(cell, row, samples, board)


def _blame(
    name: str | None, left: Mapping[str, Cell], outcome: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the outcome for the blamed kernel; for all kernels if none is blamed."""
    return {kernel: dict(outcome) for kernel in left if name in (None, kernel)}
