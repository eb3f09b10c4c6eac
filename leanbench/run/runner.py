"""The loop: problems through an executor, one row on the disk for each cell."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from leanbench.records.directory import RunDirectory
from leanbench.run.cells import Cell
from leanbench.run.problem_runner import Budget, CellResult, ProblemRunner
from leanbench.run.worker_process import WorkerTarget

if TYPE_CHECKING:
    from leanbench.records.row import Row


class Executor(Protocol):
    """Runs problems, all cells of one on one GPU."""

    def run(self, problems: Iterator[Sequence[Cell]], budget: Budget) -> Iterator[CellResult]:
        """Results as they come, one for each cell but those that the budget leaves out. A problem
        is taken from `problems` when there is a GPU for it.

        Raises:
            UserError: no GPU can work.
        """
        ...

    def close(self) -> None:
        """Ends what runs, at once."""
        ...


class LocalExecutor:
    """One GPU of this machine, or the performance model of one."""

    def __init__(self, target: WorkerTarget, timeout_s: float, log: Path) -> None:
        self._runner = ProblemRunner(target, timeout_s, log)

    def run(self, problems: Iterator[Sequence[Cell]], budget: Budget) -> Iterator[CellResult]:
        for cells in problems:
            yield from self._runner.run(cells, budget)

    def close(self) -> None:
        self._runner.close()


class Observer(Protocol):
    """Observer of a sweep's progress."""

    def starts(self, cell: Cell) -> None: ...

    def finished(self, cell: Cell, row: Row) -> None: ...


class Stopped(KeyboardInterrupt):
    """The sweep was asked to stop. `exit_code` is the shell's for that signal.

    Of the exceptions of a signal's handler, a wait of Ray lets KeyboardInterrupt alone through.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def run_cells(
    cells: Sequence[Cell],
    run: RunDirectory,
    executor: Executor,
    observer: Observer,
    budget_s: float | None = None,
) -> int:
    """Number of cells that have no row when the budget ends; all others have one, appended as they
    finish.

    Raises:
        Stopped: SIGINT or SIGTERM came; the workers are gone and every finished cell has its row.
        UserError: a worker does not start, or a row cannot be written.
    """
    todo = [cell for cell in cells if cell.key not in run.finished]
    budget = Budget(budget_s)
    with _stop_on_signals(), contextlib.closing(executor):
        for result in executor.run(_problems(todo, budget, observer), budget):
            if result.cell.key in run.finished:
                # Of a worker that was given up, and of the one in its place.
                continue
            run.add_board(result.board)
            # None in a run from before there were ids.
            result.row.run_id = run.manifest.get("id")
            run.append(result.row, result.samples)
            observer.finished(result.cell, result.row)
    return sum(cell.key not in run.finished for cell in cells)


def _problems(
    cells: Sequence[Cell], budget: Budget, observer: Observer
) -> Iterator[Sequence[Cell]]:
    """Cells that are measured together, kernels side by side, until the budget is spent."""
    for _, together in groupby(cells, key=lambda cell: (cell.problem, cell.configs)):
        if budget.is_spent:
            return
        problem = list(together)
        observer.starts(problem[0])
        yield problem


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped where the main thread is, but one that is ignored already,
    as Ctrl-C in a shell script's background job, stays so. A further one is ignored, also
    afterwards: all that a stopped command still does is to say how to go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for signal_number in handled:
            signal.signal(signal_number, signal.SIG_IGN)
        came.append(number)
        raise Stopped(number)

    handled = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    except BaseException:
        # Ray raises another KeyboardInterrupt, and what is ended in mid-work may fail.
        if came:
            raise Stopped(came[0]) from None
        raise
    finally:
        for number, before in handled.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, before)
