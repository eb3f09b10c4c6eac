"""Bandwidth, noise floor and kernels, with pretended measurements."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.doctor import instruments as figures
from leanbench.doctor.machine import Machine
from leanbench.doctor.software import TRIED, kernel_is_right
from leanbench.gpu.catalogue import find
from leanbench.measure import read_floor


@pytest.fixture
def sizes(machine, monkeypatch) -> list[AttentionProblem]:
    """Return the problems of requested inputs, in order."""
    problems: list[AttentionProblem] = []

    def rotating(problem, device, spec, cache):
        assert (str(device), spec, cache) == ("cuda:0", find("h200"), "cold")
        problems.append(problem)
        return []

    monkeypatch.setattr("leanbench.measure.buffers.rotating_inputs", rotating)
    return problems


@pytest.mark.parametrize(
    ("share", "status"),
    [(1.9, "problem"), (1.001, "problem"), (0.999, "ok"), (0.801, "ok"), (0.799, "problem")],
)
def test_read_bandwidth(machine, sizes, monkeypatch, share, status):
    def measure(buffers, kv_bytes):
        assert kv_bytes == sizes[0].kv_bytes == 1_073_741_824
        return SimpleNamespace(median_us=kv_bytes / (share * 4.8) / 1e6)

    monkeypatch.setattr("leanbench.measure.read_floor.measure_read_floor", measure)
    finding = figures.read_bandwidth(machine)
    assert finding.status == status
    assert finding.values["share"] == pytest.approx(share)
    assert finding.values["read_bandwidth_tb_s"] == pytest.approx(share * 4.8)
    reads = f"reads 1.1 GB at {share * 4.8:.2f} TB/s, {share:.0%} of the datasheet's 4.80"
    assert reads in finding.text


@pytest.mark.parametrize("fastest", range(len(read_floor._VARIANTS)))
@pytest.mark.usefixtures("sizes")
def test_the_bandwidth_is_of_the_fastest_read_as_in_sweeps(machine, monkeypatch, fastest):
    timed: list[read_floor.Variant] = []

    class PretendedReplay:
        launches = 4

        def __init__(self, launches: list[read_floor.Variant], sample_ms: float) -> None:
            (self.variant,) = launches
            timed.append(self.variant)

        def fill(self, sample_ms: float) -> None:
            """Do nothing: launches have no length."""

        def sample_us(self) -> float:
            is_fastest = self.variant == read_floor._VARIANTS[fastest]
            return 1_073_741_824 / (4.66e6 if is_fastest else 3.87e6)

    monkeypatch.setattr(read_floor, "_launches", lambda buffers, kv_bytes, variant: [variant])
    monkeypatch.setattr("leanbench.measure.timing.Replay", PretendedReplay)
    finding = figures.read_bandwidth(machine)
    assert "reads 1.1 GB at 4.66 TB/s, 97% of the datasheet's 4.80" in finding.text
    assert set(timed) == set(read_floor._VARIANTS)
    assert timed[-1] == read_floor._VARIANTS[fastest]


def test_a_small_gpu_gets_a_smaller_problem(machine, sizes, monkeypatch):
    machine.gpu = replace(machine.gpu, memory_free_bytes=3_900_000_000)
    monkeypatch.setattr(
        "leanbench.measure.read_floor.measure_read_floor",
        lambda buffers, kv_bytes: SimpleNamespace(median_us=60.0),
    )
    figures.read_bandwidth(machine)
    assert [size.kv_bytes for size in sizes] == [268_435_456]


@pytest.mark.parametrize(
    ("again_us", "status", "percents"),
    [
        *(([10.0, 10.0, 10.0], "ok", [0, 0, 0]), ([10.05, 9.95, 10.0], "ok", [0.5, 0.5, 0])),
        ([10.0, 10.2, 10.0], "note", [0, 2, 0]),
        ([8.0, 10.0, 10.0], "problem", [25, 0, 0]),
    ],
)
def test_noise_floor(machine, sizes, monkeypatch, again_us, status, percents):
    left = list(again_us)
    end = {"ok": "", "note": ": smaller", "problem": ": nothing"}[status]

    def measure(candidates, effort):
        once, again = candidates
        assert candidates[once] is candidates[again]
        timed = (once, 10.0), (again, left.pop(0))
        return {name: SimpleNamespace(median_us=us) for name, us in timed}

    monkeypatch.setattr("leanbench.measure.timing.measure_interleaved", measure)
    finding = figures.noise_floor(machine)
    assert finding.status == status
    at = zip(percents, (4, 67, 1074), strict=True)
    sentence = ", ".join(f"{percent:.2f}% at {mb} MB" for percent, mb in at)
    assert f"lean against itself differs by {sentence}{end}" in finding.text
    assert list(finding.values["differences"]) == [size.label for size in sizes]


class FakeKernel(Kernel):
    """The reference, with an error of choice."""

    name = "fake"
    decomposition = "other"

    def __init__(self, factor: float | None, reason: str | None = None) -> None:
        self.factor, self.reason = factor, reason

    def refusal(self, problem):
        return self.reason

    def default_config(self, problem, gpu):
        assert (problem, gpu) == (TRIED, find("h200"))

    def prepare(self, inputs, config):
        attend_all = importlib.import_module("leanbench.kernels.reference.torch").attend_all

        def launch():
            if self.factor is not None:
                attend_all(inputs)
                inputs.out.mul_(self.factor)

        return launch


class OnCpu(Machine):
    device = torch.device("cpu")  # type: ignore[assignment]
    spec = find("h200")  # type: ignore[assignment]


def test_a_right_kernel():
    finding = kernel_is_right(FakeKernel(1.0), OnCpu())
    assert finding.status == "ok"
    assert finding.text.startswith("right on b1 h32/8 n1024 d128 fp16 HND, relative error ")
    assert 0 < finding.values["relative_error"] < 1e-3


def test_a_wrong_kernel():
    finding = kernel_is_right(FakeKernel(1.25), OnCpu())
    assert finding.status == "problem"
    assert finding.values["relative_error"] == pytest.approx(0.25, rel=1e-2)
    assert finding.text.startswith("wrong on b1 h32/8 n1024 d128 fp16 HND: relative error 2.5")
    assert finding.fix == (
        "trust no figure of it; `leanbench check --kernels fake` shows where it is wrong"
    )
    # One that writes nothing, and one that cannot.
    finding = kernel_is_right(FakeKernel(None), OnCpu())
    assert (finding.status, finding.values) == ("problem", {"relative_error": None})
    finding = kernel_is_right(FakeKernel(1.0, "fake wants a page size"), OnCpu())
    assert (finding.status, finding.text) == ("note", "fake wants a page size")
