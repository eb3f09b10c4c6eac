"""Validation of launch settings on problems outside of the tuning: the lookup's choice against
every candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from leanbench.compile.build import Job, build_all
from leanbench.configs.lookup import Choice, choose, resolve
from leanbench.configs.space import Candidate, FamilyKey, distinct
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.memory import needed_bytes
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.measure.timing import Effort, measure_interleaved
from leanbench.tune.problems import problems

if TYPE_CHECKING:
    from leanbench.configs.tuned import Family
    from leanbench.tune.stopwatch import GpuStopwatch

#: (sequence, KV head) pairs and contexts of models' decode steps: powers of two, and lengths in
#: between.
_STEPS = (
    (8, 2048),
    (8, 32768),
    (32, 8192),
    (128, 4096),
    (16, 1000),
    (256, 1500),
    (64, 20000),
    (32, 3000),
    (8, 131072),
    (24, 1024),
    (128, 2048),
    (56, 16384),
)
#: Every other problem comes from the tuner's own sequence, starting beyond any tuning.
_SKIPPED = 60
#: Number of the fastest of the first rounds that are timed again, with the choice and the
#: heuristic.
_FINALISTS = 5
_EFFORT = Effort(relative_ci=0.003, max_samples=40, max_seconds=0.3, sample_ms=1.0, max_repeats=0)


@dataclass(frozen=True)
class Unseen:
    """A problem outside of the tuning."""

    problem: AttentionProblem
    choice: Choice
    chosen_us: float
    heuristic_us: float
    best: LeanConfig
    best_us: float
    #: Number of timed launches.
    candidates: int

    @property
    def share(self) -> float:
        """The best's latency over the choice's, at most 1."""
        return self.best_us / self.chosen_us

    @property
    def heuristic_share(self) -> float:
        """The best's latency over the heuristic's, at most 1."""
        return self.best_us / self.heuristic_us

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        assert self.choice.config is not None
        return {
            "problem": self.problem.to_dict(),
            "config": self.choice.config.to_dict(),
            "config_choice": self.choice.how,
            "config_reason": self.choice.why,
            "chosen_us": round(self.chosen_us, 3),
            "heuristic_us": round(self.heuristic_us, 3),
            "best_config": self.best.to_dict(),
            "best_us": round(self.best_us, 3),
            "candidates": self.candidates,
        }


def unseen_problems(
    family: Family, spec: GpuSpec, count: int, most_bytes: float
) -> list[AttentionProblem]:
    """Return `count` problems of a family outside of its tuning.

    Decode steps of models alternate with others.
    """
    key = FamilyKey(family.head_dim, family.group_size, family.dtype, family.kv_layout)
    tuned = {(problem.batch * problem.kv_heads, problem.context) for problem in family.problems}
    steps = (key.problem(*step) for step in _STEPS if step not in tuned)
    drawn = islice(problems(key, spec, most_bytes), _SKIPPED, None)
    candidates = _in_turn(steps, drawn)
    fitting = (problem for problem in candidates if problem.kv_bytes <= most_bytes)
    fresh = (
        problem
        for problem in fitting
        if (problem.batch * problem.kv_heads, problem.max_context) not in tuned
    )
    return list(islice(fresh, count))


def fitting(
    drawn: Iterable[AttentionProblem], kernel: Kernel, count: int, most_bytes: float
) -> list[AttentionProblem]:
    """Return the first `count` drawn problems that the kernel takes, up to `most_bytes` each."""
    able = (
        problem
        for problem in drawn
        if needed_bytes(problem) <= most_bytes and kernel.unsupported_reason(problem) is None
    )
    return list(islice(able, count))


def launches_of(kernel: Kernel, problem: AttentionProblem, spec: GpuSpec) -> list[LeanConfig]:
    """Return a candidate for each distinct launch on a problem.

    For lengths on the device these are the candidates of `--configs best`, without aligned grids,
    which do not exist then.
    """
    if problem.lengths_on == "device":
        able = kernel.candidate_configs(problem.known_to_host, spec)
        return [config for config in able if not config.align_grid]
    space = [Candidate(config, config.build_key) for config in kernel.tuning_space(problem, spec)]
    return [candidate.config for candidate in distinct(space, problem, kernel, spec)]


def compile_launches(
    kernel: Kernel, problems_timed: Iterable[AttentionProblem], spec: GpuSpec, pool: Executor
) -> None:
    """Compile the builds of all launches on all cores, so that timing finds them on disk."""
    jobs = [
        Job(kernel.name, problem, config)
        for problem in problems_timed
        for config in _of_each_build(launches_of(kernel, problem, spec))
    ]
    build_all(jobs, spec.compute_capability, pool)


def _of_each_build(configs: Iterable[LeanConfig]) -> Iterable[LeanConfig]:
    return {config.build_key: config for config in configs}.values()


def _in_turn(
    first: Iterator[AttentionProblem], second: Iterator[AttentionProblem]
) -> Iterator[AttentionProblem]:
    for problem in second:
        step = next(first, None)
        if step is not None:
            yield step
        yield problem


def validate(
    kernel: Kernel, problem: AttentionProblem, spec: GpuSpec, watch: GpuStopwatch
) -> Unseen:
    """Time every distinct launch of a problem, then the fastest few and the choice again."""
    choice = choose(kernel, problem, spec)
    heuristic = resolve(kernel, problem, spec, "heuristic").config
    assert choice.config is not None
    assert heuristic is not None
    launches = dict.fromkeys([heuristic, *launches_of(kernel, problem, spec)])
    times = watch.time(problem, list(launches)).times
    finalists = sorted(times, key=lambda config: times[config].latency_us)[:_FINALISTS]
    latencies = _again(
        kernel, problem, list(dict.fromkeys([choice.config, heuristic, *finalists])), watch
    )
    best = min(latencies, key=latencies.__getitem__)
    return Unseen(
        problem,
        choice,
        latencies[choice.config],
        latencies[heuristic],
        best,
        latencies[best],
        len(times),
    )


def _again(
    kernel: Kernel, problem: AttentionProblem, configs: Sequence[LeanConfig], watch: GpuStopwatch
) -> dict[LeanConfig, float]:
    buffers = watch.buffers(problem)
    launches = {
        config: [kernel.prepare(inputs, config) for inputs in buffers] for config in configs
    }
    return {
        config: timing.median_us
        for config, timing in measure_interleaved(launches, _EFFORT).items()
    }
