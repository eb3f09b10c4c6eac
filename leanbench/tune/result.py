"""From what a search found to what is kept, and the figures that are printed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any, Literal

from leanbench.configs import tuned as kept
from leanbench.configs.space import BuildKey, FamilyKey, build_key, distinct
from leanbench.configs.tuned import Objective
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import Kernel, KernelConfig
from leanbench.tune.fits import Fitter, least_gain
from leanbench.tune.search import Found
from leanbench.tune.stopwatch import Time

#: Times of a problem that are kept where the model predicted them.
_PREDICTED_KEPT = 8


@dataclass(frozen=True)
class Summary:
    """What a tuning of a family came to."""

    family: FamilyKey
    problems: int
    #: Candidates that were timed at least once, and those that compiling ruled out.
    timed: int
    left_out: int
    shortlist: list[KernelConfig]
    #: tile_tokens of the Triton configs chosen over the problems that were timed, with how often.
    tile_tokens: dict[int, int]
    #: On how many problems CUDA C++ was chosen, whose LeanTile is not tuned.
    cuda: int
    #: Mean size of a tie set.
    ties: float
    #: What the heuristic costs over what the chosen one costs: geometric mean, and the most.
    gain: float
    most_gain: float
    #: Latency of the best that was not timed, by the formula, over that of the best that was:
    #: geometric mean over the problems, at most 1. Only builds with coefficients can be told:
    #: `fitted` of `able`.
    untried: float
    fitted: int
    able: int
    #: Fastest timed latency over the chosen one's on problems that the formula was not fitted to:
    #: geometric mean and worst. None: too few problems.
    held_out: float | None
    worst_held_out: float | None
    #: Median error of the formula.
    median_error: float


def ties(times: Mapping[KernelConfig, Time]) -> list[KernelConfig]:
    """The fastest first, then those whose interval overlaps with its."""
    order = sorted(times, key=lambda config: times[config].latency_us)
    fastest = times[order[0]]
    limit_us = fastest.high_us or fastest.latency_us
    return [
        order[0],
        *(config for config in order[1:] if (times[config].low_us or float("inf")) <= limit_us),
    ]


#: What is to be least of a config and its time.
Cost = Callable[[KernelConfig, Time], float]


def cost_of(objective: Objective, power_kw: Mapping[BuildKey, float] | None = None) -> Cost:
    """Latency, energy or energy times latency; infinite where a build's power is not known."""

    def cost(config: KernelConfig, time: Time) -> float:
        if objective == "latency":
            return time.latency_us
        power = (power_kw or {}).get(build_key(config), float("inf"))
        return power * time.latency_us if objective == "energy" else power * time.latency_us**2

    return cost


def summarise(found: Found, kernel: Kernel, spec: GpuSpec, cost: Cost) -> Summary:
    """The figures to print; gains and LeanTiles are those of what is chosen by `cost`."""
    progress = found.progress
    gains, sizes, tiles, untried = [], [], Counter[int](), []
    for problem, times in progress.times.items():
        tied = ties(times)
        chosen = min(times, key=lambda config, times=times: cost(config, times[config]))
        heuristic = progress.heuristic[problem]
        gains.append(cost(heuristic, times[heuristic]) / cost(chosen, times[chosen]))
        sizes.append(len(tied))
        if chosen.implementation is None:
            tiles[chosen.tile_tokens] += 1
        untried.append(_untried(found, kernel, spec, problem, times))
    least = least_gain(found.trials)
    shares = [trial.share(least) for trial in found.trials]
    errors = [fit.median_error for fit in found.fits.values()]
    return Summary(
        family=progress.family,
        problems=len(progress.times),
        timed=len({config for times in progress.times.values() for config in times}),
        left_out=len(progress.left_out),
        shortlist=found.shortlist,
        tile_tokens=dict(sorted(tiles.items())),
        cuda=len(progress.times) - tiles.total(),
        ties=statistics.fmean(sizes),
        gain=geometric_mean(gains),
        most_gain=max(gains),
        untried=geometric_mean(untried),
        fitted=len(found.fits),
        able=len({candidate.build for candidate in progress.able} | set(found.fits)),
        held_out=geometric_mean(shares) if shares else None,
        worst_held_out=min(shares, default=None),
        median_error=statistics.median(errors) if errors else float("nan"),
    )


def _untried(
    found: Found,
    kernel: Kernel,
    spec: GpuSpec,
    problem: AttentionProblem,
    times: Mapping[KernelConfig, Time],
) -> float:
    """Predicted latency of the best launch that was not timed, over the best that was; 1 if that is
    no better.
    """
    fitter = Fitter(kernel, spec)
    launches = distinct(found.progress.able, problem, kernel, spec)
    others = [launch.config for launch in launches if launch.config not in times]
    least = min(
        (fitter.predict_us(found.fits, problem, config) for config in others), default=float("inf")
    )
    return min(1.0, least / min(time.latency_us for time in times.values()))


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return exp(statistics.fmean(log(value) for value in values))


def to_family(
    found: Found,
    source: Literal["measured", "predicted"],
    objective: Objective,
    time: str,
    versions: dict[str, str],
    power_kw: Mapping[BuildKey, float] | None = None,
) -> kept.Family:
    """What is kept of a family: every candidate that was timed or ruled out, with the reason."""
    progress = found.progress
    all_times = progress.times if source == "measured" else _fastest(found)
    configs = dict.fromkeys(
        [*found.shortlist, *(config for times in all_times.values() for config in times)]
    )
    # One for each build that compiling ruled out: its other grids would be out for the same reason.
    refused = {
        build_key(config): config for config in reversed(progress.left_out) if config not in configs
    }
    listed = [*configs, *refused.values()]
    places = {config: place for place, config in enumerate(listed)}
    keys = list(found.fits)
    builds = [
        kept.Build(
            **asdict(fit.coefficients),
            points=fit.points,
            median_error=fit.median_error,
            power_kw=(power_kw or {}).get(key),
        )
        for key, fit in found.fits.items()
    ]
    return kept.Family(
        head_dim=progress.family.head_dim,
        dtype=progress.family.dtype,
        group_size=progress.family.group_size,
        kv_layout=progress.family.kv_layout,
        source=source,
        objective=objective,
        time=time,
        versions=versions,
        stopped=found.stopped,
        candidates=[_candidate(found, config, keys) for config in listed],
        builds=builds,
        shortlist=[places[config] for config in found.shortlist],
        least_gain=least_gain(found.trials),
        problems=[
            _problem(
                problem, times, progress.heuristic[problem], places, cost_of(objective, power_kw)
            )
            for problem, times in all_times.items()
        ],
    )


def _fastest(found: Found) -> dict[AttentionProblem, dict[KernelConfig, Time]]:
    """Of each problem the few fastest and the heuristic's: the model can tell the others again."""
    kept_times: dict[AttentionProblem, dict[KernelConfig, Time]] = {}
    for problem, times in found.progress.times.items():
        order = sorted(times, key=lambda config, times=times: times[config].latency_us)
        few = dict.fromkeys([*order[:_PREDICTED_KEPT], found.progress.heuristic[problem]])
        kept_times[problem] = {config: times[config] for config in few}
    return kept_times


def _candidate(found: Found, config: KernelConfig, keys: Sequence[BuildKey]) -> kept.Candidate:
    build = found.builds.get(build_key(config))
    taken = build.resources[0] if build is not None and build.resources else None
    # The heuristic's settings are timed even where compiling rules them out: others are held
    # against them.
    timed = any(config in times for times in found.progress.times.values())
    reason = None if timed else found.progress.left_out.get(config)
    fitted = build_key(config) in keys and reason is None
    settings: dict[str, Any] = {
        "ctas_per_sm": 1,
        "min_tiles_per_cta": 1,
        "align_grid": False,
        **config.to_dict(),
    }
    return kept.Candidate(
        **settings,
        registers_per_thread=taken.registers_per_thread if taken else None,
        shared_bytes=taken.shared_bytes if taken else None,
        spilled_registers=taken.spilled_registers if taken else None,
        build=keys.index(build_key(config)) if fitted else None,
        left_out=reason,
    )


def _problem(
    problem: AttentionProblem,
    times: Mapping[KernelConfig, Time],
    heuristic: KernelConfig,
    places: Mapping[KernelConfig, int],
    cost: Cost,
) -> kept.TunedProblem:
    order = sorted(times, key=lambda config: times[config].latency_us)
    return kept.TunedProblem(
        batch=problem.batch,
        kv_heads=problem.kv_heads,
        context=problem.max_context,
        heuristic=places[heuristic],
        chosen=places[min(times, key=lambda config: cost(config, times[config]))],
        ties=[places[config] for config in ties(times)],
        timed=[
            kept.Timed(
                candidate=places[config],
                latency_us=round(times[config].latency_us, 3),
                low_us=_rounded(times[config].low_us),
                high_us=_rounded(times[config].high_us),
            )
            for config in order
        ],
    )


def _rounded(value_us: float | None) -> float | None:
    return None if value_us is None else round(value_us, 3)
