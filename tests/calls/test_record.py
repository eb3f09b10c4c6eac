"""LEANBENCH_RECORD: the signatures that a process calls, for `leanbench tune --calls`."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attention_calls import assert_right
from every_kind import KINDS, PLAIN, called, latent_called, launch_nothing
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.attention import record
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.tune.calls import read_calls

EAGER = AttentionProblem(2, 4, 2, 128, 64, "fp16", "NHD")
SERVED = AttentionProblem(
    *(2, 4, 2, (96, 20), 64, "bf16", "NHD"), page_size=32, kv_dtype="e4m3", capacity=128
)
#: The same call as the host knows it.
SERVED_BOUND = replace(SERVED, context=128, capacity=None, lengths_on="device")


@pytest.fixture(autouse=True)
def _kernel(prepared_for, monkeypatch) -> None:
    """Let `lean` take every call, in a process that has recorded none."""
    monkeypatch.setattr(record, "_written", set())
    # torch without CUDA has no such function.


def call(problem: AttentionProblem, **options: Any) -> None:
    inputs = make_inputs(problem, "cpu")
    out, lse = called(inputs, **{"config": None, "return_softmax_lse": True, **options})
    assert_right(inputs, out, lse)


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv("LEANBENCH_RECORD", str(path))
    return path


def test_a_line_for_each_new_signature(path):
    for _ in range(2):
        for problem in (EAGER, SERVED, replace(EAGER, q_len=2)):
            call(problem)
    # Another launch of a recorded signature.
    called(make_inputs(EAGER, "cpu"), config=None, softmax_scale=0.3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(line) for line in lines] == [{"problem"}] * 3
    expected = [EAGER, SERVED_BOUND, replace(EAGER, q_len=2)]
    assert read_calls(path) == expected
    assert [AttentionProblem.from_dict(line["problem"]) for line in lines] == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"q_len": 2},
        {"context": 191, "kv_dtype": "e4m3"},
        {"lengths_on": "device", "page_size": 64, "context": (128, 70)},
    ],
    ids=["eager", "fp8", "served"],
)
def test_latent_calls_are_recorded(fields, path, monkeypatch):
    launch_nothing(monkeypatch)
    latent = AttentionProblem(2, 16, 1, 128, 576, "bf16", "NHD", latent=True, v_head_dim=512)
    problem = replace(latent, **fields)
    for _ in range(2):
        latent_called(make_inputs(problem, "cpu"))
    assert read_calls(path) == [problem.known_to_host]


def test_lengths_that_share_settings_share_a_line(path):
    for context in (129, 150, 190):
        call(replace(EAGER, context=context))
    call(replace(EAGER, context=192))
    assert [each.context for each in read_calls(path)] == [191, 192]


def test_given_settings_are_not_recorded(path):
    call(EAGER, config=LeanTritonConfig(32, 4, 2, 1, 1, False))
    call(EAGER, batch_invariant=True)
    assert not path.exists()


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "packed" and "append" not in KINDS[kind]]
)
def test_every_kind_is_recorded_as_it_is(kind, path):
    problem = replace(PLAIN, kv_layout="NHD", lengths_on="device", **KINDS[kind])
    call(problem)
    (recorded,) = read_calls(path)
    assert recorded == problem.known_to_host


def test_lengths_are_recorded_on_request(path, monkeypatch):
    monkeypatch.setenv("LEANBENCH_RECORD", f"lengths:{path}")
    call(SERVED)
    call(EAGER)
    # Of the first call of a signature alone.
    call(replace(SERVED, context=(40, 41)))
    recorded = read_calls(path)
    assert [each.contexts for each in recorded] == [(96, 20), (128, 128)]
    assert recorded[1] == EAGER
    inputs = make_inputs(replace(SERVED, batch=3, context=(5, 1, 7)), "cpu")
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens[1] = 0
    called(inputs, config=None)
    assert read_calls(path)[-1].contexts == (5, 1, 7)


def test_recorded_lengths_are_of_the_same_signature(path, monkeypatch):
    monkeypatch.setenv("LEANBENCH_RECORD", f"lengths:{path}")
    call(replace(SERVED, capacity=2048))
    (recorded,) = read_calls(path)
    assert recorded == replace(SERVED, capacity=2048)


@pytest.mark.parametrize("form", ["{}", "lengths:{}"])
@pytest.mark.parametrize("problem", [EAGER, SERVED], ids=["eager", "served"])
def test_a_path_that_cannot_be_written_warns_once_and_the_call_runs(
    form, problem, tmp_path, monkeypatch
):
    path = tmp_path / "none" / "calls.jsonl"
    monkeypatch.setenv("LEANBENCH_RECORD", form.format(path))
    with pytest.warns(UserWarning, match=r"^LEANBENCH_RECORD: cannot write .*none/calls.jsonl \("):
        call(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(problem)


@pytest.mark.parametrize("value", ["", "lengths:"])
def test_without_a_path_nothing_is_recorded(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEANBENCH_RECORD", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(EAGER)
        call(SERVED)
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_lengths_does_not_wait_for_the_device(path, monkeypatch):
    def fail(self: AttentionInputs) -> None:
        raise AssertionError("lengths were read")

    inputs = make_inputs(SERVED, "cpu")
    monkeypatch.setattr(AttentionInputs, "read_lengths", fail)
    record.record(inputs, SERVED_BOUND)
    assert read_calls(path) == [SERVED_BOUND]
    monkeypatch.setenv("LEANBENCH_RECORD", f"lengths:{path}")
    other = replace(SERVED_BOUND, context=256)
    with pytest.raises(AssertionError, match="lengths were read"):
        record.record(inputs, other)
    # Nor under capture, where nothing can be read.
    monkeypatch.setattr(record, "_written", set())
    monkeypatch.setattr(record, "is_captured", lambda inputs: True)
    record.record(inputs, other)
    assert read_calls(path) == [SERVED_BOUND, other]


def test_a_pipe_that_nobody_reads_does_not_wait(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("LEANBENCH_RECORD", str(pipe))
    with pytest.warns(UserWarning, match="cannot write"):
        record.record(make_inputs(SERVED, "cpu"), SERVED_BOUND)
