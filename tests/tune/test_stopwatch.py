"""Rounds that drop the slowest."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from captured import builds_compiled
from leanbench.kernels.lean import Lean

from leanbench.check.reference import Reference
from leanbench.compile.build import process_pool
from leanbench.configs.space import FamilyKey
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_windows
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.tune.stopwatch import ROUNDS, GpuStopwatch, Time, _time, knock_out

LEAN = kernel("lean")


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


def test_a_median_of_few_samples_has_no_interval():
    seen = []
    timings = knock_out({"best": Fake(10.0, seen, "best"), "lost": Fake(20.0, seen, "lost")})
    assert _time(timings["lost"]) == Time(20.0)
    assert _time(timings["best"]) == Time(10.0, 10.0, 10.0)


def test_nothing_to_time():
    assert knock_out({}) == {}


@pytest.mark.parametrize("page_size", [None, 16])
def test_buffers_are_a_call_of_the_problem(page_size):
    stopwatch = object.__new__(GpuStopwatch)
    stopwatch._spec, stopwatch._device = find("h200"), torch.device("cpu")
    stopwatch.most_bytes, stopwatch._pools = 1_000_000, {}
    problem = AttentionProblem(2, 4, 2, 100, 64, page_size=page_size)
    buffers = stopwatch.buffers(problem)
    # All for which the pool has room, without overlap.
    assert len(buffers) == 1_000_000 // problem.kv_allocated_bytes
    starts = sorted(
        cache.data_ptr() for inputs in buffers for cache in (inputs.k_cache, inputs.v_cache)
    )
    assert (
        min(after - before for before, after in pairwise(starts)) == problem.kv_allocated_bytes // 2
    )
    for inputs in buffers[:2]:
        assert inputs.page_size == page_size
        kernel("reference").prepare(inputs, None)()
        assert Reference(inputs).check(inputs).failure("fp16") is None


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(2, 4, 2, 100, 64, capacity=300),
        AttentionProblem(2, 4, 2, (100, 7), 64, capacity=300, lengths_on="device"),
        AttentionProblem(2, 4, 2, 4000, 64),
    ],
    ids=lambda problem: problem.label,
)
def test_what_the_pool_does_not_hold_has_memory_of_its_own(problem, monkeypatch):
    monkeypatch.setattr("leanbench.tune.stopwatch.free_memory", lambda spec: None)
    monkeypatch.setattr(
        "leanbench.tune.stopwatch.rotating_inputs",
        lambda problem, device, spec, cache: make_windows(problem, device, 1),
    )
    stopwatch = object.__new__(GpuStopwatch)
    stopwatch._spec, stopwatch._device = find("h200"), torch.device("cpu")
    stopwatch.most_bytes, stopwatch._pools = 1_000_000, {}
    [inputs] = stopwatch.buffers(problem)
    assert inputs.k_cache.shape == (2, problem.cache_capacity, 2, 64)
    assert not stopwatch._pools


@pytest.mark.deep
def test_captured_launches_are_the_builds_that_were_compiled_ahead(tmp_path):
    with process_pool(1) as pool:
        assert pool.submit(builds_compiled, tmp_path).result() == (1, 1)


@pytest.fixture
def h200():
    from leanbench.gpu.local import choose

    target = choose(None, require_gpu=True)
    assert target.local_index is not None
    return target.local_index, target.spec


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "layout", "dtype"), [(1, "HND", "fp16"), (8, "NHD", "bf16")])
def test_times_on_the_gpu(h200, group, layout, dtype):
    index, spec = h200
    problem = FamilyKey(64, group, dtype, layout).problem(32, 5000)
    configs = LEAN.tuning_space(problem, spec)[:6]
    result = GpuStopwatch(LEAN, index, spec).time(problem, configs)
    assert result.failures == {}
    assert set(result.times) == set(configs)
    floor_us = problem.kv_bytes / (1.1e6 * spec.bandwidth_tb_s)
    assert all(floor_us < time.latency_us < 20 * floor_us + 50 for time in result.times.values())


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
def test_a_wrong_kernel_is_not_timed(h200):
    index, spec = h200
    problem = FamilyKey(64, 1).problem(32, 5000)
    configs = LEAN.tuning_space(problem, spec)[:3]
    result = GpuStopwatch(Wrong(configs[1]), index, spec).time(problem, configs)
    assert list(result.failures) == [configs[1]]
    assert "differs from the other configs" in result.failures[configs[1]]
    with pytest.raises(UserError, match="lean cannot be tuned here"):
        GpuStopwatch(Wrong(configs[0]), index, spec).time(problem, configs)
