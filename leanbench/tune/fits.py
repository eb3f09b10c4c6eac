"""Coefficients of every build of a family from its timings, and the few candidates worth choosing from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig
from leanbench.tune.formula import Coefficients, Point, Shape, divide, fit
from leanbench.tune.problems import problems
from leanbench.tune.space import BuildKey, Candidate, FamilyKey, build_key, distinct, heuristics
from leanbench.tune.stopwatch import Time

#: Latencies by problem and config.
Times = Mapping[AttentionProblem, Mapping[KernelConfig, Time]]

#: Timings that a build needs for coefficients of its own.
LEAST_POINTS = 6
#: Problems that candidates for the shortlist are held against, beside those that were timed.
_SAMPLED_PROBLEMS = 200
_LONGEST_SHORTLIST = 24
#: A further candidate must lower the mean regret by this.
_WORTH_LISTING = 0.0001


@dataclass(frozen=True)
class Fit:
    """One build's coefficients."""

    coefficients: Coefficients
    points: int
    #: Median of |predicted over measured - 1| over those points.
    median_error: float


class Fitter:
    """The formula of one family on one GPU."""

    def __init__(self, kernel: Kernel, spec: GpuSpec) -> None:
        self._kernel, self._spec = kernel, spec

    def fits(self, times: Times, least_points: int = LEAST_POINTS) -> dict[BuildKey, Fit]:
        """Every build with `least_points` timings, and the heuristics' with what there are: others are held against
        them. All lean on the coefficients of their implementation together.
        """
        by_build: dict[BuildKey, list[Point]] = {}
        for problem, timed in times.items():
            fastest_us = min(time.latency_us for time in timed.values())
            for config, time in timed.items():
                point = Point(self._work(problem, config), time.latency_us, time.latency_us / fastest_us)
                by_build.setdefault(build_key(config), []).append(point)
        by_implementation: dict[str | None, list[Point]] = {}
        for key, points in by_build.items():
            by_implementation.setdefault(key.implementation, []).extend(points)
        together = {
            implementation: fit(points, self._spec.bandwidth_tb_s)
            for implementation, points in by_implementation.items()
            if len(points) >= LEAST_POINTS
        }
        needed = {build_key(config) for problem in times for config in heuristics(self._kernel, problem, self._spec)}
        return {
            key: self._fit(points, together[key.implementation])
            for key, points in by_build.items()
            if key.implementation in together and (len(points) >= least_points or key in needed)
        }

    def predict_us(self, fits: Mapping[BuildKey, Fit], problem: AttentionProblem, config: KernelConfig) -> float:
        """By the formula; infinite for a build without coefficients."""
        found = fits.get(build_key(config))
        return math.inf if found is None else float(found.coefficients.latency_us(self._work(problem, config)))

    def _work(self, problem: AttentionProblem, config: KernelConfig):
        return divide(Shape.of(problem), config, self._spec.sms, self._kernel)

    def _fit(self, points: Sequence[Point], together: Coefficients) -> Fit:
        found = fit(points, self._spec.bandwidth_tb_s, together)
        errors = [abs(found.latency_us(point.work) / point.latency_us - 1) for point in points]
        return Fit(found, len(points), statistics.median(errors))

    def shortlist(
        self, family: FamilyKey, candidates: Iterable[Candidate], fits: Mapping[BuildKey, Fit], times: Times
    ) -> list[KernelConfig]:
        """Few candidates that are together nearly as good as all: each is the one that lowers the mean regret most.

        Regret is the logarithm of predicted latency over the lowest predicted one, over the problems that were timed
        and others like them. Each implementation has a list of its own in it: a kernel may take only one of them.
        """
        import numpy as np

        able = [candidate for candidate in candidates if candidate.build in fits]
        sample = [*times, *islice(problems(family, self._spec), _SAMPLED_PROBLEMS)]
        costs = np.log([[self.predict_us(fits, problem, each.config) for each in able] for problem in sample])
        chosen: list[int] = []
        for implementation in dict.fromkeys(candidate.build.implementation for candidate in able):
            own = [index for index, candidate in enumerate(able) if candidate.build.implementation == implementation]
            chosen += [own[place] for place in _cover(costs[:, own] - costs[:, own].min(axis=1, keepdims=True))]
        return [able[index].config for index in chosen]


def _cover(costs: Any) -> list[int]:
    """Columns that together have nearly the least of every row: each is the one that lowers the mean most."""
    import numpy as np

    chosen: list[int] = []
    least = np.full(len(costs), np.inf)
    while len(chosen) < _LONGEST_SHORTLIST:
        means = np.minimum(least[:, None], costs).mean(axis=0)
        best = int(means.argmin())
        if chosen and least.mean() - means[best] < _WORTH_LISTING:
            break
        chosen.append(best)
        least = np.minimum(least, costs[:, best])
    return chosen


def held_out(kernel: Kernel, spec: GpuSpec, times: Times, every: int = 5) -> list[float]:
    """What the formula reaches on problems that it was not fitted to: the fastest timed latency over the chosen one's,
    for every `every`-th problem, from a fit without those.

    Only candidates that were timed there can be chosen: a choice that nobody timed says nothing.
    """
    fitter = Fitter(kernel, spec)
    kept = {problem: timed for number, (problem, timed) in enumerate(times.items()) if number % every}
    out = {problem: timed for problem, timed in times.items() if problem not in kept}
    fits = fitter.fits(kept) if kept and out else {}
    shares: list[float] = []
    for problem, timed in out.items():
        launches = distinct([Candidate(config, build_key(config)) for config in timed], problem, kernel, spec)
        able = [launch.config for launch in launches if launch.build in fits]
        if not able:
            continue
        chosen = min(able, key=lambda config, problem=problem: fitter.predict_us(fits, problem, config))
        shares.append(min(time.latency_us for time in timed.values()) / timed[chosen].latency_us)
    return shares
