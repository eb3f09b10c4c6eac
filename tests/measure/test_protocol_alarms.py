"""Kernels that are wrong, cheat or vary, on a fake GPU."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pretended_gpu import PROBLEM, Launch, Right, measure

from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, SuspectResult
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import LaunchResources
from leanbench.gpu.nvml_library import GpuLostError
from leanbench.measure import extras
from leanbench.measure.crosscheck import CrossCheck
from leanbench.measure.instruments import open_instruments
from leanbench.measure.one_gpu import OneGpu
from leanbench.measure.protocol import measure_problem
from leanbench.measure.shared import attention_on
from leanbench.measure.timing import Effort
from leanbench.records.outcome import Outcome


class Wrong(Right):
    def spoil(self, inputs: AttentionInputs) -> None:
        inputs.out[1, 0, 3] *= 1.1


class Lazy(Right):
    def spoil(self, inputs: AttentionInputs) -> None:
        inputs.out[0, 0, 0, 0] = float("nan")


@pytest.mark.parametrize(
    # A tenth of one of two query heads that share a KV head; an infinite error is no figure.
    ("wrong", "error"),
    [(Wrong("wrong"), pytest.approx(0.06, abs=0.04)), (Lazy("wrong"), None)],
)
def test_a_wrong_kernel_is_not_timed_and_others_are(gpu, wrong, error):
    rows = measure(gpu, Right("a"), wrong, Right("b"))
    assert rows["wrong"]["status"] == "incorrect"
    assert rows["wrong"]["relative_error"] == error
    assert rows["wrong"]["reason"].endswith("against the fp64 reference is above 2e-03")
    assert "latency_us" not in rows["wrong"]
    assert wrong.launches == 1
    assert set(gpu.sampled) == {None, "a", "b"}
    assert rows["a"]["status"] == rows["b"]["status"] == "ok"
    # Without a right one there is no floor.
    gpu.floors.clear()
    assert measure(gpu, wrong)["wrong"]["status"] == "incorrect"
    assert gpu.floors == []


def test_a_kernel_that_writes_nothing_does_not_pass_on_the_last_one_s_output(gpu):
    class Idle(Right):
        def prepare(
            self, inputs: AttentionInputs, config: KernelConfig | None
        ) -> Callable[[], Any]:
            return Launch(self, lambda: None)

    rows = measure(gpu, Right("a"), Idle("idle"))
    assert (rows["a"]["status"], rows["idle"]["status"]) == ("ok", "incorrect")


def test_an_output_that_changes_while_it_is_timed_is_wrong(gpu):
    class Drifting(Right):
        """A kernel that is right only the first time."""

        def spoil(self, inputs: AttentionInputs) -> None:
            if self.launches > 1:
                inputs.out.mul_(1.05)

    fields = measure(gpu, Drifting())["right"]
    assert fields["status"] == "incorrect"
    assert re.match(
        r"after timing, over other K and V, relative error (4\.9|5\.0)\de-02 ", fields["reason"]
    )
    assert fields["reason"].endswith("against the fp64 reference is above 2e-03")
    assert fields["latency_us"] == 10.0


@pytest.mark.parametrize("tensor", ["q", "k_cache", "v_cache", "cache_seqlens"])
def test_a_kernel_that_changes_its_inputs_is_an_alarm(gpu, tensor):
    class Changing(Right):
        def spoil(self, inputs: AttentionInputs) -> None:
            getattr(inputs, tensor).view(-1)[-1] += 1

    instruments = open_instruments(0, announce=gpu.announce)
    ragged = replace(PROBLEM, context=(100, 90), kv_layout="NHD")
    sentence = r"^changing changed its inputs: Q, K, V or the lengths are not what they were$"
    with pytest.raises(SuspectResult, match=sentence):
        measure_problem(
            attention_on(instruments, ragged), [Right("a"), Changing("changing"), Right("b")]
        )
    assert gpu.announced[-1] == "changing"
    # The other kernels get unchanged inputs.
    gpu.made.clear()
    assert measure_problem(attention_on(instruments, ragged), [Right("a")])["a"]["status"] == "ok"
    assert gpu.made


class Late(Right):
    """A kernel that changes its inputs from some launch on."""

    after = 1

    def spoil(self, inputs: AttentionInputs) -> None:
        if self.launches > self.after:
            inputs.v_cache[0, 0, 0, 0] += 1e-3


def test_inputs_that_change_are_their_kernels_or_everybodys(gpu):
    with pytest.raises(SuspectResult, match=r"^late changed its inputs"):
        measure(gpu, Right("a"), Late("late"))
    assert gpu.announced[-1] == "late"
    late = Late("late")
    # The check, and the graph's launches over three buffers.
    late.after = 4
    with pytest.raises(SuspectResult, match=r"^a, late changed its inputs"):
        measure(gpu, Right("a"), late)
    assert gpu.announced[-1] is None


def test_a_part_that_cannot_be_had_costs_a_warning_not_the_row(gpu, monkeypatch):
    class Resourceful(Right):
        def resources(self, inputs: AttentionInputs, config: KernelConfig | None) -> Any:
            return [LaunchResources("attend", 4, 4, 168, 4096, 0)]

    def fail(*arguments: object) -> None:
        raise RuntimeError("the instrumented build differs\nby much")

    monkeypatch.setattr(extras, "record_timeline", fail)
    fields = measure(gpu, Resourceful(), occupancy=True)["right"]
    assert (fields["status"], fields["latency_us"]) == ("ok", 10.0)
    assert fields["registers_per_thread"] == 168
    assert fields["warnings"] == [
        "part of what was asked is missing (RuntimeError: the instrumented build differs)"
    ]


@pytest.mark.parametrize(
    ("error", "after", "raised"),
    [
        (RuntimeError("CUDA error: misaligned address"), RuntimeError("again"), "again"),
        (GpuLostError("the GPU no longer answers"), None, "no longer answers"),
    ],
)
def test_an_error_of_the_gpu_is_no_warning(gpu, monkeypatch, error, after, raised):
    def throw(error: Exception | None) -> None:
        if error is not None:
            raise error

    def fail(*arguments: object) -> None:
        monkeypatch.setattr("torch.cuda.synchronize", lambda: throw(after))
        throw(error)

    monkeypatch.setattr(extras, "record_timeline", fail)
    with pytest.raises(GpuUnusable if after is None else RuntimeError, match=raised):
        measure(gpu, Right(), occupancy=True)


def test_a_kernel_found_wrong_after_timing_is_asked_nothing_more(gpu, monkeypatch):
    class WrongInReplays(Right):
        is_replayed = False

        def replay(self, launches: Sequence[Callable[[], object]]) -> None:
            self.is_replayed = True
            super().replay(launches)
            self.is_replayed = False

        def spoil(self, inputs: AttentionInputs) -> None:
            if self.is_replayed:
                inputs.out.mul_(2)

    names: list[str] = []
    monkeypatch.setattr(
        OneGpu, "extras", (lambda loaded, timed: names.append(timed.name) or Outcome(),)
    )
    rows = measure(gpu, Right("a"), WrongInReplays("wrong"))
    assert (rows["wrong"]["status"], names) == ("incorrect", ["a"])


def test_a_wide_interval_is_noisy_and_suspect_comes_before_noisy(gpu):
    rows = measure(gpu, Right("steady"), Right("wild", [10.0, 12.0]), effort=Effort(max_samples=20))
    assert rows["steady"]["status"] == "ok"
    wild = rows["wild"]
    assert (wild["status"], wild["latency_us"], wild["samples"]) == ("noisy", 11.0, 20)
    assert wild["reason"].endswith("reaches 9.1% to one side after 20 samples, above 0.5%")
    gpu.floor_us = gpu.best_floor_us = 20.0
    fields = measure(gpu, Right(samples_us=[10.0, 12.0]), effort=Effort(max_samples=20))["right"]
    assert fields["status"] == "suspect"
    assert "beats a kernel that only reads" in fields["reason"]


def test_figures_that_contradict_each_other_are_warned_of(gpu):
    gpu.crosschecks = {"b": CrossCheck((13.0,), ("b",)), "c": "there is no cross-check"}
    rows = measure(gpu, Right("a"), Right("b"), Right("c"))
    assert {fields["status"] for fields in rows.values()} == {"ok"}
    assert rows["a"]["warnings"] == []
    assert (rows["b"]["crosscheck_us"], len(rows["b"]["warnings"])) == (13.0, 1)
    assert "gives 13.00 µs a launch, +30.0% from the" in rows["b"]["warnings"][0]
    assert "crosscheck_us" not in rows["c"]
    assert rows["c"]["warnings"] == [gpu.crosschecks["c"]]
    assert rows["c"]["raw_samples"]["crosscheck_us"] == []
