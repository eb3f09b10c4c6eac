"""A tuning on the GPUs of a cluster: each family on one GPU, from its first timing to its fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from leanbench.cluster.alike import Alike
from leanbench.cluster.cluster import Cluster
from leanbench.cluster.dispatch import Dispatcher, Lost
from leanbench.configs.space import FamilyKey
from leanbench.configs.tuned import Family, Objective
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import Target, choose
from leanbench.records.boards import Board
from leanbench.tune.journal import Journal, Timed
from leanbench.tune.plan import Plan
from leanbench.tune.result import Summary
from leanbench.tune.run import (
    Request,
    check_budget,
    forget,
    journal_at,
    journal_of,
    tune,
    versions_of,
)

#: In the journal here, in place of a board: timings of one family are of one board, noted whole.
_CLUSTER = "cluster"


@dataclass(frozen=True)
class AgentRequest:
    """What agents of a tuning are to do: --gpu and --require-gpu."""

    gpu: str | None
    require_gpu: bool
    variables: Mapping[str, str]


@dataclass(frozen=True)
class FamilyJob:
    """One family, and the timings of it that an interrupted command has left."""

    family: FamilyKey
    plan: Plan
    objective: Objective
    timed: Sequence[Timed]


@dataclass(frozen=True)
class TunedFamily:
    """What a tuning of one family returns, and its timings."""

    summary: Summary
    family: Family
    timed: Sequence[Timed]


class TuneAgent:
    """In an actor: tunes on the actor's GPU."""

    def __init__(self, request: AgentRequest) -> None:
        os.environ.update(request.variables)
        self._request = request
        self._target: Target | None = None

    def target(self) -> Target:
        return choose(self._request.gpu, self._request.require_gpu)

    def board(self) -> Board:
        from leanbench.records.environment import measured_environment, predicted_environment

        self._target = target = self.target()
        index, spec = target.local_index, asdict(target.spec)
        if index is None:
            return Board("predicted", spec, predicted_environment())
        from leanbench.measure.calibration import calibrate
        from leanbench.measure.instruments import open_instruments

        calibration_us = calibrate(open_instruments(index))
        return Board("measured", spec, measured_environment(index), calibration_us)

    def work(self, job: FamilyJob, /) -> TunedFamily | str:
        """The family tuned; the sentence of a refusal, which would be the same on any GPU."""
        assert self._target is not None
        request = Request(kernel("lean"), [job.family], self._target, job.plan, job.objective)
        measured = self._target.local_index is not None
        journal = journal_of(request) if measured else None
        if journal is not None:
            for timed in job.timed:
                journal.add(*timed)
        try:
            ((summary, family),) = tune(request, _Unwatched())
        except UserError as error:
            return str(error)
        timed = [] if journal is None else journal.read([job.family])
        forget(request)
        return TunedFamily(summary, family, timed)


class _Unwatched:
    """Observer of a tuning that shows nothing."""

    def compiling(self, done: int, total: int) -> None: ...

    def timing(
        self, family: FamilyKey, problem: AttentionProblem, done: int, total: int
    ) -> None: ...

    def fitting(self) -> None: ...

    def power(self, done: int, total: int) -> None: ...


class ClusterTuner:
    """The GPUs of a cluster, each with an agent.

    Args:
        say: receives a sentence about what happens.

    Raises:
        UserError: the cluster has no GPU.
    """

    def __init__(
        self, cluster: Cluster, request: AgentRequest, mix_boards: bool, say: Callable[[str], None]
    ) -> None:
        self._dispatcher: Dispatcher[FamilyKey] = Dispatcher(cluster, TuneAgent, (request,), say)
        self._mix_boards, self._say = mix_boards, say
        self._board: Board | None = None

    def target(self) -> Target:
        """See Dispatcher.target."""
        return self._dispatcher.target()

    def tune(self, request: Request) -> list[tuple[Summary, Family]]:
        """What leanbench.tune.run.tune returns, in the order of the families. `forget` what was
        noted once it is saved.

        Raises:
            UserError: the budget is too small, nothing can run, or no agent is left.
        """
        check_budget(request)
        plan = replace(request.plan, budget_s=self._share_s(request))
        alike = Alike(request.target, None, self._mix_boards, self._say)

        def job_of(family: FamilyKey) -> FamilyJob:
            timed = self._journal(request, alike.first).read([family])
            return FamilyJob(family, plan, request.objective, timed)

        tuned: dict[FamilyKey, tuple[Summary, Family]] = {}
        for family, answer in self._dispatcher.run(iter(request.families), job_of, alike):
            if isinstance(answer, Lost):
                raise UserError(f"{family.label} could not be tuned: {answer.reason}")
            if isinstance(answer, str):
                raise UserError(answer)
            if answer.timed:
                journal = self._journal(request, alike.first)
                journal.forget([family])
                for timed in answer.timed:
                    journal.add(*timed)
            tuned[family] = (answer.summary, answer.family)
            self._say(f"[{len(tuned)}/{len(request.families)}] {family.label}: tuned")
        self._board = alike.first
        return [tuned[family] for family in request.families]

    def forget(self, request: Request) -> None:
        """See leanbench.tune.run.forget."""
        self._journal(request, self._board).forget(request.families)

    def _journal(self, request: Request, board: Board | None) -> Journal:
        """Families that are tuned, until they are saved."""
        assert board is not None
        return journal_at(request, versions_of(board.environment), _CLUSTER)

    def _share_s(self, request: Request) -> float:
        """Seconds of a family, so that all together take the budget."""
        rounds = -(-len(request.families) // max(1, self._dispatcher.places))
        return request.plan.budget_s / rounds
