"""What a search is given, where it stands, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leanbench.compile.build import Build
from leanbench.configs.space import Candidate, FamilyKey
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey, LeanConfig
from leanbench.tune.fits import Fit, Trial
from leanbench.tune.stopwatch import Time

#: Problems of a family: by default, with --exhaustive, and where the model predicts them.
PROBLEMS, EXHAUSTIVE_PROBLEMS, PREDICTED_PROBLEMS = 24, 40, 12


class Observer(Protocol):
    """Observer of a tuning's progress."""

    def compiling(self, done: int, total: int) -> None: ...

    def timing(
        self, family: FamilyKey, problem: AttentionProblem, done: int, total: int
    ) -> None: ...

    def fitting(self) -> None: ...

    def power(self, done: int, total: int) -> None: ...


#: Ranks configs of a problem by predicted latency in microseconds, before anything was timed.
Ranker = Callable[[AttentionProblem, Sequence[LeanConfig], dict[BuildKey, Build]], list[float]]


@dataclass
class Progress:
    """State of a family's search."""

    family: FamilyKey
    able: list[Candidate]
    left_out: dict[LeanConfig, str]
    times: dict[AttentionProblem, dict[LeanConfig, Time]] = field(default_factory=dict)
    #: The heuristic's choice on each problem that was timed.
    heuristic: dict[AttentionProblem, LeanConfig] = field(default_factory=dict)
    fits: dict[BuildKey, Fit] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a family's search."""

    progress: Progress
    builds: dict[BuildKey, Build]
    fits: dict[BuildKey, Fit]
    shortlist: list[LeanConfig]
    #: See leanbench.tune.fits.held_out.
    trials: list[Trial]
    stopped: str


@dataclass(frozen=True)
class Plan:
    """Limits of a search."""

    #: Of the timings and what follows them, without compiling; infinite for no limit.
    budget_s: float
    #: Of each family.
    problems: int = PROBLEMS
    #: Time every candidate that compiles on every problem, not only the promising ones.
    every_candidate: bool = False
    #: The stopwatch is the performance model.
    predicted: bool = False
    #: Seconds of the budget for what comes after the timings, besides the last fits.
    reserve_s: float = 0.0
