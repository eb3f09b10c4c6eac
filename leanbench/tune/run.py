"""A tuning from beginning to end: on a GPU that is here, or by the performance model of one that is not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.build import process_pool
from leanbench.errors import UserError
from leanbench.gpu.local import Target
from leanbench.paths import user_folder
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig
from leanbench.tune.journal import Journal
from leanbench.tune.kept import Family, Objective
from leanbench.tune.predicted import ModelStopwatch, model_ranker, no_ranking
from leanbench.tune.result import Summary, summarise, to_family
from leanbench.tune.search import Found, Observer, Plan, Progress, Search
from leanbench.tune.space import BuildKey, FamilyKey

if TYPE_CHECKING:
    from leanbench.build import Build
    from leanbench.tune.stopwatch import GpuStopwatch

Compiled = Sequence[tuple[Progress, "dict[BuildKey, Build]"]]


@dataclass(frozen=True)
class Request:
    """What is to be tuned, and how."""

    kernel: Kernel
    families: Sequence[FamilyKey]
    target: Target
    plan: Plan
    objective: Objective = "latency"
    #: Processes that compile and fit; None: one for each core.
    workers: int | None = None


def journal_path(target: Target) -> Path:
    """Where an interrupted tuning of a GPU is noted."""
    return user_folder() / "tuning" / f"{target.spec.name}.jsonl"


def tune(request: Request, observer: Observer, began_s: float) -> list[tuple[Summary, Family]]:
    """Tunes every family; what to print of each, and what to keep.

    Raises:
        UserError: the budget is too small, or nothing can run on this GPU.
    """
    check_budget(request)
    with process_pool(request.workers) as pool:
        search = Search(request.kernel, request.target.spec, request.plan, observer, began_s)
        compiled = search.compile(request.families, pool)
        if request.target.local_index is None:
            return _predicted(request, search, compiled, pool)
        return _measured(request, search, compiled, pool)


def check_budget(request: Request) -> None:
    """Raises UserError if the objective's windows alone take longer than the budget."""
    if request.objective == "latency":
        return
    if request.target.local_index is None:
        raise UserError(f"--objective {request.objective} cannot be predicted yet: leave it out, or tune on the GPU")
    from leanbench.tune.power import needed_s

    least_s = needed_s(len(request.families)) + 10 * len(request.families)
    if request.plan.budget_s < least_s:
        raise UserError(
            f"--objective {request.objective} measures the power of up to 8 builds of each of "
            f"{len(request.families)} families for seconds: --budget {request.plan.budget_s:.0f}s is too small, "
            f"give it {least_s:.0f}s or fewer families (--head-dim, --group)"
        )


def _predicted(request: Request, search: Search, compiled: Compiled, pool: Executor) -> list[tuple[Summary, Family]]:
    rank = model_ranker(request.kernel, request.target.spec, pool)
    watch = ModelStopwatch(rank, {progress.family: builds for progress, builds in compiled})
    stopped = search.run(compiled, watch, no_ranking, float("inf"))
    found = search.finish(compiled, stopped, pool)
    return [_kept(request, each, "predicted", versions(None)) for each in found]


def _measured(request: Request, search: Search, compiled: Compiled, pool: Executor) -> list[tuple[Summary, Family]]:
    from leanbench.tune.stopwatch import GpuStopwatch

    index = request.target.local_index
    assert index is not None
    spec, kernel = request.target.spec, request.kernel
    about = versions(index)
    journal = Journal(journal_path(request.target), {**about, "gpu": spec.product, "kernel": kernel.name})
    _take_up(journal, compiled)
    search.note = journal.add
    watch = GpuStopwatch(kernel, index, spec)
    stopped = search.run(compiled, watch, model_ranker(kernel, spec, pool), watch.most_bytes)
    found = search.finish(compiled, stopped, pool)
    power = _power(request, found, watch, index) if request.objective != "latency" else [None] * len(found)
    results = [_kept(request, each, "measured", about, kw) for each, kw in zip(found, power, strict=True)]
    journal.end()
    return results


def _take_up(journal: Journal, compiled: Compiled) -> None:
    """Goes on from what an interrupted tuning of the same families had timed."""
    by_family = {progress.family: progress for progress, _ in compiled}
    kept = [timed for timed in journal.read() if timed[0] in by_family]
    for family, problem, times in kept:
        by_family[family].times[problem] = times
    journal.begin(kept)


def _power(request: Request, found: Sequence[Found], watch: GpuStopwatch, index: int) -> list[dict[BuildKey, float]]:
    from leanbench.tune.power import measure_power

    work: list[tuple[AttentionProblem, list[KernelConfig]]] = []
    for each in found:
        problem = max(each.progress.times, key=lambda problem: problem.kv_bytes)
        times = each.progress.times[problem]
        # The fastest of each build; a build that is slow where bandwidth counts saves no energy either.
        fastest: dict[BuildKey, KernelConfig] = {}
        from leanbench.tune.space import build_key

        for config in sorted(times, key=lambda config, times=times: times[config].latency_us):
            fastest.setdefault(build_key(config), config)
        work.append((problem, list(fastest.values())))
    return measure_power(request.kernel, index, watch, work)


def _kept(
    request: Request,
    found: Found,
    source: Any,
    about: dict[str, str],
    power_kw: dict[BuildKey, float] | None = None,
) -> tuple[Summary, Family]:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    family = to_family(found, source, request.objective, when, about, power_kw)
    return summarise(found, request.kernel, request.target.spec), family


def versions(index: int | None) -> dict[str, str]:
    """What the timings depend on beside the GPU."""
    from leanbench.run.environment import measured_environment, predicted_environment

    environment = predicted_environment() if index is None else measured_environment(index)
    names = ("leanbench", "torch", "triton", "driver")
    return {name: str(environment[name]) for name in names if environment.get(name)}


def now_s() -> float:
    """The clock that a budget runs by."""
    return time.monotonic()
