"""The loop of a sweep: problems through an executor, one row on disk for each cell."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from leanbench.core.quantities import TIMED
from leanbench.measure.timing import median_interval
from leanbench.records.directory import RunDirectory
from leanbench.records.standing import spread_of_processes
from leanbench.run.cells import Cell
from leanbench.run.problem_runner import Budget, CellResult, ProblemRunner
from leanbench.run.worker_process import WorkerTarget

if TYPE_CHECKING:
    from leanbench.records.row import Row


class Executor(Protocol):
    """Runs problems, with all cells of a problem on the same GPU."""

    def run(
        self, problems: Iterator[Sequence[Cell]], budget: Budget, observer: Observer
    ) -> Iterator[CellResult]:
        """Yield results as they come, one per cell, until the budget is spent.

        Takes a problem from `problems` when a GPU is free, and tells the observer when it starts;
        raises UserError if no GPU can work.
        """
        ...

    def close(self) -> None:
        """Stop all work at once."""
        ...


class Observer(Protocol):
    """Observer of a sweep's progress."""

    def starts(self, cell: Cell, process: int = 1) -> None:
        """Report a problem, by its first cell, and the process that begins to measure it."""

    def measured(self, cell: Cell) -> None:
        """Report a cell that one of several processes has measured."""

    def finished(self, cell: Cell, row: Row) -> None:
        """Report a cell and its row."""


#: Seconds after which a process takes no further problem, and the next one repeats those of the
#: turn. Longer turns show rows later and lose more at an interruption; in shorter ones the start of
#: a process, some five seconds, weighs more.
_TURN_S = 30.0


class LocalExecutor:
    """Executor on one GPU of this machine, or on the performance model of one.

    Args:
        repeat: Fresh processes that measure each cell.
    """

    def __init__(self, target: WorkerTarget, timeout_s: float, log: Path, repeat: int = 1) -> None:
        self._runner = ProblemRunner(target, timeout_s, log)
        self._repeat = repeat

    def run(
        self, problems: Iterator[Sequence[Cell]], budget: Budget, observer: Observer
    ) -> Iterator[CellResult]:
        for cells in problems:
            if self._repeat > 1:
                yield from self._repeated(chain([cells], problems), budget, observer)
            else:
                observer.starts(cells[0])
                yield from self._runner.run(cells, budget)

    def _repeated(
        self, problems: Iterator[Sequence[Cell]], budget: Budget, observer: Observer
    ) -> Iterator[CellResult]:
        """Measure problems for a turn in one process, then in others, each with another kernel
        first. A problem has results once the last process is done with it.

        A kernel that fails is not repeated. Cells that the budget left unfinished have no result.
        """
        results: dict[str, list[CellResult]] = {}
        failed: set[str] = set()

        def measure(cells: Sequence[Cell], number: int) -> None:
            observer.starts(cells[0], number + 1)
            first = number % len(cells)
            rotated = [*cells[first:], *cells[:first]]
            left = [cell for cell in rotated if cell.key not in failed]
            for result in self._runner.run(left, budget):
                results.setdefault(result.cell.key, []).append(result)
                observer.measured(result.cell)
                if result.row.status not in TIMED:
                    failed.add(result.cell.key)

        turn: list[Sequence[Cell]] = []
        self._runner.close()
        self._runner.board()  # starts the process
        left_s = budget.left_s
        time = Budget(_TURN_S if left_s is None else min(_TURN_S, left_s / self._repeat))
        for cells in problems:
            turn.append(cells)
            measure(cells, 0)
            if time.is_spent:
                break
        for number in range(1, self._repeat):
            self._runner.close()
            for cells in turn:
                measure(cells, number)
                if number < self._repeat - 1:
                    continue
                for cell in cells:
                    of_cell = results.get(cell.key, [])
                    if cell.key in failed or len(of_cell) == self._repeat:
                        yield _of_processes(of_cell)

    def close(self) -> None:
        self._runner.close()


class Stopped(KeyboardInterrupt):
    """A signal stopped the sweep. `exit_code` is the one of the shell.

    Derives from KeyboardInterrupt: a wait of Ray lets no other exception of a handler through.
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
    prepare: Callable[[Sequence[Cell]], None] | None = None,
) -> int:
    """Run all cells without a row and append their rows. Return the number not started in budget.

    Args:
        prepare: Called with these cells before the first one.

    Raises:
        Stopped: SIGINT or SIGTERM came. The workers ended, and finished cells have rows.
        UserError: A worker does not start, or a row cannot be written.
    """
    todo = [cell for cell in cells if cell.key not in run.finished]
    budget = Budget(budget_s)
    with _stop_on_signals(), contextlib.closing(executor):
        if prepare is not None:
            prepare(todo)
        for result in executor.run(_problems(todo, budget), budget, observer):
            if result.cell.key in run.finished:
                # From an agent that was given up, and from its replacement.
                continue
            run.add_board(result.board)
            result.row.run_id = run.manifest.get("id")
            run.append(result.row, result.samples)
            observer.finished(result.cell, result.row)
    return sum(cell.key not in run.finished for cell in cells)


def _problems(cells: Sequence[Cell], budget: Budget) -> Iterator[Sequence[Cell]]:
    """Yield the cells that are measured together, until the budget is spent."""
    for _, together in groupby(cells, key=lambda cell: (cell.problem, cell.configs)):
        if budget.is_spent:
            return
        yield list(together)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Raise Stopped on SIGINT and SIGTERM in the main thread.

    A signal that is already ignored stays ignored, as in background jobs. After the first signal,
    all are ignored: the command only prints how to resume.
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
        # Ray raises its own KeyboardInterrupt, and interrupted work can fail.
        if came:
            raise Stopped(came[0]) from None
        raise
    finally:
        for number, before in handled.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, before)


def _of_processes(results: Sequence[CellResult]) -> CellResult:
    """Return the result of the process with the median latency (of two, the lower one).

    Its interval becomes one over processes, which includes its own. A result without a latency is
    the cell's: the kernel failed.
    """
    failed = next((each for each in results if each.row.status not in TIMED), None)
    if failed is not None:
        return failed
    latencies_us = [each.row.latency_us for each in results if each.row.latency_us is not None]
    ordered = sorted(results, key=lambda each: each.row.latency_us or 0.0)
    median = ordered[(len(ordered) - 1) // 2]
    row = median.row
    low, high = median_interval(latencies_us)
    noisy = next((each.row for each in [median, *results] if each.row.status == "noisy"), row)
    warnings = [warning for each in results for warning in each.row.warnings or ()]
    changed = {
        "latency_ci_low_us": min(low, row.latency_ci_low_us or low),
        "latency_ci_high_us": max(high, row.latency_ci_high_us or high),
        "processes": len(results),
        "process_spread": spread_of_processes(latencies_us),
        "status": noisy.status,
        "reason": noisy.reason,
        "warnings": list(dict.fromkeys(warnings)),
        "wall_s": round(sum(each.row.wall_s for each in results), 3),
    }
    samples = median.samples
    if samples is not None:
        samples = samples.model_copy(update={"processes_us": latencies_us})
    return replace(median, row=row.model_copy(update=changed), samples=samples)
