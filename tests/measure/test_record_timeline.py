"""Recording of a timeline: the kept launch and the checks, on a fake GPU and in the interpreter."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.config import KernelConfig, TileConfig
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.kernel import Kernel, TracedCall
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import CtaTimeline, Span
from leanbench.gpu.catalogue import find
from leanbench.measure import timeline as module
from leanbench.measure.timeline import record_timeline, timer_tick_ns

H200 = find("h200")
PROBLEM = AttentionProblem(2, 4, 2, 90, 64)
CONFIG = LeanTritonConfig(16, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs a kernel on the CPU, which only the interpreter does",
)


class ScriptedCall(TracedCall):
    """Attention with scripted durations of its readings; all calls share `durations_us`."""

    def __init__(self, name, launch, log, durations_us):
        self.name = name
        self.run = launch
        self.log = log
        self.durations_us = durations_us

    def launch(self) -> None:
        self.log.append(("launch", self.name))
        self.run()

    def read(self) -> tuple[CtaTimeline, ...]:
        self.log.append(("read", self.name))
        end_us = self.durations_us.pop(0)
        spans = (Span("tiles", 0, 0.5, end_us),)
        first = CtaTimeline("traced", 0, 3, 0.0, end_us, spans)
        return first, CtaTimeline("traced", 1, 4, 0.0, 1.0, ())


class Traceable(Kernel):
    """The reference, with scripted timeline events."""

    name = "traceable"
    title = "the reference"
    decomposition = "other"
    source = "test"

    def __init__(self, durations_us, spoil=lambda inputs: None):
        self.durations_us = durations_us
        self.spoil = spoil
        self.log: list[tuple[str, int]] = []
        self.calls = 0

    def default_config(self, problem: AttentionProblem, gpu: Any) -> KernelConfig:
        return CONFIG

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        return kernel("reference").prepare(inputs, None)

    def prepare_traced(self, inputs: AttentionInputs, config: KernelConfig | None) -> TracedCall:
        attend = self.prepare(inputs, config)

        def launch() -> None:
            attend()
            self.spoil(inputs)

        self.calls += 1
        return ScriptedCall(self.calls - 1, launch, self.log, self.durations_us)


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Fake graphs that replay on the CPU, with scripted times."""
    gpu = SimpleNamespace(timed=[], captured=[], replays=0)

    def time_launches(launches, effort=None):
        gpu.timed.append(list(launches))
        return SimpleNamespace(median_us=12.5)

    def capture(launches, count):
        gpu.captured.append(count)

        def replay() -> None:
            gpu.replays += 1
            for index in range(count):
                launches[index % len(launches)]()

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(module, "time_launches", time_launches)
    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "timer_tick_ns", lambda device: 32)
    return gpu


def buffers(count: int, problem: AttentionProblem = PROBLEM) -> list[AttentionInputs]:
    return [make_inputs(problem, "cpu") for _ in range(count)]


def test_the_launch_of_median_duration_is_kept(gpu):
    traceable = Traceable([9.0, 2.0, 8.0, 3.0, 7.0, 5.0, 6.0, 4.0, 100.0])
    timeline = record_timeline(PROBLEM, traceable, CONFIG, buffers(4), H200, 11.0)
    assert timeline is not None
    assert timeline.duration_us == 6.0
    assert timeline.ctas == (
        CtaTimeline("traced", 0, 3, 0.0, 6.0, (Span("tiles", 0, 0.5, 6.0),)),
        CtaTimeline("traced", 1, 4, 0.0, 1.0, ()),
    )
    assert traceable.durations_us == []
    assert (timeline.latency_us, timeline.traced_latency_us, timeline.tick_ns) == (11.0, 12.5, 32)
    assert (timeline.kernel, timeline.source) == ("traceable", "measured")
    assert (timeline.gpu, timeline.sms) == (H200.product, 132)
    assert timeline.problem == PROBLEM
    assert timeline.config == CONFIG.to_dict()
    assert timeline.output_tiles == 4


@pytest.mark.parametrize(
    ("count", "launches", "replays"), [(1, 8, 9), (2, 8, 5), (3, 9, 3), (5, 10, 3), (12, 12, 3)]
)
def test_recorded_launches_come_last_in_a_sequence_over_all_buffers(gpu, count, launches, replays):
    durations_us = [float(i) for i in range(20)]
    traceable = Traceable(durations_us)
    assert record_timeline(PROBLEM, traceable, CONFIG, buffers(count), H200) is not None
    assert gpu.captured == [launches]
    assert gpu.replays == replays
    assert len(gpu.timed[0]) == count
    # The check of the output, then each replay: all buffers in turn; the last ones are read.
    names = [index % count for index in range(launches)]
    last = names[-min(count, 3) :]
    replay = [("launch", name) for name in names] + [("read", name) for name in last]
    assert traceable.log == [("launch", 0), *replay * replays]


def test_an_instrumented_build_may_be_missing_or_round_elsewhere(gpu):
    assert record_timeline(PROBLEM, kernel("reference"), None, buffers(1), H200) is None
    assert gpu.timed == []

    def round_elsewhere(inputs: AttentionInputs) -> None:
        inputs.out[0, 0, 0, 0] *= 1 + 2**-10
        inputs.lse.mul_(1 + 2**-22)

    traceable = Traceable([1.0] * 9, round_elsewhere)
    assert record_timeline(PROBLEM, traceable, CONFIG, buffers(1), H200) is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda inputs: inputs.out.mul_(1.01),
        lambda inputs: inputs.out[1, 0, 3].zero_(),
        lambda inputs: inputs.out[0, 0, 0, :1].fill_(float("nan")),
        lambda inputs: inputs.lse.add_(0.01),
        lambda inputs: inputs.lse[0, 0].fill_(float("nan")),
    ],
)
def test_an_instrumented_build_must_compute_the_same(gpu, spoil):
    with pytest.raises(RuntimeError, match="the instrumented build of traceable differs"):
        record_timeline(PROBLEM, Traceable([1.0] * 9, spoil), CONFIG, buffers(1), H200)
    assert gpu.timed == []


@interpreted
@pytest.mark.parametrize(
    ("name", "config", "ctas"),
    [
        ("lean", CONFIG, 5),
        ("fa2", TileConfig(16, 4, 2), 2),
        # 2 output tiles in two splits, and a merge per query head.
        ("fixed_split", FixedSplitTritonConfig(16, 4, 2, splits=2), 8),
    ],
)
def test_the_shipped_kernels(gpu, monkeypatch, name, config, ctas):
    monkeypatch.setattr(module, "_RECORDED", 1)
    monkeypatch.setattr(module, "_LAUNCHES_PER_REPLAY", 1)
    problem = AttentionProblem(1, 4, 2, 48, 64)
    timeline = record_timeline(problem, kernel(name), config, buffers(1, problem), H200)
    assert timeline is not None
    assert len(timeline.ctas) == ctas
    assert {span.output_tile for cta in timeline.ctas for span in cta.spans} == {0, 1}
    assert timeline.duration_us > 0


@interpreted
def test_the_tick_is_the_smallest_step_of_the_timer(monkeypatch):
    """The interpreter's timer counts the reads."""
    monkeypatch.setattr(module, "_TIMER_READS", 20)
    assert timer_tick_ns(torch.device("cpu")) == 1
    # A single read shows no step.
    monkeypatch.setattr(module, "_TIMER_READS", 1)
    with pytest.raises(RuntimeError, match="did not step during 1 reads"):
        timer_tick_ns(torch.device("cpu"))
