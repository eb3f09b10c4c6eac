"""Coefficients of every build of a family from its timings, and the few candidates worth choosing from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig
from leanbench.tune.formula import Coefficients, Point, Shape, divide, fit
from leanbench.tune.problems import problems
from leanbench.tune.space import BuildKey, Candidate, FamilyKey, build_key, distinct
from leanbench.tune.stopwatch import Time

#: Latencies by problem and config.
Times = Mapping[AttentionProblem, Mapping[KernelConfig, Time]]

#: Timings that a build needs for coefficients of its own.
LEAST_POINTS = 15
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

    def fits(self, times: Times, whatever: Collection[KernelConfig] = ()) -> dict[BuildKey, Fit]:
        """Every build with `LEAST_POINTS` timings; all lean on the coefficients of all together.

        Args:
            whatever: configs whose builds are fitted to what there is: the heuristic's, which others are held against.
        """
        by_build: dict[BuildKey, list[Point]] = {}
        for problem, timed in times.items():
            fastest_us = min(time.latency_us for time in timed.values())
            for config, time in timed.items():
                point = Point(self._work(problem, config), time.latency_us, time.latency_us / fastest_us)
                by_build.setdefault(build_key(config), []).append(point)
        everything = [point for points in by_build.values() for point in points]
        if len(everything) < LEAST_POINTS:
            return {}
        together = fit(everything, self._spec.bandwidth_tb_s)
        needed = {build_key(config) for config in whatever}
        return {
            key: self._fit(points, together)
            for key, points in by_build.items()
            if len(points) >= LEAST_POINTS or key in needed
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
        and others like them.
        """
        able = [candidate for candidate in candidates if candidate.build in fits]
        if not able:
            return []
        sample = [*times, *islice(problems(family, self._spec), _SAMPLED_PROBLEMS)]
        costs = [self._costs(problem, able, fits) for problem in sample]
        chosen: list[int] = []
        regrets = [math.inf] * len(sample)
        while len(chosen) < _LONGEST_SHORTLIST:
            means = [
                statistics.fmean(min(regret, row[index]) for regret, row in zip(regrets, costs, strict=True))
                for index in range(len(able))
            ]
            best = min(range(len(able)), key=means.__getitem__)
            if chosen and statistics.fmean(regrets) - means[best] < _WORTH_LISTING:
                break
            chosen.append(best)
            regrets = [min(regret, row[best]) for regret, row in zip(regrets, costs, strict=True)]
        return [able[index].config for index in chosen]

    def _costs(self, problem: AttentionProblem, able: Sequence[Candidate], fits: Mapping[BuildKey, Fit]) -> list[float]:
        """Regret of each candidate on a problem."""
        predicted = [math.log(self.predict_us(fits, problem, candidate.config)) for candidate in able]
        least = min(predicted)
        return [value - least for value in predicted]


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
