"""Families and printed figures of a search's outcome."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import exp, log
from typing import Literal

from leanbench.configs import tuned
from leanbench.configs.nearness import MOST_GROUP_RATIO
from leanbench.configs.space import FamilyKey, distinct, heuristics
from leanbench.configs.tuned import Objective
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanTritonConfig
from leanbench.tune.fits import Fitter, least_gain
from leanbench.tune.plan import Outcome
from leanbench.tune.problems import problems
from leanbench.tune.stopwatch import Time

#: Problems for collecting the heuristics' builds, in addition to the timed ones.
_SAMPLED_PROBLEMS = 200


@dataclass(frozen=True)
class Summary:
    """Figures of a family's tuning."""

    family: FamilyKey
    problems: int
    #: Candidates timed at least once, and those rejected after compiling.
    timed: int
    left_out: int
    shortlist: list[LeanConfig]
    #: Frequency of tile_tokens among the Triton configs chosen for the timed problems.
    tile_tokens: dict[int, int]
    #: Number of problems with CUDA C++ chosen; its LeanTile is not tuned.
    cuda: int
    #: Spilled registers per thread of the chosen settings, for problems with any.
    spilled: list[int]
    #: Mean size of a tie set.
    ties: float
    #: Cost of the heuristic over the cost of the chosen one: geometric mean and maximum.
    gain: float
    most_gain: float
    #: Latency of the best untimed launch, by the formula, over that of the best timed one:
    #: geometric mean over the problems, at most 1. Only builds with coefficients can be predicted:
    #: `fitted` of `able`.
    untried: float
    fitted: int
    able: int
    #: Fastest timed latency over the chosen one's in cross-validation: geometric mean and worst.
    #: None: too few problems.
    held_out: float | None
    worst_held_out: float | None
    #: Median error of the formula.
    median_error: float


def ties(times: Mapping[LeanConfig, Time]) -> list[LeanConfig]:
    """Return the fastest, then those with an overlapping interval."""
    order = sorted(times, key=lambda config: times[config].latency_us)
    fastest = times[order[0]]
    limit_us = fastest.high_us or fastest.latency_us
    return [
        order[0],
        *(config for config in order[1:] if (times[config].low_us or float("inf")) <= limit_us),
    ]


#: Objective to minimize for a config and its time.
Cost = Callable[[LeanConfig, Time], float]


def cost_of(objective: Objective, power_kw: Mapping[BuildKey, float] | None = None) -> Cost:
    """Return a cost function: latency, energy or energy times latency.

    It is infinite for a build of unknown power.
    """

    def cost(config: LeanConfig, time: Time) -> float:
        if objective == "latency":
            return time.latency_us
        power = (power_kw or {}).get(config.build_key, float("inf"))
        return power * time.latency_us if objective == "energy" else power * time.latency_us**2

    return cost


def summarise(outcome: Outcome, kernel: Kernel, spec: GpuSpec, cost: Cost) -> Summary:
    """Compute the figures to print; gains and LeanTiles are those of the choice by `cost`."""
    progress = outcome.progress
    gains, sizes, tiles, untried, spilled = [], [], Counter[int](), [], []
    for problem, times in progress.times.items():
        tied = ties(times)
        chosen = min(times, key=lambda config, times=times: cost(config, times[config]))
        heuristic = progress.heuristic[problem]
        gains.append(cost(heuristic, times[heuristic]) / cost(chosen, times[chosen]))
        sizes.append(len(tied))
        if isinstance(chosen, LeanTritonConfig):
            tiles[chosen.tile_tokens] += 1
        build = outcome.builds.get(chosen.build_key)
        if build is not None and build.resources and build.resources[0].spilled_registers:
            spilled.append(build.resources[0].spilled_registers)
        untried.append(_untried(outcome, kernel, spec, problem, times))
    least = least_gain(outcome.trials)
    shares = [trial.share(least) for trial in outcome.trials]
    errors = [fit.median_error for fit in outcome.fits.values()]
    return Summary(
        family=progress.family,
        problems=len(progress.times),
        timed=len({config for times in progress.times.values() for config in times}),
        left_out=len(progress.left_out),
        shortlist=outcome.shortlist,
        tile_tokens=dict(sorted(tiles.items())),
        cuda=len(progress.times) - tiles.total(),
        spilled=spilled,
        ties=statistics.fmean(sizes),
        gain=geometric_mean(gains),
        most_gain=max(gains),
        untried=geometric_mean(untried),
        fitted=len(outcome.fits),
        able=len({candidate.build for candidate in progress.able} | set(outcome.fits)),
        held_out=geometric_mean(shares) if shares else None,
        worst_held_out=min(shares, default=None),
        median_error=statistics.median(errors) if errors else float("nan"),
    )


def _untried(
    outcome: Outcome,
    kernel: Kernel,
    spec: GpuSpec,
    problem: AttentionProblem,
    times: Mapping[LeanConfig, Time],
) -> float:
    """Return the predicted latency of the best untimed launch over the best timed; at most 1."""
    fitter = Fitter(kernel, spec)
    launches = distinct(outcome.progress.able, problem, kernel, spec)
    untried = [launch.config for launch in launches if launch.config not in times]
    least = min(
        (fitter.predict_us(outcome.fits, problem, config) for config in untried),
        default=float("inf"),
    )
    return min(1.0, least / min(time.latency_us for time in times.values()))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of at least one positive number."""
    return exp(statistics.fmean(log(value) for value in values))


def to_family(
    outcome: Outcome,
    kernel: Kernel,
    spec: GpuSpec,
    source: Literal["measured", "predicted"],
    objective: Objective,
    time: str,
    versions: dict[str, str],
    power_kw: Mapping[BuildKey, float] | None = None,
) -> tuned.Family:
    """Return the data of a family for lookups.

    It has the shortlist and the heuristics' builds with their formulas, and for each problem the
    chosen settings and those compared with them.
    """
    progress, cost = outcome.progress, cost_of(objective, power_kw)
    times = {
        problem: _compared(times, progress.heuristic[problem], cost)
        for problem, times in progress.times.items()
    }
    listed = dict.fromkeys(
        [*outcome.shortlist, *(config for compared in times.values() for config in compared)]
    )
    builds = {config.build_key for config in listed}
    listed |= dict.fromkeys(
        config
        for config in _heuristics(outcome, kernel, spec)
        if isinstance(config, LeanTritonConfig) and config.build_key not in builds
    )
    keys = list(
        dict.fromkeys(
            config.build_key
            for config in listed
            if isinstance(config, LeanTritonConfig) and config.build_key in outcome.fits
        )
    )
    places = {config: place for place, config in enumerate(listed)}
    return tuned.Family(
        head_dim=progress.family.head_dim,
        dtype=progress.family.dtype,
        group_size=progress.family.group_size,
        kv_layout=progress.family.kv_layout,
        source=source,
        objective=objective,
        time=time,
        versions=versions,
        stopped=outcome.stopped,
        candidates=[_candidate(outcome, config, keys) for config in listed],
        builds=[
            tuned.Build(
                **_rounded(asdict(outcome.fits[key].coefficients)),
                points=outcome.fits[key].points,
                median_error=round(outcome.fits[key].median_error, 5),
                power_kw=(power_kw or {}).get(key),
            )
            for key in keys
        ],
        shortlist=[places[config] for config in outcome.shortlist],
        least_gain=least_gain(outcome.trials),
        problems=[
            _problem(problem, compared, progress.heuristic[problem], places, cost)
            for problem, compared in times.items()
        ],
    )


def _rounded(coefficients: dict[str, float]) -> dict[str, float]:
    """Round to six digits: a millionth of a latency decides nothing."""
    return {name: float(f"{value:.6g}") for name, value in coefficients.items()}


def _compared(
    times: Mapping[LeanConfig, Time], heuristic: LeanConfig, cost: Cost
) -> dict[LeanConfig, Time]:
    """Return the timings to keep, fastest first.

    They are the heuristic's, the chosen one's, ties with the fastest, and each implementation's
    fastest.
    """
    order = sorted(times, key=lambda config: times[config].latency_us)
    fastest = {config.implementation: config for config in reversed(order)}
    chosen = min(times, key=lambda config: cost(config, times[config]))
    wanted = {heuristic, chosen, *ties(times), *fastest.values()}
    return {config: times[config] for config in order if config in wanted}


def _heuristics(outcome: Outcome, kernel: Kernel, spec: GpuSpec) -> list[LeanConfig]:
    """Return a config of each build that the heuristic uses for problems of any size.

    This covers the group size and those for which the family is a fallback. The formula's choices
    are compared with it.
    """
    family = outcome.progress.family
    groups = (family.group_size // MOST_GROUP_RATIO or 1, family.group_size * MOST_GROUP_RATIO)
    alike = [family, *(replace(family, group_size=group) for group in groups)]
    sample = [
        *outcome.progress.times,
        *(problem for key in alike for problem in islice(problems(key, spec), _SAMPLED_PROBLEMS)),
    ]
    by_build = {
        config.build_key: config
        for problem in sample
        for config in heuristics(kernel, problem, spec)
    }
    return [config for key, config in by_build.items() if key in outcome.fits]


def _candidate(outcome: Outcome, config: LeanConfig, keys: Sequence[BuildKey]) -> tuned.Candidate:
    key = config.build_key
    build = outcome.builds.get(key)
    taken = build.resources[0] if build is not None and build.resources else None
    return tuned.Candidate(
        config=config,
        shared_bytes=taken.shared_bytes if taken else None,
        build=keys.index(key) if key in keys else None,
    )


def _problem(
    problem: AttentionProblem,
    times: Mapping[LeanConfig, Time],
    heuristic: LeanConfig,
    places: Mapping[LeanConfig, int],
    cost: Cost,
) -> tuned.TunedProblem:
    return tuned.TunedProblem(
        batch=problem.batch,
        kv_heads=problem.kv_heads,
        context=problem.max_context,
        heuristic=places[heuristic],
        chosen=places[min(times, key=lambda config: cost(config, times[config]))],
        ties=[places[config] for config in ties(times)],
        timed=[
            tuned.Timed(places[config], round(time.latency_us, 3)) for config, time in times.items()
        ],
    )
