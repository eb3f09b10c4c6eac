"""Check of the settings: what they reach of the best of all candidates, call by call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from leanbench.configs.lookup import Choice, choose, looked_up, resolve, tuned_kernel
from leanbench.configs.signature import signature_of
from leanbench.configs.store import TimedCall, TunedConfig
from leanbench.core.config import KernelConfig
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.cuda_settings import costs_of
from leanbench.tune.fit import timed_of
from leanbench.tune.search import Request, first_candidates

if TYPE_CHECKING:
    from leanbench.tune.stopwatch import GpuStopwatch

#: The fastest of all that are timed again, with the choice.
_FINALISTS = 6


@dataclass(frozen=True)
class Checked:
    """A call's choice next to the best candidates. Latencies are in us, one for each fill."""

    fills: Sequence[AttentionProblem]
    choice: Choice
    #: The untuned choice: the model's, or of rules.
    model: KernelConfig | None
    #: Best single candidate of all fills.
    best: TunedConfig
    us: dict[str, list[float]]
    #: Latency of the best candidate of each fill.
    fastest_us: list[float]
    predicted_us: float | None
    #: All timings of each fill, losers too.
    timed: list[TimedCall]

    def share(self, whose: str = "chosen") -> float:
        """Return the best single candidate's latency over another's, means over the fills."""
        return geometric_mean(self.us["best"]) / geometric_mean(self.us[whose])

    @property
    def share_of_fills(self) -> float:
        """Latency of each fill's best candidate over the choice's."""
        return geometric_mean(self.fastest_us) / geometric_mean(self.us["chosen"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "how": self.choice.how,
            "why": self.choice.why,
            "chosen": self.choice.config.to_dict() if self.choice.config else None,
            "best": self.best.to_dict(),
            "timed": [call.to_dict() for call in self.timed],
            "us": {whose: [round(us, 3) for us in each] for whose, each in self.us.items()},
            "fastest_us": [round(us, 3) for us in self.fastest_us],
            "predicted_us": self.predicted_us,
            "share": round(self.share(), 4),
            "model_share": round(self.share("model"), 4),
        }


def call_of(fills: Sequence[AttentionProblem]) -> AttentionProblem:
    """Return the call as its caller's host knows it."""
    first = fills[0]
    if first.lengths_on == "host":
        return first
    return replace(first, context=first.cache_capacity, capacity=first.cache_capacity)


def check(
    request: Request, fills: Sequence[AttentionProblem], watch: GpuStopwatch
) -> Checked | None:
    """Time every candidate on each fill of a call, then the best and the choice again.

    None if no candidate runs on every fill.
    """
    spec, call = request.spec, call_of(fills)
    kernel = tuned_kernel(call)
    choice = choose(kernel, call, spec)
    model = resolve(kernel, call, spec, "heuristic").config
    configs: Any = [choice.config, model, *first_candidates(call, spec, None)]
    everything = [watch.time(fill, list(dict.fromkeys(configs))).times for fill in fills]
    common = _common(everything)
    if choice.config not in common or model not in common:
        return None
    each = [min(times, key=times.__getitem__) for times in everything]
    finalists = [choice.config, model, *common[:_FINALISTS], *each]
    again = [watch.time(fill, list(dict.fromkeys(finalists))).times for fill in fills]
    best = _common(again)[0]
    who = {"chosen": choice.config, "model": model, "best": best}
    return Checked(
        fills,
        choice,
        model,
        best,
        {whose: [times[config] for times in again] for whose, config in who.items()},
        [min(times.values()) for times in again],
        _predicted_us(fills, choice.config, request),
        [
            TimedCall(fill, signature_of(looked_up(call)), "latency", "", {}, times)
            for fill, times in zip(fills, everything, strict=True)
        ],
    )


def _common(times: Sequence[dict[TunedConfig, float]]) -> list[Any]:
    """Return the configs timed on every fill, by the mean of their logarithms."""
    common = [config for config in times[0] if all(config in each for each in times)]
    return sorted(common, key=lambda config: sum(math.log(each[config]) for each in times))


def _predicted_us(fills: Sequence[AttentionProblem], config: Any, request: Request) -> float | None:
    """Return the model's latency of a config over these fills; None for other kernels' configs."""
    predicted: list[float] = []
    for fill in fills:
        timed = timed_of(fill, {config: 1.0}, request.spec, least=1)
        if timed is None:
            return None
        predicted.append(float(timed.predicted_us(costs_of(request.spec))[0]))
    return geometric_mean(predicted)
