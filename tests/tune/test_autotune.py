"""`leanbench.autotune()`: calls inside are timed once each, and none outside."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import assert_right, attend
from every_kind import latent_called, launch_nothing, take_every_kind
from fake_watch import FakeWatch
from leanbench.kernels.lean.configs import LeanTritonConfig
from leanbench.kernels.lean.cuda_settings import fill_lengths
from timed_examples import H200, LATENT, LATENT_SERVED, LEAN

import leanbench
from leanbench.attention import prepared
from leanbench.attention.prepared import choices_of
from leanbench.configs.lookup import choose
from leanbench.configs.store import path_for, read, save
from leanbench.core.errors import OutOfMemory
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.tune import autotune as module
from leanbench.tune.search import Request, Tuning, first_candidates

#: Lengths on the host and on the device.
EAGER = AttentionProblem(2, 4, 2, 128, 64, "fp16", "NHD")
SERVED = AttentionProblem(2, 4, 2, (96, 20), 64, page_size=32, kv_layout="NHD")


@pytest.fixture
def watch(home, monkeypatch) -> FakeWatch:
    """Let the last candidate be the fastest, and calls run on the CPU."""
    take_every_kind(monkeypatch)
    fake = FakeWatch(lambda problem, config: 100.0 - fake.timed[-1][1].index(config))

    def tuning(request: Request) -> Tuning:
        watch: Any = fake
        return Tuning(request, watch, {}, lambda calls: save(H200, calls) and None)

    monkeypatch.setattr(Tuning, "of", tuning)
    monkeypatch.setattr(module, "spec_of_device", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return fake


def call(problem: AttentionProblem, **options: Any) -> AttentionInputs:
    """Call the API, and check the results."""
    inputs = make_inputs(problem, "cpu")
    assert_right(inputs, *attend(inputs, **options))
    return inputs


def test_calls_inside_are_timed_and_used_from_then_on(watch):
    # Calls before do not matter.
    call(EAGER)
    assert watch.timed == []
    with leanbench.autotune(candidates=3):
        assert prepared._LAUNCHES.on_signature is not None
        call(EAGER)
        call(SERVED)
    assert prepared._LAUNCHES.on_signature is None
    problems = [problem for problem, _ in watch.timed]
    # The call on the host, and the fills of a cache: all long, all short, and one of each.
    assert [problem.contexts for problem in problems] == [
        (128, 128),
        *((96, 96), (6, 6), (96, 6), (96, 10)),
    ]
    assert {len(configs) for _, configs in watch.timed} == {3}
    assert [each.problem for each in read(path_for(H200)).calls()] == problems
    for problem in (EAGER, SERVED):
        choice = choose(LEAN, problem, H200)
        assert (choice.how, choice.config) == (
            "tuned",
            first_candidates(problem, H200, 3)[-1],
        )
    # Not outside.
    call(replace(EAGER, batch=3))
    assert len(watch.timed) == 5


def test_latent_calls_are_timed_and_used_from_then_on(watch, monkeypatch):
    launched = launch_nothing(monkeypatch)
    eager, served = LATENT, replace(LATENT_SERVED, context=128)
    with leanbench.autotune(candidates=3):
        for problem in (eager, served):
            latent_called(make_inputs(problem, "cpu"))
    problems = [problem for problem, _ in watch.timed]
    assert [problem.lengths_on for problem in problems] == ["host", *["device"] * 4]
    # One of the lengths that share settings.
    assert problems[0] == replace(eager, context=447)
    everything = [first_candidates(problem, H200, None) for problem in problems[:2]]
    assert [len(configs) for _, configs in watch.timed] == [14, *[len(everything[1])] * 4]
    assert launched == [configs[-1] for configs in everything]
    chosen: list[AttentionProblem] = []

    def counting(inputs: Any, problem: AttentionProblem, batch_invariant: bool) -> Any:
        chosen.append(problem)
        return choices_of(inputs, problem, batch_invariant)

    monkeypatch.setattr(prepared, "choices_of", counting)
    for _ in range(3):
        for problem in (eager, served):
            latent_called(make_inputs(problem, "cpu"))
    assert launched[2:] == launched[:2]
    # Once for each signature.
    assert [problem.context for problem in chosen] == [447, 128]
    assert len(watch.timed) == 5


def test_a_call_is_timed_once(watch):
    with leanbench.autotune(candidates=2):
        for _ in range(4):
            call(EAGER)
    assert len(watch.timed) == 1


def test_the_next_context_keeps_launches(watch):
    """vLLM's plugin enters one for each layer."""
    call(EAGER)
    with leanbench.autotune(candidates=2):
        call(EAGER)
    kept = dict(prepared._LAUNCHES._recent)
    assert kept
    with leanbench.autotune(candidates=2):
        assert prepared._LAUNCHES._recent == kept


def test_a_signature_timed_before_is_not_timed_again(watch):
    for _ in range(3):
        # As of the layers of a model: each call has a context of its own.
        with leanbench.autotune(candidates=2):
            call(SERVED)
    assert len(watch.timed) == len(fill_lengths(2, 96))


def test_nothing_is_timed_if_files_are_off(watch, monkeypatch):
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    with pytest.warns(UserWarning, match="is off: nothing is timed"), leanbench.autotune():
        call(EAGER)
    assert watch.timed == []


def test_other_threads_are_not_timed(watch):
    with leanbench.autotune(candidates=2):
        thread = threading.Thread(target=call, args=(EAGER,))
        thread.start()
        thread.join()
    assert watch.timed == []


@pytest.mark.parametrize("how", ["config", "batch_invariant", "capture"])
def test_calls_that_are_not_timed(how, watch, monkeypatch):
    options: dict[str, Any] = {
        "config": {"config": LeanTritonConfig(64, 4, 1, 1, 1, False)},
        "batch_invariant": {"batch_invariant": True},
        "capture": {},
    }[how]
    monkeypatch.setattr(prepared, "is_captured", lambda inputs: how == "capture")
    with leanbench.autotune():
        call(EAGER, **options)
        call(SERVED, **options)
    assert watch.timed == []
    assert not path_for(H200).exists()


def test_the_hook_is_removed_after_an_error(watch):
    with pytest.raises(ZeroDivisionError), leanbench.autotune():
        raise ZeroDivisionError
    assert prepared._LAUNCHES.on_signature is None
    # An outer one comes back.
    with leanbench.autotune():
        outer = prepared._LAUNCHES.on_signature
        with leanbench.autotune():
            assert prepared._LAUNCHES.on_signature is not outer
        assert prepared._LAUNCHES.on_signature is outer is not None


def test_a_call_that_does_not_fit_warns_and_runs(watch):
    def us(problem: AttentionProblem, config: Any) -> float:
        raise OutOfMemory("it needs 9 GB")

    watch.us = us
    words = r"^b2 h4/2 n128 d64 fp16 NHD keeps the model's settings: it needs 9 GB$"
    with leanbench.autotune(), pytest.warns(UserWarning, match=words) as warned:
        call(EAGER)
    assert len(warned) == 1
    assert not path_for(H200).exists()


def test_a_file_that_cannot_be_written_warns_and_the_call_runs(watch, home):
    home.write_text("")
    words = "keeps the model's settings: cannot write .*: choose a writable folder"
    with leanbench.autotune(candidates=2), pytest.warns(UserWarning, match=words):
        call(EAGER)


def test_nothing_warns_without_a_reason(watch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with leanbench.autotune(candidates=2):
            call(EAGER)
    assert len(watch.timed) == 1
