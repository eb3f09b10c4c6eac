"""Kernels that cheat get no figure that counts.

The table of cheats in docs/measuring.md follows these tests.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cheats
import pytest
import torch
from leanbench.kernels.reference.torch import attend, keys_and_values
from pretended_gpu import PROBLEM, PretendedGpu, Right, measure

from leanbench.core.errors import SuspectResult, Tampered
from leanbench.core.inputs import make_inputs, make_windows
from leanbench.core.problem import AttentionProblem
from leanbench.measure import buffers, one_gpu
from leanbench.measure.buffers import change_tokens, flip_signs
from leanbench.measure.crosscheck import CrossCheck
from leanbench.measure.instruments import open_instruments
from leanbench.measure.one_gpu import OneGpu
from leanbench.measure.protocol import measure_problem
from leanbench.measure.tampering import replaced_functions

#: Ragged, so that lengths are on the device.
RAGGED = replace(PROBLEM, context=(100, 90))


def caught(gpu: PretendedGpu, cheat: Right, problem: AttentionProblem = PROBLEM) -> tuple[str, str]:
    """Measure a cheat between two right kernels. Return its status and the reason."""
    instruments = open_instruments(0, announce=gpu.announce)
    kernels = [Right("a"), cheat, Right("b")]
    try:
        rows = measure_problem(OneGpu(instruments, problem), kernels)
    except SuspectResult as alarm:
        return "suspect", str(alarm)
    assert rows["a"]["status"] == rows["b"]["status"] == "ok"
    return rows[cheat.name]["status"], rows[cheat.name]["reason"]


OTHER_VALUES = r"^after timing, over other K and V, relative error .* is above 2e-03$"
CHANGED = r"^(a, )?cheat(, b)? changed its inputs"
UNWRITTEN = r"^\d of 3 outputs were not written when the CUDA graph was replayed"


@pytest.mark.parametrize(
    ("cheat", "problem", "status", "reason"),
    [
        (cheats.KeepsResults, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.LooksForChanges, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.LeavesResults, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.OtherStream, PROBLEM, "suspect", UNWRITTEN),
        (cheats.LessWhenCaptured, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.ReadsLess, PROBLEM, "incorrect", r"^relative error .* is above 2e-03$"),
        (cheats.ReadsLessElsewhere, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.SameAnswer, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.ShortensOthers, RAGGED, "suspect", CHANGED),
        (cheats.ChangesInputs, PROBLEM, "suspect", CHANGED),
        (cheats.ZerosElsewhere, PROBLEM, "incorrect", OTHER_VALUES),
        (cheats.OneBehind, PROBLEM, "incorrect", r"^relative error inf"),
        (cheats.AnswersWhenRead, PROBLEM, "suspect", UNWRITTEN),
        (cheats.ReturnsLaterTensors, PROBLEM, "suspect", r"^cheat returns LaterTensor, not torch"),
    ],
)
def test_a_cheat_is_caught(gpu, cheat, problem, status, reason):
    found = caught(gpu, cheat("cheat"), problem)
    assert found[0] == status, found
    assert re.match(reason, found[1]), found


def test_zeros_are_seen_in_every_head_of_every_buffer(gpu, monkeypatch):
    """Nobody compares the values of the last buffer here."""
    monkeypatch.setattr(one_gpu, "_WATCHED", 1)
    status, reason = caught(gpu, cheats.ZeroHead("cheat"))
    assert (status, reason) == (
        "incorrect",
        "after timing, over other K and V, 1 of 3 outputs have rows of zeros",
    )
    # A sink can take all the weight, and the output of a query that sees no token is zero.
    for problem in (replace(PROBLEM, sinks=True), replace(RAGGED, q_len=91)):
        assert not one_gpu._never_zero(problem)
    assert one_gpu._never_zero(replace(RAGGED, q_len=90))


def test_watched_buffers_cannot_be_foreseen(gpu):
    """Draw seven of many buffers, never by the generators that a kernel can seed."""
    import random

    small = AttentionProblem(1, 1, 1, 16, 64)
    drawn = set()
    for _ in range(3):
        random.seed(0)
        torch.manual_seed(0)
        subject = OneGpu(open_instruments(0, announce=gpu.announce), small)
        with subject:
            assert len(subject.buffers) == 74
            assert subject.watched[0] == 0
            drawn.add(frozenset(subject.watched))
    assert len(drawn) == 3
    assert {len(watched) for watched in drawn} == {8}


def half(self: Any, end: Any) -> float:
    return 0.5


def nothing(self: Any) -> None:
    return None


@pytest.mark.parametrize("when", ["prepare", "capture", "extras"])
@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (torch.cuda.Event, "elapsed_time", half, "torch.cuda.Event.elapsed_time"),
        (torch.cuda.Event, "record", nothing, "torch.cuda.Event.record"),
        (torch.cuda.CUDAGraph, "replay", nothing, "torch.cuda.CUDAGraph.replay"),
        (time, "perf_counter", lambda: 0.0, "time.perf_counter"),
    ],
)
def test_a_patched_clock_is_an_alarm(gpu, monkeypatch, when, owner, name, value, words):
    def patch() -> None:
        monkeypatch.setattr(owner, name, value)

    status, reason = caught(gpu, cheats.Tampers("cheat", patch, when))
    who = "a, cheat, b" if when == "extras" else "cheat"
    assert (status, reason) == (
        "suspect",
        f"{who} replaced {words}, which times and replays launches",
    )
    assert gpu.announced[-1] == (None if when == "extras" else "cheat")


def test_no_function_is_replaced_here():
    assert replaced_functions() == []


@pytest.mark.parametrize("when", ["prepare", "capture", "extras"])
def test_a_part_of_the_l2_that_persists_is_an_alarm(gpu, when):
    def set_aside() -> None:
        gpu.persisting_l2_bytes = 30 << 20

    status, reason = caught(gpu, cheats.Tampers("cheat", set_aside, when))
    assert status == "suspect"
    assert "cheat" in reason
    assert "set 31.5 MB of the L2 aside for data that persists (0.0 MB before)" in reason
    # What was set before this process is nobody's.
    assert caught(gpu, Right("honest"))[0] == "ok"


def test_the_next_kernel_gets_a_new_process(gpu):
    """A patch would stay, and be blamed on kernels that are right."""
    instruments = open_instruments(0, announce=gpu.announce)
    gpu.persisting_l2_bytes = 1 << 20
    with pytest.raises(Tampered, match=r"^a set 1\.0 MB"):
        measure_problem(OneGpu(instruments, PROBLEM), [Right("a")])


@pytest.mark.parametrize(("by_clock_us", "status"), [(16.0, "ok"), (16.1, "suspect")])
def test_events_that_the_gpus_clock_contradicts_are_an_alarm(gpu, by_clock_us, status):
    """A patch that no look at the functions finds makes launches look faster than they are."""
    gpu.crosschecks = {"cheat": CrossCheck((by_clock_us,), ("cheat",))}
    fields = measure(gpu, Right("cheat"))["cheat"]
    assert fields["status"] == status
    if status == "suspect":
        assert fields["reason"].startswith("launches take 16.10 µs by the GPU's own clock, and at ")


def test_less_time_than_reading_takes_is_an_alarm(gpu):
    """A part of K and V from the L2, or not read at all."""
    gpu.floor_us = gpu.best_floor_us = 11.0
    assert measure(gpu, Right("cheat"))["cheat"]["status"] == "suspect"


def test_a_look_at_64_numbers_shows_no_change(gpu, monkeypatch):
    """They would have to hold one token of 4,096 in each of four buffers."""
    problem = AttentionProblem(1, 1, 1, 4096, 64)
    monkeypatch.setattr(buffers, "COLD_BYTES", 4 * problem.kv_bytes)
    status, reason = caught(gpu, cheats.LooksAtMore("cheat"), problem)
    assert (status, len(gpu.made)) == ("incorrect", 4)
    assert re.match(OTHER_VALUES, reason), reason


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda problem: [make_inputs(problem, "cpu", 1)],
        # Windows that share memory are negated once.
        lambda problem: make_windows(replace(problem, capacity=2048), "cpu", 3, 1),
        lambda problem: [make_inputs(replace(problem, page_size=16), "cpu", 1)],
        lambda problem: [make_inputs(replace(problem, kv_dtype="e4m3"), "cpu", 1)],
        lambda problem: [make_inputs(replace(problem, kv_layout="NHD"), "cpu", 1)],
    ],
)
def test_all_of_k_and_v_changes(dtype: str, make: Callable[[Any], list[Any]]):
    buffers = make(replace(PROBLEM, dtype=dtype))
    before = [(buffer.k_cache.double(), buffer.v_cache.double()) for buffer in buffers]
    flip_signs(buffers)
    for buffer, (k, v) in zip(buffers, before, strict=True):
        assert torch.equal(buffer.k_cache.double(), -k)
        assert torch.equal(buffer.v_cache.double(), -v)
    flip_signs(buffers)
    assert torch.equal(buffers[0].k_cache.double(), before[0][0])


LATENT = AttentionProblem(1, 16, 1, 256, 576, "bf16", latent=True, v_head_dim=512)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.int8 if cache.element_size() == 1 else torch.int16).clone()


@pytest.mark.parametrize(
    ("problem", "most"),
    [
        (PROBLEM, 1),
        (replace(PROBLEM, dtype="bf16", kv_layout="NHD"), 1),
        (replace(PROBLEM, page_size=16), 1),
        (replace(PROBLEM, kv_dtype="e4m3", scaled=True), 1),
        (replace(PROBLEM, context=1000, window_left=9), 1023),
        (LATENT, 1),
        (replace(LATENT, page_size=64, kv_dtype="e4m3", scaled=True, row_scales=True), 1),
    ],
)
def test_few_tokens_change_and_the_output_with_them(problem: AttentionProblem, most: int):
    """Nobody can foresee which, and K and V change alike."""
    pair, limit = (problem.batch - 1, problem.kv_heads - 1), 3e-2
    drawn = set()
    for _ in range(4):
        torch.manual_seed(0)
        inputs = make_inputs(problem, "cpu", 1)
        caches = (inputs.k_cache,) if inputs.latent else (inputs.k_cache, inputs.v_cache)
        before = [as_bits(cache) for cache in caches]
        k, v = keys_and_values(inputs, *pair)
        stale, _ = attend(inputs, *pair)
        change_tokens(inputs, [pair], limit)
        new_k, new_v = keys_and_values(inputs, *pair)
        tokens = (new_k != k).any(1).nonzero().flatten().tolist()
        assert 1 <= len(tokens) <= most
        for old, new in ((k, new_k), (v, new_v)):
            assert new[tokens].equal(-old[tokens])
        for bits, cache in zip(before, caches, strict=True):
            rows = (as_bits(cache) != bits).any(-1)
            assert int(rows.sum()) == len(tokens)
        out, _ = attend(inputs, *pair)
        assert (out - stale).norm() > limit * out.norm()
        drawn.add(tuple(tokens))
    assert len(drawn) > 1
