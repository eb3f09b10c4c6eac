"""Where the problems of a sweep run: on one GPU of this machine, here, or on those of a cluster
(leanbench.run.cluster_executor).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from leanbench.run.cells import Cell
from leanbench.run.limits import Budget
from leanbench.run.problem_runner import CellResult, ProblemRunner
from leanbench.run.worker_process import WorkerTarget


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
