"""Rounds that drop the slowest, and timing on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from captured import builds_compiled
from leanbench.kernels.lean import Lean
from leanbench.kernels.reference.torch import attend_all
from timed_examples import H200, LATENT, LATENT_SERVED, LEAN, PROBLEM

from leanbench.compile.build import process_pool
from leanbench.configs.lookup import refusal
from leanbench.core.errors import DoesNotFit, OutOfMemory, UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.tune import stopwatch
from leanbench.tune.search import first_candidates
from leanbench.tune.stopwatch import ROUNDS, GpuStopwatch, knock_out


class Fake:
    launches = 3

    def __init__(self, latency_us, seen, name):
        self.latency_us, self.seen, self.name = latency_us, seen, name

    def sample_us(self):
        self.seen.append(self.name)
        return self.latency_us


def test_losers_leave_after_their_round():
    seen = []
    latencies = {"first": 15.0, "best": 10.0, "near": 10.3, "far": 11.2, "lost": 20.0}
    timings = knock_out({name: Fake(value, seen, name) for name, value in latencies.items()})
    assert {name: len(timing.samples_us) for name, timing in timings.items()} == {
        "first": 13,
        "best": 13,
        "near": 13,
        "far": 5,
        "lost": 2,
    }
    # One sample each in turn, after a discarded pass.
    assert seen[:15] == list(latencies) * 3
    assert sum(samples for samples, _ in ROUNDS) == 13


def test_nothing_to_time():
    assert knock_out({}) == {}


class Scaled:
    """A kernel whose output is the right one times a config, a number here; none for 0."""

    name = "scaled"

    def prepare(self, inputs, config):
        if isinstance(config, str):
            raise DoesNotFit(f"{config}\nwith details")
        return partial(self.run, inputs, config)

    def run(self, inputs, config):
        if config > 0:
            attend_all(inputs)
            inputs.out.mul_(config)


class OneReplay:
    """Launches as they are, without a graph: a factor of 1.001 takes 1001 us."""

    launches = 1

    def __init__(self, launches, sample_ms):
        launches[0]()
        self.us = 1000 * launches[0].args[1]

    def sample_us(self):
        return self.us


def timed_here(configs, monkeypatch):
    monkeypatch.setattr(stopwatch, "Replay", OneReplay)
    monkeypatch.setattr(stopwatch, "tuned_kernel", lambda call: Scaled())
    monkeypatch.setattr(stopwatch, "refuse_shortage", lambda problem, device: None)
    monkeypatch.setattr(
        stopwatch, "rotating_inputs", lambda problem, device, *given: [make_inputs(problem, device)]
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, 1e9))
    watch: Any = object.__new__(GpuStopwatch)
    watch._spec, watch._device = H200, torch.device("cpu")
    return watch.time(AttentionProblem(2, 4, 2, (40, 7), 64, page_size=16), configs)


def test_outputs_are_compared_with_the_first_and_that_with_the_reference(monkeypatch):
    configs = ["it spills", 1.0, 1.001, 1.01, 0.0]
    result = timed_here(configs, monkeypatch)
    assert result.times == pytest.approx({1.0: 1000.0, 1.001: 1001.0})
    assert result.failures["it spills"] == "it spills"
    words = "differs from the other configs by {} of the output's norm"
    reasons = [result.failures[config] for config in configs[3:]]
    assert reasons == [words.format("1.0e-02"), words.format("nan")]
    with pytest.raises(UserError, match=r"^scaled cannot be tuned here, its output is wrong: "):
        timed_here([1.1, 1.0], monkeypatch)


def test_memory_that_runs_out_is_a_refusal(monkeypatch):
    def run_out(self: OneReplay, *given: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GB\nof 80")

    monkeypatch.setattr(OneReplay, "__init__", run_out)
    with pytest.raises(OutOfMemory, match=r"tried to allocate 2 GB$"):
        timed_here([1.0], monkeypatch)


@pytest.mark.deep
def test_captured_launches_are_the_builds_that_were_compiled_ahead(tmp_path):
    with process_pool(1) as pool:
        assert pool.submit(builds_compiled, tmp_path).result() == (1, 1)


@pytest.fixture
def gpu():
    from leanbench.gpu.local import choose

    target = choose(None, require_gpu=True)
    assert target.local_index is not None
    return target.local_index, target.spec


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(4, 8, 8, 5000, 64),
        AttentionProblem(4, 64, 8, (5000, 20, 1, 700), 64, "bf16", "NHD", page_size=16),
        LATENT,
        replace(LATENT_SERVED, kv_dtype="e4m3"),
    ],
    ids=["dense", "ragged pages", "latent", "latent pages in fp8"],
)
def test_times_on_the_gpu(gpu, problem):
    index, spec = gpu
    if (reason := refusal(problem, spec)) is not None:
        pytest.skip(reason)
    configs = first_candidates(problem, spec, None)[:6]
    result = GpuStopwatch(index, spec).time(problem, configs)
    assert result.failures == {}
    assert list(result.times) == configs
    floor_us = problem.kv_bytes / (1.1e6 * spec.bandwidth_tb_s)
    assert all(floor_us < us < 20 * floor_us + 50 for us in result.times.values())


class Wrong(Lean):
    """A kernel that is right with every config but one."""

    def __init__(self, bad):
        self.bad = bad

    def prepare(self, inputs, config):
        launch = super().prepare(inputs, config)

        def run():
            launch()
            if config == self.bad:
                inputs.out.mul_(1.01)

        return run


@pytest.mark.gpu
def test_a_wrong_kernel_is_not_timed(gpu, monkeypatch):
    index, spec = gpu
    problem = replace(PROBLEM, q_heads=8, context=1000)
    configs = LEAN.tuning_space(problem, spec)[:3]
    monkeypatch.setattr(stopwatch, "tuned_kernel", lambda call: Wrong(configs[1]))
    result = GpuStopwatch(index, spec).time(problem, configs)
    assert list(result.failures) == [configs[1]]
    assert "differs from the other configs" in result.failures[configs[1]]
    monkeypatch.setattr(stopwatch, "tuned_kernel", lambda call: Wrong(configs[0]))
    with pytest.raises(UserError, match="lean cannot be tuned here"):
        GpuStopwatch(index, spec).time(problem, configs)
