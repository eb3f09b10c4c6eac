"""A stopwatch without a GPU: latencies are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leanbench.configs.store import TunedConfig
from leanbench.core.problem import AttentionProblem
from leanbench.tune.stopwatch import Result

Us = Callable[[AttentionProblem, TunedConfig], float | str]


class FakeWatch:
    """Times by `us`; a text in its place is the reason why a candidate fails."""

    def __init__(self, us: Us) -> None:
        self.us = us
        self.timed: list[tuple[AttentionProblem, tuple[TunedConfig, ...]]] = []

    def time(self, problem: AttentionProblem, configs: Sequence[TunedConfig]) -> Result:
        self.timed.append((problem, tuple(configs)))
        result = Result({}, {})
        for config in configs:
            us = self.us(problem, config)
            if isinstance(us, str):
                result.failures[config] = us
            else:
                result.times[config] = us
        return result

    def buffers(self, problem: AttentionProblem) -> list[AttentionProblem]:
        return [problem]

    def launches(
        self, buffers: Sequence[AttentionProblem], config: TunedConfig
    ) -> list[TunedConfig]:
        return [config]
