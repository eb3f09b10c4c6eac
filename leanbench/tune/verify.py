"""Verification of tuned configs: the tuned problems timed again, with ties and the heuristic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.errors import OutOfMemory, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.measure.timing import Effort, Replay, run_rounds

if TYPE_CHECKING:
    from leanbench.configs.tuned import Family, TunedProblem

#: Maximum regret of a choice that still holds.
HOLDS_WITHIN = 0.01
#: Median regret above which a file is out of date.
FAILS_ABOVE = 0.02
#: Precise enough for differences of 1%.
EFFORT = Effort(relative_ci=0.003, max_samples=60)

#: Timing in microseconds of configs on a problem, or the reason against it. Configs that do not fit
#: are missing.
TimeConfigs = Callable[[AttentionProblem, Sequence[LeanConfig]], Mapping[LeanConfig, float] | str]


@dataclass(frozen=True)
class Task:
    """A tuned problem to time again."""

    family: Family
    tuned: TunedProblem

    @property
    def problem(self) -> AttentionProblem:
        family, tuned = self.family, self.tuned
        q_heads = tuned.kv_heads * family.group_size
        return AttentionProblem(
            tuned.batch,
            q_heads,
            tuned.kv_heads,
            tuned.context,
            family.head_dim,
            family.dtype,
            family.kv_layout,
        )

    @property
    def chosen(self) -> LeanConfig:
        return self.family.candidates[self.tuned.chosen].config

    @property
    def configs(self) -> list[LeanConfig]:
        """The chosen config, its ties, and the heuristic's."""
        indices = dict.fromkeys((self.tuned.chosen, *self.tuned.ties, self.tuned.heuristic))
        return [self.family.candidates[index].config for index in indices]


@dataclass(frozen=True)
class Verdict:
    """Comparison of a problem's chosen config with the currently fastest one."""

    task: Task
    chosen_us: float
    fastest: LeanConfig
    fastest_us: float

    @property
    def regret(self) -> float:
        """Excess of the choice's time over the fastest's, as a fraction."""
        return self.chosen_us / self.fastest_us - 1

    @property
    def holds(self) -> bool:
        return self.regret <= HOLDS_WITHIN


def tasks_of(families: Sequence[Family], sample: int | None = None) -> list[Task]:
    """Return the problems of all families tuned for latency, or `sample` of them, evenly spread."""
    tasks = [
        Task(family, tuned)
        for family in families
        if family.objective == "latency"
        for tuned in family.problems
    ]
    if sample is None or sample >= len(tasks):
        return tasks
    return [tasks[number * len(tasks) // sample] for number in range(sample)]


def judge(task: Task, time: TimeConfigs) -> Verdict | str:
    """Time the task's configs; return a sentence if the chosen one cannot be judged."""
    latencies_us = time(task.problem, task.configs)
    if isinstance(latencies_us, str):
        return latencies_us
    if task.chosen not in latencies_us:
        return "the chosen config does not fit this GPU any more"
    fastest = min(latencies_us, key=lambda config: latencies_us[config])
    return Verdict(task, latencies_us[task.chosen], fastest, latencies_us[fastest])


def median_regret(verdicts: Sequence[Verdict]) -> float:
    return statistics.median(verdict.regret for verdict in verdicts)


class GpuTimer:
    """A `TimeConfigs` on torch's GPU `index`: rotating buffers, cold L2, configs in turn."""

    def __init__(self, kernel: Kernel, index: int, spec: GpuSpec) -> None:
        import torch

        self._kernel, self._spec = kernel, spec
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)

    def __call__(
        self, problem: AttentionProblem, configs: Sequence[LeanConfig]
    ) -> Mapping[LeanConfig, float] | str:
        from triton.runtime.errors import OutOfResources

        from leanbench.measure.buffers import free_memory, refuse_shortage, rotating_inputs

        free_memory(self._spec)
        try:
            refuse_shortage(problem, self._device)
        except OutOfMemory as error:
            return str(error)
        buffers = rotating_inputs(problem, self._device, self._spec, "cold")
        replays: dict[LeanConfig, Replay] = {}
        for config in configs:
            try:
                replays[config] = Replay(
                    [self._kernel.prepare(inputs, config) for inputs in buffers], EFFORT.sample_ms
                )
            except (OutOfResources, UserError):
                continue
        return {config: timing.median_us for config, timing in run_rounds(replays, EFFORT).items()}
