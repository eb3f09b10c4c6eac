"""The loop: one problem after another through a worker, one row for each cell, whatever happens to
the worker.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from types import FrameType
from typing import Any, Protocol

from leanbench.core.registry import kernel
from leanbench.records.directory import WORKER_LOG, RunDirectory
from leanbench.records.environment import environment_key
from leanbench.records.samples import Samples
from leanbench.run.cells import Cell
from leanbench.run.worker_process import WorkerLost, WorkerProcess, WorkerTarget, WorkerTimeout


class Observer(Protocol):
    """Observer of a sweep's progress."""

    def starts(self, cell: Cell) -> None: ...

    def finished(self, cell: Cell, row: dict[str, Any]) -> None: ...


class Stopped(Exception):
    """The sweep was asked to stop. `exit_code` is the shell's for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Limits:
    """Limits of a sweep, in seconds."""

    #: One kernel on one problem, everything included.
    timeout_s: float = 120.0
    #: No cell starts after this many seconds, also not once more because another kernel of its
    #: problem failed; None is no limit.
    budget_s: float | None = None


def run_cells(
    cells: Sequence[Cell],
    run: RunDirectory,
    target: WorkerTarget,
    limits: Limits,
    observer: Observer,
) -> int:
    """Number of cells that have no row when the budget ends; all others have one, appended as they
    finish.

    Raises:
        Stopped: SIGINT or SIGTERM came; the worker is gone and every finished cell has its row.
        UserError: a worker does not start, or a row cannot be written.
    """
    todo = [cell for cell in cells if cell.key not in run.finished]
    left = len(todo)
    with _stop_on_signals(), contextlib.closing(_Workers(run, target, limits)) as workers:
        for cells_together in _by_problem(todo):
            if workers.budget_is_spent:
                break
            observer.starts(cells_together[0])
            for cell, row, samples in workers.run(cells_together):
                run.append(row, samples)
                left -= 1
                observer.finished(cell, row)
    return left


def _by_problem(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that are measured together, kernels side by side."""
    for _, together in groupby(cells, key=lambda cell: (cell.problem, cell.configs)):
        yield list(together)


class _Workers:
    """One worker at a time, replaced when it dies."""

    def __init__(self, run: RunDirectory, target: WorkerTarget, limits: Limits) -> None:
        self._run, self._target, self._limits = run, target, limits
        self._created_s = time.monotonic()
        self._worker: WorkerProcess | None = None
        self._environment = ""

    @property
    def budget_is_spent(self) -> bool:
        budget_s = self._limits.budget_s
        return budget_s is not None and time.monotonic() - self._created_s >= budget_s

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any], Samples | None]]:
        """One row for each cell of a problem, validated, and the raw samples behind it.

        Whoever fails gets a row and leaves; the others are asked for again, of a new worker if need
        be, unless the budget is spent.
        """
        left = {cell.kernel: cell for cell in cells}
        while left:
            worker = self._started()
            begun = time.monotonic()
            usable = False
            try:
                outcomes, usable = worker.run(list(left.values()), self._limits.timeout_s)
            except WorkerTimeout as late:
                reason = (
                    f"no result within {self._limits.timeout_s:g} s, raise the limit with --timeout"
                )
                outcomes = _blame(late.blamed, left, {"status": "timeout", "reason": reason})
            except WorkerLost as lost:
                outcomes = _blame(
                    lost.blamed, left, {"status": "crashed", "reason": f"{lost}, see {WORKER_LOG}"}
                )
            if not usable:
                self.close()
            wall_s = (time.monotonic() - begun) / max(1, len(outcomes))
            for name, outcome in outcomes.items():
                cell = left.pop(name)
                raw = outcome.pop("raw_samples", None)
                samples = None if raw is None else Samples(cell=cell.key, **raw)
                yield cell, self._row(cell, outcome, wall_s), samples
            if self.budget_is_spent:
                return

    def close(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.kill()

    def _started(self) -> WorkerProcess:
        if self._worker is None:
            self._worker = WorkerProcess(self._target, self._run.path / WORKER_LOG)
            self._environment = environment_key(self._worker.environment)
            self._run.add_environment(self._environment, self._worker.environment)
        return self._worker

    def _row(self, cell: Cell, outcome: dict[str, Any], wall_s: float) -> dict[str, Any]:
        from pydantic import ValidationError

        from leanbench.records.row import Row, first_fault

        fields = {
            "cell": cell.key,
            "problem": cell.problem.to_dict(),
            "kernel": cell.kernel,
            "decomposition": kernel(cell.kernel).decomposition,
            "source": "predicted" if self._target.local_index is None else "measured",
            "kv_bytes": cell.problem.kv_bytes,
            "cache": cell.cache,
            "wall_s": round(wall_s, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": self._environment,
            # None in a run from before there were ids.
            "run_id": self._run.manifest.get("id"),
        }
        try:
            row = Row.model_validate({**outcome, **fields})
        except ValidationError as error:
            reason = f"the kernel's result is malformed: {first_fault(error)}"
            row = Row.model_validate({**fields, "status": "crashed", "reason": reason})
        return row.model_dump(mode="json")


def _blame(
    name: str | None, left: Mapping[str, Cell], outcome: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The outcome for the kernel to blame; for all where that is nobody."""
    return {kernel: dict(outcome) for kernel in left if name in (None, kernel)}


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped where the main thread is; a further one while stopping is
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for signal_number in handled:
            signal.signal(signal_number, signal.SIG_IGN)
        raise Stopped(number)

    handled = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in handled.items():
            signal.signal(number, before)
