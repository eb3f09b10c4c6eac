"""Coefficients of a family's builds from their timings, and the shortlist of candidates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from leanbench.configs.formula import Coefficients, Point, Shape, divide, fit
from leanbench.configs.space import Candidate, FamilyKey, heuristics
from leanbench.configs.tuned import LEAST_GAIN
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanTritonConfig
from leanbench.tune.problems import problems
from leanbench.tune.stopwatch import Time

#: Latencies by problem and config.
Times = Mapping[AttentionProblem, Mapping[LeanConfig, Time]]

#: Minimum predicted gains to try for a choice by the formula.
LEAST_GAINS = (LEAST_GAIN, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)
#: Number of parts of the problems in cross-validation.
_PARTS = 4
#: Minimum timings of a build for its own coefficients.
LEAST_POINTS = 6
#: Problems for comparing shortlist candidates, in addition to the timed ones.
_SAMPLED_PROBLEMS = 200
_LONGEST_SHORTLIST = 24
#: Minimum reduction of the mean regret by a further candidate.
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
        """Fit every build with `least_points` timings, and the heuristics' builds with any number.

        Others are compared with the heuristics. All fits have a prior: the coefficients of their
        implementation as a whole.
        """
        by_build: dict[BuildKey, list[Point]] = {}
        for problem, timed in times.items():
            fastest_us = min(time.latency_us for time in timed.values())
            for config, time in timed.items():
                point = Point(
                    self._work(problem, config), time.latency_us, time.latency_us / fastest_us
                )
                by_build.setdefault(config.build_key, []).append(point)
        by_implementation: dict[str | None, list[Point]] = {}
        for key, points in by_build.items():
            by_implementation.setdefault(key.implementation, []).extend(points)
        together = {
            implementation: fit(points, self._spec.bandwidth_tb_s)
            for implementation, points in by_implementation.items()
            if len(points) >= LEAST_POINTS
        }
        needed = {
            config.build_key
            for problem in times
            for config in heuristics(self._kernel, problem, self._spec)
        }
        return {
            key: self._fit(points, together[key.implementation])
            for key, points in by_build.items()
            if key.implementation in together and (len(points) >= least_points or key in needed)
        }

    def predict_us(
        self, fits: Mapping[BuildKey, Fit], problem: AttentionProblem, config: LeanConfig
    ) -> float:
        """Return the latency in us by the formula; infinite for a build without coefficients."""
        fit_of_build = fits.get(config.build_key)
        return (
            math.inf
            if fit_of_build is None
            else float(fit_of_build.coefficients.latency_us(self._work(problem, config)))
        )

    def _work(self, problem: AttentionProblem, config: LeanConfig):
        return divide(Shape.of(problem), config, self._spec.sms, self._kernel)

    def _fit(self, points: Sequence[Point], together: Coefficients) -> Fit:
        coefficients = fit(points, self._spec.bandwidth_tb_s, together)
        errors = [
            abs(coefficients.latency_us(point.work) / point.latency_us - 1) for point in points
        ]
        return Fit(coefficients, len(points), statistics.median(errors))

    def shortlist(
        self,
        family: FamilyKey,
        candidates: Iterable[Candidate],
        fits: Mapping[BuildKey, Fit],
        times: Times,
    ) -> list[LeanConfig]:
        """Choose a few Triton candidates that are together nearly as good as all.

        Each candidate is the one that lowers the mean regret most. Regret is the logarithm of
        predicted latency over the lowest predicted one, over the timed problems and others like
        them.
        """
        import numpy as np

        able = [
            candidate.config
            for candidate in candidates
            if candidate.build in fits and isinstance(candidate.config, LeanTritonConfig)
        ]
        if not able:
            return []
        sample = [*times, *islice(problems(family, self._spec), _SAMPLED_PROBLEMS)]
        costs = np.log(
            [[self.predict_us(fits, problem, config) for config in able] for problem in sample]
        )
        return [able[index] for index in _cover(costs - costs.min(axis=1, keepdims=True))]


def _cover(costs: Any) -> list[int]:
    """Choose columns that together nearly reach every row's minimum.

    Each is the one that lowers the mean most.
    """
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


@dataclass(frozen=True)
class Trial:
    """Cross-validation on a problem: fastest timed latency over that of the formula's choice, and
    over that of the heuristic's.
    """

    formula: float
    heuristic: float
    #: Predicted gain of the formula's choice over the heuristic's; None if unknown.
    gain: float | None

    def share(self, least_gain: float) -> float:
        """Return the result of the choice in leanbench.configs.lookup.

        It is the formula's if its predicted gain suffices, else the heuristic's.
        """
        return self.heuristic if self.gain is None or self.gain < least_gain else self.formula


def held_out(
    kernel: Kernel, spec: GpuSpec, times: Times, heuristic: Mapping[AttentionProblem, LeanConfig]
) -> list[Trial]:
    """Cross-validate every problem with a fit to the other three of four parts.

    Only candidates timed on the problem can be chosen, because only they can be judged.
    """
    fitter = Fitter(kernel, spec)
    trials: list[Trial] = []
    for part in range(_PARTS):
        training = {
            problem: timed
            for number, (problem, timed) in enumerate(times.items())
            if number % _PARTS != part
        }
        fits = fitter.fits(training) if training else {}
        for problem in times:
            if problem not in training and (
                trial := _trial(fitter, fits, problem, times[problem], heuristic[problem])
            ):
                trials.append(trial)
    return trials


def _trial(
    fitter: Fitter,
    fits: Mapping[BuildKey, Fit],
    problem: AttentionProblem,
    timed: Mapping[LeanConfig, Time],
    heuristic: LeanConfig,
) -> Trial | None:
    fastest_us = min(time.latency_us for time in timed.values())
    heuristic_share = fastest_us / timed[heuristic].latency_us
    if not isinstance(heuristic, LeanTritonConfig):
        return Trial(heuristic_share, heuristic_share, None)
    predicted_us = {
        config: fitter.predict_us(fits, problem, config)
        for config in timed
        if config.build_key in fits and isinstance(config, LeanTritonConfig)
    }
    if not predicted_us:
        return None
    chosen = min(predicted_us, key=predicted_us.__getitem__)
    gain = 1 - predicted_us[chosen] / predicted_us[heuristic] if heuristic in predicted_us else None
    return Trial(fastest_us / timed[chosen].latency_us, heuristic_share, gain)


def least_gain(trials: Sequence[Trial]) -> float:
    """Return the minimum predicted gain that does best over `trials`; the lowest of equals."""
    if not trials:
        return LEAST_GAIN
    return max(
        LEAST_GAINS, key=lambda least: math.fsum(math.log(trial.share(least)) for trial in trials)
    )
