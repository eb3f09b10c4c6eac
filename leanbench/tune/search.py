"""Tuning: the first candidates of each call are timed, and all timings are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import geometric_mean
from typing import TYPE_CHECKING, Protocol

from leanbench.compile.build import Job, build_all
from leanbench.configs.lookup import (
    kernel_for,
    learned_on,
    looked_up,
    ranked,
    refusal,
    tuned_kernel,
)
from leanbench.configs.signature import kind_of, signature_of
from leanbench.configs.store import TimedCall, TunedConfig, save
from leanbench.core.errors import OutOfMemory
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import BuildKey
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.tune.calls import fills
from leanbench.tune.fit import Timed, fit, timed_of

if TYPE_CHECKING:
    from leanbench.tune.stopwatch import GpuStopwatch

#: Candidates timed for a call: the model's first ones.
CANDIDATES = 16
#: Signatures from which on constants are measured.
_LEAST_SIGNATURES = 20
#: Parts of the signatures in cross-validation.
_PARTS = 4
#: Calls compiled at a time.
_TOGETHER = 16
#: Constants of the model that each GPU measures.
MEASURED = ("cluster", "merge")


@dataclass(frozen=True)
class Request:
    """Where to tune, and for what."""

    spec: GpuSpec
    #: Of torch.
    index: int
    objective: str = "latency"
    #: None for all.
    candidates: int | None = CANDIDATES


def first_candidates(call: AttentionProblem, spec: GpuSpec, most: int | None) -> list[TunedConfig]:
    """Return the candidates to time, the untuned choice first.

    Args:
        most: None for all, as of latent calls, whose candidates no model ranks.
    """
    kernel, call = kernel_for(tuned_kernel(call), call), looked_up(call)
    default = kernel.default_config(call, spec)
    space = [config for config in kernel.tuning_space(call, spec) if kernel.takes(config)]
    return list(dict.fromkeys([default, *space]))[: None if call.latent else most]


def versions(index: int) -> dict[str, str]:
    """Return the versions that timings on torch's GPU `cuda:index` depend on."""
    from leanbench.records.environment import measured_environment

    environment = measured_environment(index)
    names = ("leanbench", "kernels", "torch", "triton", "driver")
    return {name: str(environment[name]) for name in names if environment.get(name)}


class Observer(Protocol):
    """Observer of a tuning's progress."""

    def compiling(self, done: int, total: int) -> None: ...

    def timing(self, call: AttentionProblem, done: int, total: int) -> None: ...


def compile_calls(
    request: Request,
    calls: Iterable[AttentionProblem],
    pool: Executor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compile the request's candidates of all calls, each build once, on all cores."""
    jobs: dict[tuple[str, BuildKey], Job] = {}
    for call in calls:
        for config in first_candidates(call, request.spec, request.candidates):
            job = Job(tuned_kernel(call).name, fills(call)[0], config)
            jobs.setdefault((kind_of(call), config.build_key), job)
    build_all(list(jobs.values()), request.spec.compute_capability, pool, progress)


@dataclass
class Tuning:
    """A tuning in progress. Timed calls are saved at once, energies last."""

    request: Request
    watch: GpuStopwatch
    about: dict[str, str]
    #: Called with each call's timings, one per fill.
    keep: Callable[[Sequence[TimedCall]], None]
    timed: dict[str, list[TimedCall]] = field(default_factory=dict)
    #: Calls that could not be timed, and why.
    left_out: dict[AttentionProblem, str] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> Tuning:
        from leanbench.tune.stopwatch import GpuStopwatch

        watch = GpuStopwatch(request.index, request.spec)
        learned_on(request.spec)  # candidates are ranked as calls rank them

        def keep(calls: Sequence[TimedCall]) -> None:
            save(request.spec, calls)

        return cls(request, watch, versions(request.index), keep)

    def time(self, call: AttentionProblem) -> list[TimedCall]:
        """Time a call's first candidates on each of its fills, and keep the timings.

        A call that does not fit, or that the kernel does not take, is left out.
        """
        request = self.request
        reason = refusal(call, request.spec)
        configs: list[TunedConfig] = []
        results: list[TimedCall] = []
        if reason is None:
            configs = first_candidates(call, request.spec, request.candidates)
        for problem in fills(call) if configs else ():
            try:
                result = self.watch.time(problem, configs)
            except OutOfMemory as error:
                # Shorter fills may fit.
                reason = str(error)
                continue
            reason = next(iter(result.failures.values()), reason)
            # Gains are over the untuned choice.
            if configs[0] in result.times:
                results.append(self._timed(call, problem, result.times))
        if not results:
            self.left_out[call] = reason or "no candidate runs"
            return []
        self.timed.setdefault(results[0].signature, []).extend(results)
        if self.request.objective == "latency":
            self.keep(results)
        return results

    def _timed(
        self, call: AttentionProblem, problem: AttentionProblem, costs: dict[TunedConfig, float]
    ) -> TimedCall:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return TimedCall(
            problem, signature_of(looked_up(call)), self.request.objective, when, self.about, costs
        )

    def run(
        self, calls: Sequence[AttentionProblem], budget_s: float, pool: Executor, observer: Observer
    ) -> str:
        """Compile and time calls, some at a time, until the budget is spent; return why it stopped.

        Compiling is not in the budget: it depends on the number of cores, and happens once.
        """
        spent_s = 0.0
        for number, call in enumerate(calls):
            if spent_s > budget_s:
                return f"the budget of {budget_s:.0f} s was spent after {number} of {len(calls)}"
            if number % _TOGETHER == 0:
                compile_calls(
                    self.request, calls[number : number + _TOGETHER], pool, observer.compiling
                )
            began_s = time.monotonic()
            observer.timing(call, number, len(calls))
            self.time(call)
            spent_s += time.monotonic() - began_s
        return "all calls were timed"


@dataclass(frozen=True)
class Gain:
    """What was gained on one signature: costs of the untuned choice over those of the best."""

    signature: str
    #: By the candidate that was best on the other fills, or on this one if there is no other.
    ratio: float


def gains(timed: dict[str, list[TimedCall]]) -> list[Gain]:
    """Return the gain on each timed signature.

    A signature of several fills is judged fill by fill, by the best of the others.
    """
    found: list[Gain] = []
    for signature, calls in timed.items():
        logs = []
        for call in calls:
            others = [other for other in calls if other is not call] or [call]
            chosen = next((each for each in ranked(others) if each in call.costs), call.best)
            default = next(iter(call.costs))
            logs.append(math.log(call.costs[default] / call.costs[chosen]))
        found.append(Gain(signature, math.exp(sum(logs) / len(logs))))
    return found


def _of_the_model(calls: Sequence[TimedCall], spec: GpuSpec) -> list[Timed]:
    timed = (timed_of(call.problem, call.costs, spec) for call in calls)
    return [each for each in timed if each is not None]


def measured_constants(
    timed: dict[str, list[TimedCall]], spec: GpuSpec
) -> tuple[dict[str, float], list[float], list[float]]:
    """Return the model's constants `MEASURED` as fitted to these timings, and the shares of the
    best that its choice reaches on signatures left out: before, and after.

    No constants unless they choose better there, none from energies, and none from few signatures,
    in which noise decides.
    """
    problems = [
        each
        for calls in timed.values()
        if all(call.objective == "latency" for call in calls)
        and (each := _of_the_model(calls, spec))
    ]
    before: list[float] = []
    after: list[float] = []
    if len(problems) < _LEAST_SIGNATURES:
        return {}, before, after
    for part in range(_PARTS):
        rest = [each for at, one in enumerate(problems) if at % _PARTS != part for each in one]
        held = [each for one in problems[part::_PARTS] for each in one]
        if rest and held:
            costs = fit(rest, MEASURED, Costs())
            before += [each.share(Costs()) for each in held]
            after += [each.share(costs) for each in held]
    if not before or geometric_mean(after) <= geometric_mean(before):
        return {}, before, after
    costs = fit([each for one in problems for each in one], MEASURED, Costs())
    return {name: getattr(costs, name) for name in MEASURED}, before, after


def energies(tuning: Tuning) -> None:
    """Keep energies, or energies x latency, in place of the timed latencies.

    While K and V stream, a build draws the same power on any call: it is measured for the fastest
    builds, on the largest timed problem of each kind of call.

    Raises:
        UserError: NVML or its energy counter cannot be used on this machine.
    """
    from leanbench.tune.power import measure_power

    request = tuning.request
    largest: dict[str, TimedCall] = {}
    for call in (call for calls in tuning.timed.values() for call in calls):
        shape = kind_of(call.problem)
        before = largest.get(shape)
        if before is None or call.problem.kv_bytes > before.problem.kv_bytes:
            largest[shape] = call
    work = []
    for shape, call in largest.items():
        builds: dict[BuildKey, TunedConfig] = {}
        of_kind = (each for calls in tuning.timed.values() for each in calls)
        same = [each for each in of_kind if kind_of(each.problem) == shape]
        order = sorted(call.costs, key=call.costs.__getitem__)
        # The untuned choice and the best of each call come first.
        for config in [
            *(next(iter(each.costs)) for each in same),
            *(each.best for each in same),
            *order,
        ]:
            builds.setdefault(config.build_key, config)
        work.append((call.problem, list(builds.values())))
    power = measure_power(request.index, tuning.watch, work)
    kw = dict(zip(largest, power, strict=True))
    exponent = 2 if request.objective == "edp" else 1
    for signature, calls in tuning.timed.items():
        tuning.timed[signature] = converted = []
        for call in calls:
            build_kw = kw[kind_of(call.problem)]
            costs = {
                config: build_kw[config.build_key] * us**exponent
                for config, us in call.costs.items()
                if config.build_key in build_kw
            }
            if next(iter(call.costs)) in costs:
                converted.append(replace(call, costs=costs))
            else:
                tuning.left_out[call.problem] = "the power of its settings is not known"
        tuning.keep(converted)
    tuning.timed = {signature: calls for signature, calls in tuning.timed.items() if calls}
