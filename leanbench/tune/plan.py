"""Inputs, state and result of a search."""

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

#: Problems per family: by default, with --exhaustive, and for predictions by the model.
PROBLEMS, EXHAUSTIVE_PROBLEMS, PREDICTED_PROBLEMS = 24, 40, 12


class Observer(Protocol):
    """Observer of a tuning's progress."""

    def compiling(self, done: int, total: int) -> None: ...

    def timing(
        self, family: FamilyKey, problem: AttentionProblem, done: int, total: int
    ) -> None: ...

    def fitting(self) -> None: ...

    def power(self, done: int, total: int) -> None: ...


#: Ranking of a problem's configs by predicted latency in microseconds, before any timing.
Ranker = Callable[[AttentionProblem, Sequence[LeanConfig], dict[BuildKey, Build]], list[float]]


@dataclass
class Progress:
    """State of a family's search."""

    family: FamilyKey
    able: list[Candidate]
    left_out: dict[LeanConfig, str]
    times: dict[AttentionProblem, dict[LeanConfig, Time]] = field(default_factory=dict)
    #: The heuristic's choice on each timed problem.
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

    #: Time limit of the timings and their evaluation, without compiling; infinite for no limit.
    budget_s: float
    #: Problems per family.
    problems: int = PROBLEMS
    #: Time every compiled candidate on every problem, not only the promising ones.
    every_candidate: bool = False
    #: The performance model replaces the stopwatch.
    predicted: bool = False
    #: Seconds of the budget reserved for work after the timings, in addition to the last fits.
    reserve_s: float = 0.0
