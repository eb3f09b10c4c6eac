"""Sweeps on the GPUs of a cluster: an agent with a worker process per GPU, rows written here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from leanbench.cluster.cluster import ActorLost, Alike, Cluster
from leanbench.cluster.dispatch import Dispatcher, Lost
from leanbench.core.errors import UserError
from leanbench.gpu.local import Target, choose
from leanbench.measure.options import MeasureOptions
from leanbench.records.boards import Board
from leanbench.run.cells import Cell
from leanbench.run.problem_runner import Budget, CellResult, ProblemRunner, result_of
from leanbench.run.runner import Observer
from leanbench.run.worker_process import WorkerLost, WorkerTarget


@dataclass(frozen=True)
class AgentRequest:
    """Settings of all agents of a sweep: --gpu, --require-gpu, and how to measure."""

    gpu: str | None
    require_gpu: bool
    options: MeasureOptions
    timeout_s: float
    variables: Mapping[str, str]
    #: GPUs of the largest problem.
    gpus: int = 1


@dataclass(frozen=True)
class Problem:
    """Cells of one problem, and the remaining budget."""

    cells: Sequence[Cell]
    budget_s: float | None


@dataclass(frozen=True)
class Answer:
    """Results of a problem, and the output of its worker."""

    results: Sequence[CellResult]
    log: bytes


class SweepAgent:
    """Actor with a worker process on its GPU."""

    def __init__(self, request: AgentRequest) -> None:
        os.environ.update(request.variables)
        self._request = request
        self._folder = tempfile.TemporaryDirectory(prefix="leanbench-agent-")
        self._log = Path(self._folder.name) / "worker.log"
        self._runner: ProblemRunner | None = None

    def target(self) -> Target:
        return choose(self._request.gpu, self._request.require_gpu)

    def board(self) -> Board:
        target = self.target()
        measured = target.local_index is not None
        request = self._request
        worker = WorkerTarget(
            target.spec, target.local_index, request.options, measured, request.gpus
        )
        self._runner = ProblemRunner(worker, request.timeout_s, self._log, gives_up=True)
        return self._runner.board()

    def work(self, job: Problem, /) -> Answer:
        assert self._runner is not None
        budget = Budget(job.budget_s)
        try:
            results = [] if budget.is_spent else list(self._runner.run(job.cells, budget))
        except WorkerLost as lost:
            raise ActorLost(str(lost)) from None
        printed = self._log.read_bytes()
        os.truncate(self._log, 0)
        return Answer(results, printed)


class ClusterExecutor:
    """Executor on the GPUs of a cluster, with an agent each.

    Args:
        say: Receives a sentence about each unexpected event.

    Raises:
        UserError: The cluster has no GPU, or no node has enough for a problem.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: AgentRequest,
        cells: Sequence[Cell],
        say: Callable[[str], None],
    ) -> None:
        largest = max(cells, key=lambda cell: cell.problem.gpus.gpus)
        gpus = largest.problem.gpus.gpus
        try:
            self._dispatcher: Dispatcher[Sequence[Cell]] = Dispatcher(
                cluster, SweepAgent, (replace(request, gpus=gpus),), say, gpus
            )
        except UserError as error:
            named = f"{largest.problem.label}: " if gpus > 1 else ""
            raise UserError(f"{named}{error}") from None
        self._say = say

    def target(self) -> Target:
        return self._dispatcher.target()

    def prepare(self, target: Target, log: Path, first: Board | None, mix_boards: bool) -> None:
        """Set the log of the workers and the requirements on boards, before `run`."""
        self._log = log
        self._refusal = Alike(target, first, mix_boards, self._say)

    def run(
        self, problems: Iterator[Sequence[Cell]], budget: Budget, observer: Observer
    ) -> Iterator[CellResult]:
        def job(cells: Sequence[Cell]) -> Problem:
            observer.starts(cells[0])
            return Problem(cells, budget.left_s)

        for cells, answer in self._dispatcher.run(problems, job, self._refusal):
            if isinstance(answer, Lost):
                outcome = {"status": "crashed", "reason": answer.reason}
                for cell in cells:
                    yield result_of(cell, dict(outcome), answer.board, 0.0)
                continue
            if answer.log:
                with self._log.open("ab") as log:
                    log.write(answer.log)
            yield from answer.results

    def close(self) -> None:
        self._dispatcher.close()
