"""Verification of tuned choices: configs timed again, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from leanbench.kernels.lean.configs import LeanConfig
from tuned_examples import H200, HEURISTIC, LARGE, LEAN, WIDE, build, candidate, family, tuned

from leanbench.core.inputs import make_windows
from leanbench.core.problem import AttentionProblem
from leanbench.measure import buffers
from leanbench.tune import verify
from leanbench.tune.verify import GpuTimer, Task, Verdict, judge, median_regret, tasks_of

THREE = family(
    candidates=[candidate(HEURISTIC, 0), candidate(LARGE, 1), candidate(WIDE, 1)],
    problems=[tuned(1024 * (number + 1), chosen=2, ties=[2, 1]) for number in range(10)],
)


def timed(**latencies_us: float):
    """Return a timer with these times; `None` stands for a config that does not fit."""
    named = {"heuristic": HEURISTIC, "large": LARGE, "wide": WIDE}

    def time(
        problem: AttentionProblem, configs: Sequence[LeanConfig]
    ) -> Mapping[LeanConfig, float]:
        return {named[name]: us for name, us in latencies_us.items() if named[name] in configs}

    return time


def test_what_is_timed_again():
    first, *_ = tasks_of([THREE])
    assert first.problem == AttentionProblem(1, 32, 8, 1024, 128)
    assert first.configs == [WIDE, LARGE, HEURISTIC]
    bf16 = family(
        dtype="bf16",
        kv_layout="NHD",
        group_size=8,
        problems=[tuned(300, batch=3, kv_heads=2, ties=[])],
    )
    (task,) = tasks_of([bf16])
    assert task.problem == AttentionProblem(3, 16, 2, 300, 128, "bf16", "NHD")
    # The ties need not include the chosen one.
    assert task.configs == [LARGE, HEURISTIC]
    (same,) = tasks_of([family(problems=[tuned(chosen=0, ties=[0])])])
    assert same.configs == [HEURISTIC]


def test_a_sample_is_spread_over_all_problems():
    energy = family(objective="energy", problems=[tuned()])
    assert len(tasks_of([THREE, energy])) == 10
    assert [task.tuned.context for task in tasks_of([THREE], 3)] == [1024, 4096, 7168]
    assert tasks_of([THREE], 10) == tasks_of([THREE], 99) == tasks_of([THREE])
    assert tasks_of([]) == []


@pytest.mark.parametrize(
    ("latencies_us", "regret", "holds"),
    [
        ({"wide": 10.0, "large": 10.0, "heuristic": 11.0}, 0.0, True),
        ({"wide": 10.09, "large": 10.0, "heuristic": 11.0}, 0.009, True),
        ({"wide": 10.2, "large": 10.5, "heuristic": 10.0}, 0.02, False),
        ({"wide": 10.0}, 0.0, True),
    ],
)
def test_a_choice_holds_within_a_percent_of_the_fastest(latencies_us, regret, holds):
    verdict = judge(tasks_of([THREE])[0], timed(**latencies_us))
    assert isinstance(verdict, Verdict)
    assert verdict.regret == pytest.approx(regret)
    assert verdict.holds is holds
    assert verdict.fastest_us == min(latencies_us.values())


def test_what_cannot_be_judged_says_why():
    task = tasks_of([THREE])[0]
    assert judge(task, lambda problem, configs: "needs 200 GB") == "needs 200 GB"
    assert judge(task, timed(large=1.0)) == "the chosen config does not fit this GPU any more"


def test_the_median_regret():
    task = tasks_of([THREE])[0]
    verdicts = [Verdict(task, chosen_us, LARGE, 10.0) for chosen_us in (10.0, 10.5, 13.0)]
    assert median_regret(verdicts) == pytest.approx(0.05)


@dataclass
class Launch:
    config: LeanConfig

    def __call__(self) -> None:
        pass


class PretendedReplay:
    """A replay that takes a microsecond per stage of the config, and more in every sample of a
    round.
    """

    def __init__(self, launches: Sequence[Launch], sample_ms: float) -> None:
        self.launches = len(launches)
        self._stages = launches[0].config.num_stages
        self._noise = itertools.cycle((0.0, 0.001, 0.002))

    def sample_us(self) -> float:
        return self._stages + next(self._noise)


def test_the_timer_takes_turns_on_rotating_buffers(monkeypatch):
    from triton.runtime.errors import OutOfResources

    made: list[AttentionProblem] = []
    prepared: list[LeanConfig] = []

    class Kernel:
        def prepare(self, inputs: Any, config: LeanConfig) -> Launch:
            if config == WIDE:
                raise OutOfResources(300_000, 232_448, "shared memory")
            prepared.append(config)
            return Launch(config)

    def inputs(problem: AttentionProblem, device: Any, count: int) -> Any:
        made.append(problem)
        return make_windows(problem, "cpu", count)

    free = [140e9]
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(free[0]), int(141e9)))
    monkeypatch.setattr(buffers, "make_windows", inputs)
    monkeypatch.setattr(buffers, "free_memory", lambda spec: None)
    monkeypatch.setattr(buffers, "COLD_BYTES", 300_000)
    monkeypatch.setattr(buffers, "COLD_L2_MULTIPLE", 0)
    monkeypatch.setattr(verify, "Replay", PretendedReplay)
    timer = GpuTimer(Kernel(), 0, H200)  # pyright: ignore[reportArgumentType]
    # K and V have 102,400 bytes: three copies exceed the fake L2.
    problem = AttentionProblem(2, 4, 2, 100, 64)
    times = timer(problem, [HEURISTIC, WIDE, LARGE])
    assert times == {HEURISTIC: pytest.approx(4.001), LARGE: pytest.approx(3.001)}
    assert made == [problem] * 3
    assert prepared == [HEURISTIC] * 3 + [LARGE] * 3
    free[0] = 1e6
    shortage = timer(problem, [HEURISTIC])
    assert isinstance(shortage, str)
    assert shortage.startswith("needs 0.5 GB")


def test_a_task_knows_its_kernels_config():
    task = Task(THREE, THREE.problems[0])
    assert task.chosen == WIDE
    assert replace(task, tuned=tuned(chosen=0)).chosen == LEAN.default_config(
        AttentionProblem(1, 32, 8, 4096, 128), H200
    )
    assert build(3.0).coefficients.start_us == 3.0
