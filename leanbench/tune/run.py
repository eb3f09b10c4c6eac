"""A tuning from start to end: on a local GPU, or by the performance model of another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from leanbench.compile.build import process_pool
from leanbench.configs.space import FamilyKey
from leanbench.configs.tuned import Family, Objective
from leanbench.core.errors import UserError
from leanbench.core.kernel import Kernel
from leanbench.core.paths import user_folder
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.local import Target
from leanbench.kernels.lean.configs import BuildKey, LeanConfig
from leanbench.tune.journal import Journal
from leanbench.tune.plan import Observer, Outcome, Plan, Progress
from leanbench.tune.predicted import ModelStopwatch, model_ranker, no_ranking
from leanbench.tune.result import Summary, cost_of, summarise, to_family
from leanbench.tune.search import Search

if TYPE_CHECKING:
    from leanbench.compile.build import Build
    from leanbench.tune.stopwatch import GpuStopwatch

Compiled = Sequence[tuple[Progress, "dict[BuildKey, Build]"]]


#: Modules imported for ranking by the performance model and for fitting.
_PREDICTING = ("leanbench.tune.search", "leanbench.model.predict", "scipy.optimize")


@dataclass(frozen=True)
class Tuned:
    """Result of a tuning."""

    #: Figures to print and settings to save, by family.
    families: list[tuple[Summary, Family]]
    #: Families without candidates, and the reasons.
    left_out: dict[FamilyKey, str]


@dataclass(frozen=True)
class Request:
    """Families to tune, their target and objective."""

    kernel: Kernel
    families: Sequence[FamilyKey]
    target: Target
    plan: Plan
    objective: Objective = "latency"


def tune(request: Request, observer: Observer) -> Tuned:
    """Tune all families. Call `forget` once the result is saved.

    Raises:
        UserError: the budget is too small, or nothing can run on this GPU.
    """
    check_budget(request)
    if request.target.local_index is None:
        # Configs that cannot run on the target are not candidates.
        request = replace(request, kernel=request.kernel.implementation_on(request.target.spec))
    plan = replace(request.plan, reserve_s=_power_s(request))
    with process_pool(preload=_PREDICTING) as pool:
        search = Search(request.kernel, request.target.spec, plan, observer)
        compiled = search.compile(request.families, pool)
        if request.target.local_index is None:
            families = _predicted(request, search, compiled, pool)
        else:
            families = _measured(request, search, compiled, pool, observer)
        return Tuned(families, search.left_out)


def check_budget(request: Request) -> None:
    """Raise UserError if the objective's windows alone take longer than the budget."""
    if request.objective == "latency":
        return
    if request.target.local_index is None:
        raise UserError(
            f"--objective {request.objective} cannot be predicted yet: leave it out, or tune on"
            " the GPU"
        )
    least_s = _power_s(request) + 10 * len(request.families)
    if request.plan.budget_s < least_s:
        from leanbench.tune.power import MOST_BUILDS

        raise UserError(
            f"--objective {request.objective} measures the power of up to {MOST_BUILDS} builds of"
            f" each of {len(request.families)} families for seconds: --budget"
            f" {request.plan.budget_s:.0f}s is too small, give it {least_s:.0f}s or fewer families"
            " (--head-dim, --group)"
        )


def _power_s(request: Request) -> float:
    from leanbench.tune.power import needed_s

    return 0.0 if request.objective == "latency" else needed_s(len(request.families))


def forget(request: Request) -> None:
    """Drop this tuning's journal: its result is saved or discarded."""
    if request.target.local_index is not None:
        journal_of(request).forget(request.families)


def _predicted(
    request: Request, search: Search, compiled: Compiled, pool: Executor
) -> list[tuple[Summary, Family]]:
    rank = model_ranker(request.kernel, request.target.spec, pool)
    by_family = {progress.family: builds for progress, builds in compiled}
    watch = ModelStopwatch(rank, by_family, request.target.spec)
    stopped = search.run(compiled, watch, no_ranking, float("inf"))
    outcomes = search.finish(compiled, stopped, pool)
    return [_summarised(request, outcome, "predicted", versions(None)) for outcome in outcomes]


def _measured(
    request: Request, search: Search, compiled: Compiled, pool: Executor, observer: Observer
) -> list[tuple[Summary, Family]]:
    from leanbench.tune.stopwatch import GpuStopwatch

    index = request.target.local_index
    assert index is not None
    spec, kernel = request.target.spec, request.kernel
    about = versions(index)
    journal = journal_of(request)
    by_family = {progress.family: progress for progress, _ in compiled}
    for family, problem, times in journal.read(by_family):
        search.take_up(by_family[family], problem, times)
    search.note = journal.add
    watch = GpuStopwatch(kernel, index, spec)
    stopped = search.run(compiled, watch, model_ranker(kernel, spec, pool), watch.most_bytes)
    outcomes = search.finish(compiled, stopped, pool)
    latency = request.objective == "latency"
    power = [None] * len(outcomes) if latency else _power(request, outcomes, watch, index, observer)
    return [
        _summarised(request, outcome, "measured", about, kw)
        for outcome, kw in zip(outcomes, power, strict=True)
    ]


def journal_of(request: Request) -> Journal:
    """Open the journal of timings on the local GPU, kept until they are saved."""
    index = request.target.local_index
    assert index is not None
    from leanbench.records.environment import measured_environment

    environment = measured_environment(index)
    about = {
        **versions_of(environment),
        "board": str(environment["gpu_uuid"]),
        "kernel": request.kernel.name,
    }
    path = user_folder() / "tuning" / f"{request.target.spec.name}.jsonl"
    return Journal(path, about, request.plan.every_candidate)


def _power(
    request: Request,
    outcomes: Sequence[Outcome],
    watch: GpuStopwatch,
    index: int,
    observer: Observer,
) -> list[dict[BuildKey, float]]:
    """Measure the kW of the heuristic's builds, for comparison, and of the fastest builds.

    The problems stream K and V.
    """
    from leanbench.tune.power import measure_power

    work: list[tuple[AttentionProblem, list[LeanConfig]]] = []
    for outcome in outcomes:
        progress = outcome.progress
        problem = max(progress.times, key=lambda problem: problem.kv_bytes)
        times = progress.times[problem]
        order = sorted(times, key=lambda config, times=times: times[config].latency_us)
        by_build: dict[BuildKey, LeanConfig] = {}
        for config in [*progress.heuristic.values(), *order]:
            by_build.setdefault(config.build_key, config)
        work.append((problem, list(by_build.values())))
    return measure_power(request.kernel, index, watch, work, observer.power)


def _summarised(
    request: Request,
    outcome: Outcome,
    source: Any,
    about: dict[str, str],
    power_kw: dict[BuildKey, float] | None = None,
) -> tuple[Summary, Family]:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    kernel, spec = request.kernel, request.target.spec
    family = to_family(outcome, kernel, spec, source, request.objective, when, about, power_kw)
    return (summarise(outcome, kernel, spec, cost_of(request.objective, power_kw)), family)


def versions(index: int | None) -> dict[str, str]:
    """Return the versions of this machine, with the driver of torch's GPU `cuda:index`."""
    from leanbench.records.environment import measured_environment, predicted_environment

    return versions_of(predicted_environment() if index is None else measured_environment(index))


def versions_of(environment: dict[str, Any]) -> dict[str, str]:
    """Return the versions that the timings depend on, in addition to the GPU."""
    names = ("leanbench", "kernels", "torch", "triton", "driver")
    return {name: str(environment[name]) for name in names if environment.get(name)}
