"""Launches under adverse conditions: garbage in the workspace, few free SMs, many concurrent
launches, invalid lengths and extreme scores.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import assert_right, attend, captured
from hostile_inputs import (
    EQUAL_SCORES,
    assert_hidden,
    assert_nan_of_kv_head_0,
    equal_scores,
    inf_in_last_token,
    nan_in_k,
    steep_scores,
    very_low_scores,
    wild_lengths,
)
from leanbench.kernels.lean.configs import LeanCudaConfig, LeanTritonConfig
from spinner import spinning

from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device

# The thread method ends the process, because a kernel that never ends cannot be interrupted. With
# pytest -n the other tests continue in another process.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60, method="thread")]

PROBLEMS = {
    "many parts": AttentionProblem(1, 8, 1, 20_000, 128),
    "clusters": AttentionProblem(1, 32, 8, 4096, 128),
    "many tiles": AttentionProblem(2, 24, 24, 3000, 64, "bf16"),
    "ragged": AttentionProblem(4, 32, 8, (9000, 16, 1, 2500), 128),
    "pages": AttentionProblem(3, 16, 4, (4000, 129, 1500), 64, page_size=64),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
#: Implementations and settings of `calls`.
WAYS = ("cuda", "cuda, stream-K", "cuda, any length", "cuda, batch invariant", "triton")
ways = pytest.mark.parametrize("way", WAYS)


def config_of(way: str, problem: AttentionProblem) -> Any:
    """Return launch settings; skip if the implementation cannot run."""
    name = "lean_triton" if way == "triton" else "lean_cuda"
    reason = kernel(name).unavailable_reason() or kernel(name).unsupported_reason(problem)
    if reason is not None:
        pytest.skip(reason)
    spec = spec_of_device(0)
    if way == "cuda, any length":
        return kernel(name).any_length_config(problem, spec)
    if way == "cuda, batch invariant":
        return kernel(name).batch_invariant_config(problem, spec)
    config = kernel(name).default_config(problem, spec)
    if way == "cuda, stream-K":
        # The heuristic chooses clusters, or splits of output tiles, for most.
        return replace(config, cluster_size=1, align_grid=False, min_tiles_per_cta=1)
    return config


def problem_of(inputs: AttentionInputs) -> AttentionProblem:
    """Return the problem of these inputs; its lengths may be in a tensor."""
    return importlib.import_module("leanbench.kernels.launch").problem_of(inputs)


def call_of(way: str, inputs: AttentionInputs) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    config = config_of(way, problem_of(inputs))
    lengths = inputs.context if inputs.cache_seqlens is None else inputs.cache_seqlens
    invariant = config.fixed_run_tiles > 0
    return lambda: attend(inputs, cache_seqlens=lengths, config=config, batch_invariant=invariant)


def slots_of(device: torch.device) -> torch.Tensor:
    """Return the workspace of the current stream."""
    workspaces = importlib.import_module("leanbench.kernels.lean.workspace").WORKSPACES
    return workspaces.lend(device, 8).slots


def poison(results: list[torch.Tensor]) -> None:
    for result in results:
        result.fill_(math.nan)


@problems
@ways
def test_a_launch_is_right_whatever_the_workspace_holds(way, problem):
    inputs = make_inputs(problem, "cuda")
    call = call_of(way, inputs)
    expected = call()
    assert_right(inputs, *expected)
    slots = slots_of(inputs.q.device)
    left = slots.clone()
    for garbage in (
        torch.full_like(slots, -1),
        torch.zeros_like(slots),
        torch.randint_like(slots, -(2**62), 2**62),
        left,
        left.roll(2 * 997),
    ):
        slots.copy_(garbage)
        for _ in range(2):
            assert all(torch.equal(*both) for both in zip(call(), expected, strict=True))


@problems
@ways
def test_a_graph_is_right_whatever_its_slots_hold(way, problem, monkeypatch):
    """Leftovers include those of an interrupted replay: every number has a replay's epoch."""
    inputs = make_inputs(problem, "cuda")
    call = call_of(way, inputs)
    expected = call()
    workspaces = importlib.import_module("leanbench.kernels.lean.workspace").WORKSPACES
    lent, lend = [], workspaces.lend

    def recorded(device: torch.device, slots_bytes: int) -> Any:
        lent.append(lend(device, slots_bytes))
        return lent[-1]

    monkeypatch.setattr(workspaces, "lend", recorded)
    graph, *results = captured(call, torch.cuda.Stream())
    slots = lent[-1].slots
    assert slots.data_ptr() != slots_of(inputs.q.device).data_ptr()
    graph.replay()
    torch.cuda.synchronize()
    left = slots.clone()
    for garbage in (left, left.flip(0), torch.zeros_like(slots), left):
        slots.copy_(garbage)
        poison(results)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*both) for both in zip(results, expected, strict=True))


@ways
def test_two_graphs_of_one_stream_and_an_eager_call_run_at_once(way):
    stream, asides = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(2)]
    inputs = [make_inputs(problem, "cuda") for problem in PROBLEMS.values()]
    calls = [call_of(way, of_problem) for of_problem in inputs]
    graphs = [captured(call, stream) for call in calls[:2]]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    for _ in range(100):
        for _, *results in graphs:
            poison(results)
        torch.cuda.synchronize()
        for aside, (graph, *_) in zip(asides, graphs, strict=True):
            with torch.cuda.stream(aside):
                graph.replay()
        with torch.cuda.stream(stream):
            eager = calls[2]()
        torch.cuda.synchronize()
        for results, wanted in zip(
            [*[written for _, *written in graphs], eager], expected, strict=False
        ):
            assert all(torch.equal(*both) for both in zip(results, wanted, strict=True))


@pytest.mark.parametrize("free_sms", [12, 5, 1])
@ways
def test_launches_end_beside_a_kernel_that_holds_most_sms(way, free_sms):
    """132 and more CTAs that wait for each other run on as few as one SM.

    Clusters wait until the SMs are released.
    """
    calls = {name: make_inputs(problem, "cuda") for name, problem in PROBLEMS.items()}
    prepared = {name: call_of(way, inputs) for name, inputs in calls.items()}
    expected = {name: call() for name, call in prepared.items()}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    launched = torch.cuda.Event()
    with spinning(sms - free_sms):
        results = {name: call() for name, call in prepared.items() if fits(way, calls[name])}
        launched.record()
        launched.synchronize()
    assert results
    for name, result in results.items():
        assert all(torch.equal(*both) for both in zip(result, expected[name], strict=True))


def test_a_grid_ends_one_cta_after_the_other():
    """A waiting CTA finds all others already ended."""
    problem = PROBLEMS["many parts"]
    # 137 KB of shared memory: an SM holds one.
    config = replace(config_of("triton", problem), num_stages=5)
    inputs = make_inputs(problem, "cuda")
    expected = attend(inputs, cache_seqlens=inputs.context, config=config)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    launched = torch.cuda.Event()
    with spinning(sms - 1):
        results = attend(inputs, cache_seqlens=inputs.context, config=config)
        launched.record()
        launched.synchronize()
    assert all(torch.equal(*both) for both in zip(results, expected, strict=True))


@pytest.mark.parametrize("problem", ["many parts", "many tiles", "pages"])
@ways
def test_a_launch_is_right_whatever_was_kept(way, problem):
    """Work ranges that an earlier launch kept, overwritten in part."""
    problem = replace(PROBLEMS[problem], lengths_on="device")
    inputs = make_inputs(problem, "cuda")
    call = call_of(way, inputs)
    expected = call()
    assert_right(inputs, *expected)
    kept = importlib.import_module("leanbench.kernels.lean.workspace").WORKSPACES.kept
    memory = kept[inputs.q.device]
    left, changed = memory.clone(), torch.rand(len(memory), device="cuda") < 0.02
    lines = torch.arange(len(memory), device="cuda") // 32
    for content in (left, left + changed.int(), left.roll(32), left * (lines % 2), left * 0 - 1):
        memory.copy_(content)
        for _ in range(2):
            results = call()
            assert all(torch.equal(*both) for both in zip(results, expected, strict=True))
            poison(list(results))


def fits(way: str, inputs: AttentionInputs) -> bool:
    """Return True if CTAs do not need adjacent SMs of one GPC."""
    config = config_of(way, problem_of(inputs))
    return not isinstance(config, LeanCudaConfig) or config.cluster_size == 1


@ways
def test_100_launches_race(way):
    streams = [torch.cuda.Stream() for _ in range(5)]
    inputs = [make_inputs(problem, "cuda") for problem in PROBLEMS.values()]
    calls = [call_of(way, of_problem) for of_problem in inputs]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    results = []
    for turn in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                which = (i + turn) % len(calls)
                results.append((which, calls[which]()))
    torch.cuda.synchronize()
    for which, result in results:
        assert all(torch.equal(*both) for both in zip(result, expected[which], strict=True))


@pytest.mark.parametrize("page_size", [None, 16])
@ways
def test_lengths_outside_the_cache_are_the_nearest_inside(way, page_size):
    inputs = wild_lengths("cuda", page_size)
    assert_right(inputs, *call_of(way, inputs)())


@ways
def test_finite_scores_below_minus_1e30_are_scores(way):
    inputs = very_low_scores("cuda")
    out, lse = call_of(way, inputs)()
    assert lse.max().item() < -1e31
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("token", [0, 250, 499])
@ways
def test_nan_in_k_shows_in_output_and_lse(way, token):
    inputs = nan_in_k("cuda", token)
    out, lse = call_of(way, inputs)()
    assert_nan_of_kv_head_0(replace(inputs, out=out, lse=lse))


@ways
def test_scores_above_2_to_the_27th(way):
    inputs = steep_scores(AttentionProblem(1, 1, 1, 2048, 64), "cuda")
    config = config_of(way, AttentionProblem(1, 1, 1, 2048, 64))
    out, lse = attend(
        inputs, softmax_scale=math.log(2), config=config, batch_invariant=config.fixed_run_tiles > 0
    )
    assert_right(inputs, out, lse)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("q_len", [1, 2, 4, 20])
@ways
def test_infinities_in_a_token_that_others_do_not_see(way, q_len, cache):
    problem = AttentionProblem(2, 32, 2, 2000, 128, q_len=q_len)
    inputs, expected = inf_in_last_token(problem, "cuda", cache)
    out, lse = call_of(way, inputs)()
    assert_hidden(replace(inputs, out=out, lse=lse), expected, cache)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 2, 4, 20])
@ways
def test_equal_scores_of_any_size(way, q_len, causal):
    problem = AttentionProblem(
        2, 32, 2, (2000, 777), 128, "bf16", q_len=q_len, causal=causal or q_len == 1
    )
    for score in EQUAL_SCORES:
        inputs = equal_scores(problem, "cuda", score)
        config = config_of(way, problem)
        invariant = config.fixed_run_tiles > 0
        result = attend(inputs, causal=causal, config=config, batch_invariant=invariant)
        assert_right(inputs, *result)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e6 / 3])
@pytest.mark.parametrize("q_len", [1, 4, 20])
@ways
def test_any_softmax_scale(way, q_len, scale):
    """fp16 holds no weights above 2^16, which scores rounded apart from the maximum would have."""
    problem = AttentionProblem(2, 32, 2, (2000, 777), 128, q_len=q_len)
    inputs = make_inputs(problem, "cuda")
    if scale > 1:
        inputs = equal_scores(problem, "cuda", 128 * 208.0)
    inputs = replace(inputs, softmax_scale=scale)
    config = config_of(way, problem_of(inputs))
    invariant = config.fixed_run_tiles > 0
    result = attend(inputs, softmax_scale=scale, config=config, batch_invariant=invariant)
    assert_right(inputs, *result)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "tokens", "heads"])
@ways
def test_expanded_caches(way, axis):
    problem = AttentionProblem(4, 32, 8, 1500, 128, kv_layout="NHD")
    inputs = make_inputs(problem, "cuda")
    expanded = []
    for cache in (inputs.k_cache, inputs.v_cache):
        single = cache.narrow(axis, 0, 1)
        expanded.append(single.expand(cache.shape))
    inputs = replace(inputs, k_cache=expanded[0], v_cache=expanded[1])
    assert_right(inputs, *attend(inputs))
    solid = replace(inputs, k_cache=expanded[0].clone(), v_cache=expanded[1].clone())
    assert_right(solid, *call_of(way, solid)())


def test_config_types_of_the_ways():
    """Otherwise all would be the same config."""
    problem = PROBLEMS["many parts"]
    types = [type(config_of(way, problem)) for way in WAYS]
    assert types == [LeanCudaConfig] * 4 + [LeanTritonConfig]
