"""`lean_attn_with_kvcache` on a GPU: dependencies of its bits, CUDA graphs, torch.compile and timed
settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_calls import assert_right, attend, captured, differing
from leanbench.kernels.lean import LEAN
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.attention import fast, lean_attn_with_kvcache, prepared
from leanbench.attention.prepared import PreparedLaunches
from leanbench.configs import store
from leanbench.configs.signature import signature_of
from leanbench.configs.store import TimedCall
from leanbench.core.config import KernelConfig
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device

# The thread method ends the process, because a kernel that never ends cannot be interrupted.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

#: Batch-invariant runs have 1024 tokens.
PROBLEMS = {
    "uniform": AttentionProblem(3, 8, 2, 2500, 128),
    "ragged": AttentionProblem(5, 8, 2, (5000, 1, 1024, 1025, 3000), 64, "bf16", "NHD"),
    "paged": AttentionProblem(4, 8, 8, (3000, 20, 2048, 2049), 80, page_size=16),
    "paged drafts": AttentionProblem(3, 8, 1, (1026, 2, 4000), 128, "bf16", q_len=3, page_size=64),
    "many rows": AttentionProblem(2, 71, 1, (20_000, 1500), 128),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
implementations = pytest.mark.parametrize("name", ["lean_cuda", "lean_triton"])


def lean() -> ModuleType:
    return importlib.import_module("leanbench.kernels.lean.triton")


def workspaces() -> Any:
    return importlib.import_module("leanbench.kernels.lean.workspace").WORKSPACES


def spec() -> GpuSpec:
    return spec_of_device(0)


def fixed_runs_of(name: str, problem: AttentionProblem) -> KernelConfig:
    """Return the config of `batch_invariant` for an implementation; skip if it cannot run."""
    reason = kernel(name).unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    config = kernel(name).batch_invariant_config(problem, spec())
    assert config is not None
    assert config.fixed_run_tiles is not None
    return config


def assert_taken(inputs: AttentionInputs, config: KernelConfig) -> None:
    """Check that the config's implementation runs, and no replacement."""
    if config.implementation == "cuda":
        assert importlib.import_module("leanbench.kernels.lean.cuda").refusal(inputs) is None


def caller(
    config: KernelConfig | None, batch_invariant: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def call(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        if config is not None:
            assert_taken(inputs, config)
        lengths = inputs.context if inputs.cache_seqlens is None else inputs.cache_seqlens
        return attend(inputs, cache_seqlens=lengths, config=config, batch_invariant=batch_invariant)

    return call


@problems
@implementations
def test_bits_of_a_batch_invariant_call_do_not_depend_on_the_surroundings(name, problem):
    inputs = make_inputs(problem, "cuda")
    call = caller(fixed_runs_of(name, problem), batch_invariant=True)
    assert differing(inputs, call) == []
    out, lse = call(inputs)
    for _ in range(50):
        assert all(torch.equal(*both) for both in zip(call(inputs), (out, lse), strict=True))


@implementations
def test_bits_of_equal_shares_do(name):
    """Otherwise the test above could not fail.

    With 40 KV heads, every CTA has several LeanTiles, and fewer in a smaller batch.
    """
    problem = AttentionProblem(4, 40, 40, 2000, 64)
    fixed_runs_of(name, problem)
    config = kernel(name).default_config(problem, spec())
    assert config is not None
    config = replace(config, align_grid=False, min_tiles_per_cta=1)
    assert "alone" in differing(make_inputs(problem, "cuda"), caller(config, batch_invariant=False))


@pytest.mark.parametrize(
    "problem", [PROBLEMS["uniform"], PROBLEMS["ragged"]], ids=["uniform", "ragged"]
)
def test_bits_do_not_depend_on_the_sms(problem):
    triton_config, inputs = fixed_runs_of("lean_triton", problem), make_inputs(problem, "cuda")
    prepared = [lean().prepare(inputs, triton_config, sms=sms) for sms in (7, 132)]
    cuda = importlib.import_module("leanbench.kernels.lean.cuda")
    if kernel("lean_cuda").unavailable_reason() is None:
        cuda_config = fixed_runs_of("lean_cuda", problem)
        prepared += [cuda.launch_of(inputs, cuda_config, sms=sms).run() for sms in (7, 132)]
    outputs = []
    for launch in prepared:
        inputs.poison()
        launch()
        assert_right(inputs, inputs.out, inputs.lse)
        outputs.append((inputs.out.clone(), inputs.lse.clone()))
    for few, many in zip(outputs[::2], outputs[1::2], strict=True):
        assert all(torch.equal(*both) for both in zip(few, many, strict=True))


@pytest.mark.parametrize(
    "field", [{"min_tiles_per_cta": 4}, {"align_grid": True}], ids=["min_tiles", "align"]
)
@implementations
def test_what_equal_shares_are_told_changes_nothing_in_fixed_runs(name, field):
    problem = PROBLEMS["ragged"]
    inputs, config = make_inputs(problem, "cuda"), fixed_runs_of(name, problem)
    expected = caller(config, batch_invariant=True)(inputs)
    result = caller(replace(config, **field), batch_invariant=True)(inputs)
    assert_right(inputs, *result)
    assert all(torch.equal(*both) for both in zip(result, expected, strict=True))


@problems
def test_batch_invariant_takes_the_implementation_of_this_gpu(problem):
    inputs = make_inputs(problem, "cuda")
    on_cuda = (
        torch.cuda.get_device_capability() == (9, 0)
        and kernel("lean_cuda").unavailable_reason() is None
    )
    config = fixed_runs_of("lean_cuda" if on_cuda else "lean_triton", problem)
    expected = caller(config, batch_invariant=True)(inputs)
    result = caller(None, batch_invariant=True)(inputs)
    assert all(torch.equal(*both) for both in zip(result, expected, strict=True))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["equal shares", "batch invariant"])
@pytest.mark.parametrize("which", ["ragged", "paged", "paged drafts"])
def test_a_captured_call_follows_lengths_and_pages_that_change(which, batch_invariant):
    inputs, call = make_inputs(PROBLEMS[which], "cuda"), caller(None, batch_invariant)
    assert inputs.cache_seqlens is not None
    graph, out, lse = captured(lambda: call(inputs), torch.cuda.Stream())
    batch = inputs.q.shape[0]
    chosen = [
        PROBLEMS[which].contexts,
        (1,) * batch,
        (inputs.context,) * batch,
        (0, *range(1023, 1022 + batch)),
    ]
    outputs = []
    for lengths in chosen:
        inputs.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        if inputs.block_table is not None:
            pages = torch.randint_like(inputs.block_table, inputs.k_cache.shape[0])
            inputs.block_table.copy_(pages)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(inputs, out, lse)
        eager, eager_lse = call(inputs)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
        outputs.append(out.clone())
    assert not any(torch.equal(earlier, later) for earlier, later in pairwise(outputs))


@pytest.mark.parametrize("length", [0, 1, 129, 300, 4000])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 8), (3, 8), (8, 8), (40, 8)])
def test_equal_lengths_on_the_device(batch, kv_heads, length):
    """Output tiles are whole, split equally, or more than the CTAs."""
    problem = AttentionProblem(batch, 4 * kv_heads, kv_heads, (4096,) * (batch - 1) + (4095,), 128)
    inputs = make_inputs(problem, "cuda")
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens.fill_(length)
    assert_right(inputs, *attend(inputs))


def test_a_graph_outlives_a_larger_workspace_of_its_stream(monkeypatch):
    """Workspaces are those of a new process. The second call is the first to need a larger one."""
    monkeypatch.setattr(workspaces(), "of_streams", {})
    stream, call = torch.cuda.Stream(), caller(None, batch_invariant=True)
    small = make_inputs(PROBLEMS["ragged"], "cuda")
    graph, out, lse = captured(lambda: call(small), stream)
    before = workspaces().of_streams[small.q.device, stream.cuda_stream]
    # Capacity for 40 runs of each of 32 output tiles, 16 rows each: at least 10 MB of partials.
    large = make_inputs(
        AttentionProblem(8, 64, 4, (1500, 3, 1024, 1, 2, 700, 2500, 64), 128, page_size=64), "cuda"
    )
    assert large.block_table is not None
    table = torch.nn.functional.pad(large.block_table, (0, 640 - large.block_table.shape[1]))
    large = replace(large, block_table=table.contiguous(), context=640 * 64)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert_right(large, *call(large))
    torch.cuda.synchronize()
    after = workspaces().of_streams[small.q.device, stream.cuda_stream]
    assert after.numel() > before.numel()
    graph.replay()
    torch.cuda.synchronize()
    assert_right(small, out, lse)
    eager, eager_lse = call(small)
    assert torch.equal(out, eager)
    assert torch.equal(lse, eager_lse)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["equal shares", "batch invariant"])
def test_a_call_compiles_whole(batch_invariant, mode):
    torch._dynamo.reset()
    inputs = make_inputs(PROBLEMS["paged drafts"], "cuda")
    assert inputs.cache_seqlens is not None

    def double(q, k_cache, v_cache, lengths, table) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = lean_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=lengths,
            causal=True,
            return_softmax_lse=True,
            block_table=table,
            batch_invariant=batch_invariant,
        )
        return out * 2, lse

    compiled = torch.compile(double, fullgraph=True, mode=mode)
    call = caller(None, batch_invariant)
    for lengths in [(1026, 2, 4000), (4000, 1, 17), (0, 1025, 3), (4000, 4000, 4000)]:
        inputs.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        arguments = (
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.cache_seqlens,
            inputs.block_table,
        )
        out, lse = compiled(*arguments)
        out = out.clone()
        lse = lse.clone()
        assert_right(inputs, out / 2, lse)
        eager, eager_lse = call(inputs)
        assert torch.equal(out, eager * 2)
        assert torch.equal(lse, eager_lse)


@pytest.mark.parametrize("chosen", ["triton", "cuda"])
def test_timed_settings_run_and_batch_invariant_ones_before_them(chosen, tmp_path, monkeypatch):
    problem = AttentionProblem(2, 32, 8, 4096, 128)
    heuristic = kernel("lean").default_config(problem, spec())
    assert heuristic is not None
    tuned_config = LeanTritonConfig(128, 8, 3, 1, 1, True)
    if chosen == "cuda":
        reason = kernel("lean_cuda").unavailable_reason()
        if reason is not None:
            pytest.skip(reason)
        own = kernel("lean_cuda").default_config(problem, spec())
        assert own is not None
        tuned_config = replace(own, num_stages=1, cluster_size=1)
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LEANBENCH_CONFIGS")
    costs = {heuristic: 2.0, tuned_config: 1.0}
    timed = TimedCall(problem, signature_of(problem), "latency", "2026-11-28", {}, costs)
    store.save(spec(), [timed])

    launched: list[KernelConfig] = []
    relaunch = LEAN.relaunch
    monkeypatch.setattr(
        LEAN, "relaunch", lambda inputs, config: launched.append(config) or relaunch(inputs, config)
    )
    inputs = make_inputs(problem, "cuda")
    assert_taken(inputs, tuned_config)
    assert_right(inputs, *attend(inputs))
    assert_right(inputs, *attend(inputs, batch_invariant=True))
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    assert_right(inputs, *attend(inputs))
    assert launched == [
        tuned_config,
        kernel("lean").batch_invariant_config(problem, spec()),
        heuristic,
    ]


def prepared_launches(monkeypatch: pytest.MonkeyPatch) -> list[KernelConfig]:
    """Return the settings for which launches are prepared from now on."""
    launches: list[KernelConfig] = []
    relaunch = LEAN.relaunch
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())
    fast.clear()
    monkeypatch.setattr(
        LEAN, "relaunch", lambda inputs, config: launches.append(config) or relaunch(inputs, config)
    )
    return launches


@problems
def test_other_tensors_of_the_same_shapes_are_launched_as_before(problem, monkeypatch):
    """This includes tensor maps."""
    launches = prepared_launches(monkeypatch)
    several = [make_inputs(problem, "cuda") for _ in range(3)]
    outputs = [attend(inputs) for inputs in [*several, *several[::-1]]]
    for inputs, results in zip([*several, *several[::-1]], outputs, strict=True):
        assert_right(inputs, *results)
    assert len(launches) == 1


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("extras", [{}, {"window_size": (99, -1), "softcap": 30.0}], ids=str)
def test_a_cache_that_grows_finds_its_launch_prepared(kv_heads, extras, monkeypatch):
    """Caches come from torch.cat, with other strides and tensor maps in every step."""
    launches = prepared_launches(monkeypatch)
    problem = AttentionProblem(2, 16, kv_heads, 1930, 128)
    for tokens in range(1930, 2060):
        inputs = make_inputs(replace(problem, context=tokens), "cuda")
        out, lse = attend(inputs, **extras)
        own = {"window_left": 99, "softcap": 30.0} if extras else {}
        assert_right(replace(inputs, **own), out, lse)
    # Lengths around 1984 and 2048, and these two, have settings of their own.
    assert 0 < len(launches) == len(set(launches)) <= 5


def test_a_sequence_that_grows_past_a_fixed_runs_length():
    """At 2,064 tokens of 8 KV heads, fixed runs of 128 tokens become 256."""
    inputs = make_inputs(AttentionProblem(2, 32, 8, 2200, 128), "cuda")
    for length in (*range(2050, 2080), 2063):
        out, lse = attend(inputs, cache_seqlens=length, batch_invariant=True)
        assert_right(replace(inputs, context=length), out, lse)


def test_threads_on_streams_of_their_own():
    several = [make_inputs(problem, "cuda") for problem in PROBLEMS.values()]
    expected = [attend(inputs) for inputs in several]
    torch.cuda.synchronize()

    def repeat(turn: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [attend(inputs) for _ in range(50) for inputs in several]
            torch.cuda.current_stream().synchronize()
        pairs = zip(results, expected * 50, strict=True)
        return all(torch.equal(*both) for pair in pairs for both in zip(*pair, strict=True))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, range(4)))
