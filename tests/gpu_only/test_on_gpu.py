"""Behavior that Triton's interpreter does not show: graphs, streams, resident CTAs, compilation."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from attention_calls import assert_right, attend, captured
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.measure.instruments import open_instruments
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem
from leanbench.measure.read_floor import fingerprint
from leanbench.measure.shared import attention_on

# The thread method ends the process, because a kernel that never ends cannot be interrupted.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

MHA = AttentionProblem(1, 56, 56, 4096, 64)
GQA = AttentionProblem(4, 32, 8, 3000, 128, "bf16", "NHD")
RAGGED = AttentionProblem(4, 16, 4, (5000, 1, 129, 2047), 128)
CONFIG = LeanTritonConfig(64, 4, 3, ctas_per_sm=2, min_tiles_per_cta=1, align_grid=False)


def lean() -> ModuleType:
    return importlib.import_module("leanbench.kernels.lean.triton")


def partials_workspace() -> ModuleType:
    return importlib.import_module("leanbench.kernels.lean.workspace")


@pytest.fixture
def no_workspaces(monkeypatch):
    """Start without workspaces, as in a new process."""
    monkeypatch.setattr(partials_workspace().WORKSPACES, "of_streams", {})


@pytest.mark.usefixtures("no_workspaces")
def test_a_graph_does_not_need_an_earlier_graph_to_have_run():
    """The order of replays does not matter."""
    problems = [MHA, replace(MHA, context=9000), replace(MHA, context=1000)]
    calls = [make_inputs(problem, "cuda") for problem in problems]
    graphs = [captured(partial(attend, inputs)) for inputs in calls]
    for inputs, (graph, out, lse) in reversed(list(zip(calls, graphs, strict=True))):
        graph.replay()
        torch.cuda.synchronize()
        assert_right(inputs, out, lse)


@pytest.mark.usefixtures("no_workspaces")
def test_a_stream_that_captured_a_call_can_run_one():
    inputs, stream = make_inputs(MHA, "cuda"), torch.cuda.Stream()
    graph, out, lse = captured(partial(attend, inputs), stream)
    with torch.cuda.stream(stream):
        eager_out, eager_lse = attend(inputs)
    torch.cuda.synchronize()
    assert_right(inputs, eager_out, eager_lse)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager_out)
    assert torch.equal(lse, eager_lse)


@pytest.mark.parametrize(
    ("ctas_per_sm", "times_the_sms"),
    [(16, 1), (1, 24)],
    ids=["by the config", "with registers to spare"],
)
@pytest.mark.parametrize("context", [8192, (8192, 1, 5000)], ids=["uniform", "ragged"])
def test_a_grid_that_does_not_fit_at_once_ends(ctas_per_sm, times_the_sms, context):
    """Waiting CTAs hold their SMs, but they wait only for CTAs that have started."""
    batch = 1 if isinstance(context, int) else len(context)
    problem = AttentionProblem(batch, 40, 40, context, 64)
    inputs = make_inputs(problem, "cuda")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    # 64 KB of shared memory: no GPU holds a quarter of these CTAs. 16 CTAs of 4 warps are the
    # maximum of a config.
    config = LeanTritonConfig(
        128, 4, 3, ctas_per_sm=ctas_per_sm, min_tiles_per_cta=1, align_grid=False
    )
    launch = lean().prepare(inputs, config, sms=sms * times_the_sms)
    for _ in range(20):
        launch()
    torch.cuda.synchronize()
    assert_right(inputs, inputs.out, inputs.lse)


@pytest.mark.parametrize("problem", [MHA, GQA, RAGGED], ids=lambda problem: problem.label)
def test_200_repeats_agree_bit_for_bit(problem):
    inputs = make_inputs(problem, "cuda")
    launch = lean().prepare(inputs, CONFIG)
    launch()
    assert_right(inputs, inputs.out, inputs.lse)
    out, lse = inputs.out.clone(), inputs.lse.clone()
    for _ in range(200):
        inputs.poison()
        launch()
        assert torch.equal(inputs.out, out)
        assert torch.equal(inputs.lse, lse)


def compiled_kernels() -> int:
    # triton.runtime.JITFunction keeps a dict of compiled kernels per device.
    return sum(len(caches[0]) for caches in lean().lean_kernel.device_caches.values())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_other_shapes_need_no_compilation(ragged, head_dim):
    """Serving changes batch and context at every step.

    A compilation would stop it for a second.
    """

    def run(batch: int, kv_heads: int, context: int, kv_layout: str) -> None:
        lengths = (context,) * batch if ragged else context
        problem = AttentionProblem(
            batch, 2 * kv_heads, kv_heads, lengths, head_dim, kv_layout=kv_layout
        )
        inputs = make_inputs(problem, "cuda")
        out, lse = attend(inputs, config=CONFIG)
        assert_right(inputs, out, lse)

    before = compiled_kernels()
    run(3, 5, 777, "HND")
    assert compiled_kernels() - before <= 1
    first = compiled_kernels()
    assert first > 0
    for batch, kv_heads, context, kv_layout in [
        (1, 5, 777, "HND"),
        (1, 1, 1, "HND"),
        (1, 1, 4096, "NHD"),
        (16, 1, 4095, "HND"),
        (2, 16, 16, "NHD"),
        (64, 3, 100, "NHD"),
        (1, 40, 20_000, "HND"),
    ]:
        run(batch, kv_heads, context, kv_layout)
        assert compiled_kernels() == first, (
            f"batch {batch}, kv_heads {kv_heads}, context {context}, {kv_layout}"
        )


def test_captures_compile_nothing():
    """A plain call came before; captures can have any counter of replays."""
    inputs = make_inputs(MHA, "cuda")
    attend(inputs, config=CONFIG)
    before = compiled_kernels()
    for _ in range(4):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            attend(inputs, config=CONFIG)
        assert compiled_kernels() == before


@contextmanager
def synchronisation_raises() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("problem", [MHA, GQA, RAGGED], ids=lambda problem: problem.label)
def test_a_call_does_not_wait_for_the_gpu(problem):
    inputs = make_inputs(problem, "cuda")
    attend(inputs)
    # The check can fail: reading a number from the GPU synchronizes.
    with pytest.raises(RuntimeError, match="synchron"), synchronisation_raises():
        inputs.q[0, 0, 0, 0].item()
    with synchronisation_raises():
        out, lse = attend(inputs)
        shorter = attend(inputs, cache_seqlens=1)
    assert_right(inputs, out, lse)
    assert_right(replace(inputs, cache_seqlens=None, context=1), *shorter)


def test_a_warm_cache_is_faster_than_a_cold_one_and_says_so():
    """12.6 MB of K and V fit the L2 of any supported GPU; rotating buffers do not."""
    problem = AttentionProblem(1, 32, 8, 3072, 128)
    by_cache = {}
    for cache in ("cold", "warm"):
        instruments = open_instruments(0, MeasureOptions(cache=cache))
        rows = measure_problem(attention_on(instruments, problem), [kernel("fa2"), kernel("lean")])
        assert {row["cache"] for row in rows.values()} == {cache}
        assert {row["status"] for row in rows.values()} <= {"ok", "noisy"}, rows
        by_cache[cache] = rows
    # fa2 has 8 CTAs, limited by latency and not by bandwidth.
    for name, most in (("fa2", 1.02), ("lean", 1.0)):
        assert by_cache["warm"][name]["latency_us"] < most * by_cache["cold"][name]["latency_us"]


def test_two_methods_agree_on_a_latency_and_the_floor_is_below_it():
    problem = AttentionProblem(1, 56, 56, 16384, 64)
    rows = measure_problem(
        attention_on(open_instruments(0), problem),
        [kernel(name) for name in ("lean", "fa2", "fixed_split")],
    )
    for name, row in rows.items():
        assert "crosscheck_us" in row, (name, row.get("reason"), row.get("warnings"))
        assert row["crosscheck_us"] == pytest.approx(row["latency_us"], rel=0.03, abs=1.0)
        assert row["crosscheck_clock_mhz"] == pytest.approx(row["sm_clock_mhz"], rel=0.05)
        assert row["read_floor_us"] < 1.03 * row["latency_us"]
        raw = row["raw_samples"]
        assert statistics.median(raw["samples_us"]) == pytest.approx(row["latency_us"], abs=1e-3)
        assert len(raw["rounds"]) == len(raw["sm_clock_mhz"]) == row["samples"]


def test_a_problem_is_as_fast_after_another_one_as_first():
    """A single use of CUPTI slows down all later replays of a process."""
    instruments, problem = open_instruments(0), AttentionProblem(1, 32, 8, 1024, 128)
    kernels = [kernel(name) for name in ("lean", "torch_flash")]
    first, second = (measure_problem(attention_on(instruments, problem), kernels) for _ in range(2))
    for name in first:
        assert second[name]["latency_us"] == pytest.approx(first[name]["latency_us"], abs=0.25)
        assert second[name]["crosscheck_us"] == pytest.approx(second[name]["latency_us"], abs=0.4)
    assert [len(second[name]["gpu_kernels"]) for name in ("lean", "torch_flash")] == [1, 2]


@pytest.mark.parametrize("problem", [MHA, GQA, RAGGED], ids=lambda problem: problem.label)
def test_a_fingerprint_follows_every_element_of_the_inputs(problem):
    inputs = make_inputs(problem, "cuda")
    before = fingerprint(inputs)

    def is_same() -> bool:
        return all(
            torch.equal(recorded, now)
            for recorded, now in zip(before, fingerprint(inputs), strict=True)
        )

    assert is_same()
    tensors = [inputs.q, inputs.k_cache, inputs.v_cache]
    tensors += [] if inputs.cache_seqlens is None else [inputs.cache_seqlens]
    for tensor in tensors:
        places = [
            (0,) * tensor.dim(),
            tuple(size - 1 for size in tensor.shape),
            tuple(n // 2 for n in tensor.shape),
        ]
        for place in places:
            value = tensor[place].clone()
            tensor[place] += 1
            assert not is_same(), (tensor.shape, place)
            tensor[place] = value
            assert is_same()
