"""Measurement of a problem on a fake GPU: times are scripted, inputs and checks are real."""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from leanbench.kernels.lean.configs import LeanTritonConfig
from pretended_gpu import CONFIG, FASTER, PROBLEM, Launch, Right, measure

from leanbench.configs.lookup import Choice
from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.nvml import GpuProcess, GpuState
from leanbench.measure import extras, one_gpu
from leanbench.measure import instruments as instruments_module
from leanbench.measure.candidate import Candidate, timing_outcome
from leanbench.measure.crosscheck import CrossCheck
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.instruments import open_instruments
from leanbench.measure.one_gpu import OneGpu
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem, measure_timelines
from leanbench.measure.shared import attention_on
from leanbench.measure.timing import Effort, Timing
from leanbench.records.outcome import Outcome
from leanbench.records.row import Row
from leanbench.records.samples import Samples


def row(fields: dict[str, Any]) -> Row:
    written = {name: fields[name] for name in fields if name != "raw_samples"}
    written |= {"cell": "c", "problem": PROBLEM.to_dict(), "kernel": "k"}
    written |= {"wall_s": 0.1, "time": "t", "environment": "e"}
    return Row.model_validate(json.loads(json.dumps(written)))


def test_a_cell(gpu):
    fields = measure(gpu, Right())["right"]
    assert gpu.made == [PROBLEM] * 3
    assert 0 < fields.pop("relative_error") < 1e-3
    assert fields.pop("lse_error") < 1e-6
    assert fields.pop("host_us") > 0
    raw = fields.pop("raw_samples")
    steady = Timing(64, [10.0] * 10, list(range(10)), [None] * 10)
    assert fields == {
        "source": "measured",
        "decomposition": "one_cta_per_tile",
        "kv_bytes": 102_400,
        "cache": "cold",
        "library": None,
        "config": CONFIG.to_dict(),
        "config_choice": "heuristic",
        "config_reason": None,
        "checked_heads": 4,
        "total_heads": 4,
        **timing_outcome(steady, 102_400, 8.0).fields(),
        "crosscheck_us": 10.1,
        "crosscheck_clock_mhz": 1755,
        "gpu_kernels": ["right"],
        "schedule": "one CTA a tile",
        "quantisation_efficiency": pytest.approx(4 / 132),
        "fixed_runs_us": None,
        "workspace_bytes": 0,
        "warnings": [],
        "status": "ok",
        "reason": None,
    }
    assert row(fields).latency_us == 10.0
    assert Samples(cell="c", **raw).samples_us == [10.0] * 10
    assert (raw["rounds"], raw["sm_clock_mhz"]) == (list(range(10)), [None] * 10)
    assert raw["crosscheck_us"] == [10.0, 10.2, 10.1]


def test_a_row_of_a_library_says_whose_code_ran(gpu):
    class Peer(Right):
        is_peer = True

        def library(self) -> str:
            return "peer 1.2"

    class Missing(Peer):
        def unavailable_reason(self) -> str:
            return "not installed"

        def refusal(self, problem: AttentionProblem) -> str:
            return "not installed"

    rows = measure(gpu, Right("own"), Peer("peer"), Missing("missing"))
    assert [fields["library"] for fields in rows.values()] == [None, "peer 1.2", None]
    assert row(rows["peer"]).library == "peer 1.2"


def test_kernels_of_a_problem_are_measured_side_by_side(gpu):
    effort = Effort(min_samples=6, max_samples=6)
    rows = measure(gpu, Right("a", [10.0]), Right("b", [20.0]), effort=effort)
    assert list(rows) == ["a", "b"]
    assert {name: fields["latency_us"] for name, fields in rows.items()} == {"a": 10.0, "b": 20.0}
    # The floor takes part, measured once for all. A warm-up round is discarded.
    assert gpu.sampled == [None, "a", "b", *[None, "a", "b", "a", "b", None, "b", None, "a"] * 2]
    assert gpu.floors == [False]
    assert len(gpu.made) == 3
    assert [fields["read_floor_us"] for fields in rows.values()] == [8.0, 8.0]
    assert (
        rows["a"]["raw_samples"]["rounds"] == rows["b"]["raw_samples"]["rounds"] == list(range(6))
    )


def test_whose_code_runs_is_announced_before_it_runs(gpu):
    class Watched(Right):
        def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
            assert gpu.announced[-1] == self.name
            return super().prepare(inputs, config)

        def spoil(self, inputs: AttentionInputs) -> None:
            assert gpu.announced[-1] == self.name

    rows = measure(gpu, Watched("a"), Watched("b"), effort=Effort(min_samples=6, max_samples=6))
    assert {fields["status"] for fields in rows.values()} == {"ok"}
    # Support, check and graph are announced with their kernel, inputs without any.
    assert gpu.announced[:7] == ["a", "b", None, "a", "b", "a", "b"]
    assert gpu.announced[-1] is None


def test_inputs_are_given_up_when_a_problem_is_done(gpu):
    kept: list[Callable[[], object]] = []

    class Keeping(Right):
        """A kernel that keeps its launches, like a library's module globals."""

        def replay(self, launches: Sequence[Callable[[], object]]) -> None:
            super().replay(launches)
            kept.extend(launches)

    instruments = open_instruments(0)
    with OneGpu(instruments, PROBLEM) as loaded:
        assert len(loaded.buffers) == 3
    assert loaded.buffers == []
    measure_problem(attention_on(instruments, PROBLEM), [Keeping()])
    smaller = replace(PROBLEM, dtype="bf16")
    assert measure_problem(attention_on(instruments, smaller), [Right()])["right"]["status"] == "ok"
    assert gpu.made == [PROBLEM] * 6 + [smaller] * 3


def test_a_floor_that_a_kernel_beats_is_looked_for_again(gpu):
    gpu.floor_us, gpu.best_floor_us = 12.0, 9.5
    rows = measure(gpu, Right())
    assert gpu.floors == [False, True]
    assert (rows["right"]["status"], rows["right"]["read_floor_us"]) == ("ok", 9.5)
    # Once: a latency still too low after that is suspect.
    gpu.floors.clear()
    gpu.best_floor_us = 12.0
    rows = measure(gpu, Right("a"), Right("b", [13.0]))
    assert gpu.floors == [False, True]
    assert rows["a"]["status"] == "suspect"
    assert rows["a"]["reason"].startswith(
        "10.00 µs beats a kernel that only reads the same bytes (12.00 µs)"
    )
    assert rows["b"]["status"] == "ok"


class WrongWith(Right):
    """A kernel that doubles its outputs with these settings."""

    config_choice = "best"

    def __init__(self, *wrong: TileConfig) -> None:
        super().__init__()
        self.wrong = wrong

    def prepare(self, inputs: AttentionInputs, config: TileConfig | None) -> Callable[[], Any]:
        launch = super().prepare(inputs, config)

        def wrong() -> None:
            launch()
            inputs.out.mul_(2)

        return Launch(self, wrong) if config in self.wrong else launch


def last_that_runs(candidates: dict[object, Callable[[], object]]) -> tuple[object, int]:
    """Stand for `leanbench.measure.timing.fastest`; the last candidate is the fastest."""
    ran, refusals = [], []
    for config, make_launches in candidates.items():
        try:
            make_launches()
        except UserError as refusal:
            refusals.append(refusal)
        else:
            ran.append(config)
    if not ran:
        raise refusals[0]
    return ran[-1], len(ran)


class WithPrefix(Right):
    """A kernel of the API that reads a shared prefix in its own launch, or with each sequence."""

    config_choice = "best"
    is_api = True
    axes = Right.axes | {"page_size", "shared_prefix"}


@pytest.mark.parametrize("is_plain", [False, True])
def test_best_tries_the_call_without_a_shared_prefix(gpu, monkeypatch, is_plain):
    ways: list[tuple[Any, int]] = []

    def launches_of(kernel: Any, copies: Any, config: Any, request: Any = None) -> Any:
        ways.append((config, copies[0].shared_prefix))
        return kernel.prepare_all(copies, config)

    def fastest(candidates: dict[Any, Callable[[], object]]) -> tuple[object, int]:
        for make in candidates.values():
            make()
        return list(candidates)[-1 if is_plain else 0], len(candidates)

    monkeypatch.setattr(one_gpu, "launches_of", launches_of)
    monkeypatch.setattr(one_gpu, "fastest", fastest)
    problem = replace(PROBLEM, page_size=16, shared_prefix=64)
    subject = attention_on(open_instruments(0, MeasureOptions(), gpu.announce), problem)
    row = measure_problem(subject, [WithPrefix()])["right"]
    assert ways == [(CONFIG, 64), (FASTER, 64), (CONFIG, 0)]
    assert (row["status"], row["config_choice"]) == ("ok", "best of 3")
    assert ("without shared_prefix" in row["config_reason"]) == is_plain


def test_best_is_the_fastest_candidate_that_is_right(gpu, monkeypatch):
    monkeypatch.setattr(one_gpu, "fastest", last_that_runs)
    right = WrongWith()
    fields = measure(gpu, right)["right"]
    assert (fields["config"], fields["config_choice"]) == (FASTER.to_dict(), "best of 2")
    # Each candidate over all three buffers; the best is measured with these launches.
    assert right.prepared == [CONFIG] * 3 + [FASTER] * 3
    fields = measure(gpu, WrongWith(FASTER))["right"]
    assert (fields["status"], fields["config"]) == ("ok", CONFIG.to_dict())
    assert fields["config_choice"] == "best of 1"
    wrong = f"{FASTER.to_dict()} is not right: relative error 1.00e+00 against the fp64 reference"
    assert wrong in fields["config_reason"]
    fields = measure(gpu, WrongWith(CONFIG, FASTER))["right"]
    assert (fields["status"], fields["config"]) == ("incorrect", CONFIG.to_dict())
    assert fields["reason"].startswith("relative error 1.00e+00 against the fp64 reference")
    # What is tuned is tried, too.
    tuned = TileConfig(256, 4, 2)
    choice = Choice(tuned, "tuned", "from a file")
    monkeypatch.setattr(one_gpu.lookup, "resolve", lambda *arguments: choice)
    right = WrongWith(FASTER)
    assert measure(gpu, right)["right"]["config"] == CONFIG.to_dict()
    assert right.prepared[:9:3] == [tuned, CONFIG, FASTER]


def test_resident_ctas_are_slots_and_a_warm_cache_is_one_buffer(gpu):
    class Resident(Right):
        def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> TileConfig:
            return LeanTritonConfig(64, 4, 2, 2, 1, True)

    assert measure(gpu, Resident())["right"]["quantisation_efficiency"] == pytest.approx(4 / 264)
    fields = measure(gpu, Right(), cache="warm")["right"]
    assert len(gpu.made) == 3 + 1
    assert (fields["cache"], row(fields).cache, fields["status"]) == ("warm", "warm", "ok")


def test_unsupported_says_the_kernels_reason_and_allocates_nothing(gpu):
    subject = attention_on(open_instruments(0), replace(PROBLEM, head_dim=256))
    rows = measure_problem(subject, [Right(), kernel("reference")])
    assert {fields["status"] for fields in rows.values()} == {"unsupported"}
    assert rows["right"]["reason"] == "right knows no head_dim 256"
    assert rows["reference"]["reason"].startswith("reference is there to check others, it cannot")
    assert gpu.made == []
    assert "latency_us" not in rows["right"]


def test_out_of_memory_is_said_of_all_kernels_that_could(gpu):
    gpu.free_bytes = 20e9
    instruments = open_instruments(0)
    large = AttentionProblem(4, 32, 32, 1_000_000, 64)
    rows = measure_problem(
        attention_on(instruments, large), [Right("a"), kernel("reference"), Right("b")]
    )
    assert list(rows) == ["a", "reference", "b"]
    for name in ("a", "b"):
        assert rows[name]["status"] == "out_of_memory"
        assert rows[name]["reason"] == (
            "needs 34.3 GB (K and V 32.8 GB, the rest for Q, the output and the check) and the GPU"
            " has 20.0 GB free: choose a smaller context, batch or number of KV heads"
        )
        assert row(rows[name]).kv_bytes == large.kv_bytes
    assert rows["reference"]["status"] == "unsupported"
    assert gpu.made == []
    # A kernel that does not fit leaves the process usable.
    rows = measure_problem(attention_on(instruments, PROBLEM), [kernel("reference"), Right()])
    assert [fields["status"] for fields in rows.values()] == ["unsupported", "ok"]


class PretendedNvml:
    """A fake NVML with one state and other processes."""

    def __init__(self, reasons: list[str], processes: list[GpuProcess] | None = None) -> None:
        self.reading = GpuState(1755, 2619, 44, 412.5, reasons)
        self.processes = processes

    def state(self) -> GpuState:
        return self.reading

    def other_processes(self, since_us: int) -> list[GpuProcess] | None:
        assert since_us > 1e15, "microseconds since 1970"
        return self.processes


def test_the_state_of_the_gpu_is_in_the_row(gpu):
    gpu.nvml = PretendedNvml(["sync_boost"])
    effort = Effort(max_repeats=2, throttled_pause_s=0.0)
    fields = measure(gpu, Right(), effort=effort)["right"]
    of_state = ("sm_clock_mhz", "temperature_c", "power_w", "throttle_reasons")
    assert [fields[name] for name in of_state] == [1755, 44, 412.5, ["sync_boost"]]
    assert fields["throttled_samples"] == 2
    assert fields["raw_samples"]["sm_clock_mhz"] == [1755] * 10
    assert fields["raw_samples"]["rounds"] == list(range(2, 12))
    assert fields["warnings"] == [
        "clocks were lowered (sync_boost) in samples that count, after 2 were thrown away"
    ]
    assert fields["status"] == "ok"


@pytest.mark.parametrize(
    ("pid", "status"), [(1, "noisy"), (os.getppid(), "ok")], ids=["another", "its own"]
)
def test_other_programs_on_the_gpu_make_all_rows_noisy_but_the_sweep_itself_does_not(
    gpu, pid, status
):
    gpu.nvml = PretendedNvml([], [GpuProcess(pid, "train", 30)])
    rows = measure(gpu, Right("a"), Right("b"))
    assert {fields["status"] for fields in rows.values()} == {status}
    if status == "noisy":
        assert rows["a"]["reason"].startswith(
            "other programs used the GPU meanwhile: train (pid 1)"
        )


@pytest.fixture
def sustained(monkeypatch) -> list[tuple[int, object, float]]:
    """Return launches, NVML and window of each call of `measure_window`; the n-th reads n mJ."""
    calls: list[tuple[int, object, float]] = []

    def fake(replay, launches, nvml, calibration, window_s, ranks):
        assert ranks is None
        calls.append((launches, nvml, window_s))
        number = len(calls)
        reasons, warnings = ["sw_power_cap"], [f"reading {number}"]
        return SustainedReading(10.0, 3.0, 1980, 600.0, number, None, None, reasons, warnings)

    monkeypatch.setattr(extras, "measure_window", fake)
    calibration = SimpleNamespace(tick_ms=100.0)
    monkeypatch.setattr(instruments_module, "calibrate", lambda nvml: calibration)
    return calls


def test_energy_of_each_kernel_and_of_the_floor_once_and_none_of_sustained_runs(gpu, sustained):
    gpu.nvml = PretendedNvml([])
    rows = measure(gpu, Right("a"), Right("b"), energy=True, window_s=5.0)
    assert sustained == [(64, gpu.nvml, 5.0)] * 3
    for name, own, floor in (("a", 1, 2), ("b", 3, 2)):
        assert (rows[name]["energy_mj"], rows[name]["energy_floor_mj"]) == (own, floor)
        assert rows[name]["warnings"] == [f"reading {own}", f"read floor: reading {floor}"]
    gpu.nvml = PretendedNvml([])
    assert measure(gpu, Right(), sustained=True)["right"]["energy_floor_mj"] is None
    assert sustained[3:] == [(64, None, 3.0)]


@pytest.mark.usefixtures("sustained")
def test_a_window_of_few_ticks_is_refused_and_without_nvml_there_is_no_energy(gpu, monkeypatch):
    gpu.nvml = PretendedNvml([])
    calibration = SimpleNamespace(tick_ms=1000.0)
    monkeypatch.setattr(instruments_module, "calibrate", lambda nvml: calibration)
    with pytest.raises(UserError, match="give it 20 to 3600 s"):
        measure(gpu, Right(), energy=True, window_s=5.0)
    gpu.nvml = None
    monkeypatch.setattr(instruments_module, "calibrate", lambda nvml: None)
    fields = measure(gpu, Right(), energy=True)["right"]
    assert any("so there is no energy" in warning for warning in fields["warnings"])


@pytest.mark.parametrize(("latency_us", "calls"), [(10.0, 200), (500.0, 30), (9000.0, 9)])
def test_host_time_is_the_median_of_calls(gpu, monkeypatch, latency_us, calls):
    """The number of calls fills 15 ms of GPU time, within limits, after three that do not count."""
    now_s, waits = 0.0, []
    monkeypatch.setattr(extras, "time", SimpleNamespace(perf_counter=lambda: now_s))
    kernel = Right(samples_us=[latency_us])
    launch_of = kernel.prepare
    called: list[AttentionInputs] = []

    def prepare_timed(inputs: AttentionInputs, config: Any) -> Callable[[], object]:
        launch = launch_of(inputs, config)

        def call() -> None:
            nonlocal now_s
            launch()
            called.append(inputs)
            # The first ones compile; every fifth coincides with a busy host.
            now_s += 0.5 if len(called) <= 3 or len(called) % 5 == 0 else 20e-6

        return Launch(kernel, call)

    monkeypatch.setattr(kernel, "prepare", prepare_timed)
    monkeypatch.setattr(OneGpu, "steps", ())
    extra = extras.host_fields

    def host_fields(loaded: OneGpu, candidate: Candidate) -> Outcome:
        called.clear()
        monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append(len(called)))
        outcome = extra(loaded, candidate)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        assert len(called) == 3 + calls
        # The buffers take turns.
        assert called[:4] == [*loaded.buffers, loaded.buffers[0]]
        return outcome

    monkeypatch.setattr(OneGpu, "extras", (host_fields,))
    no_rest = Effort(rest_share=0.0)
    assert measure(gpu, kernel, effort=no_rest)["right"]["host_us"] == pytest.approx(20.0)
    assert waits == [*range(3, 3 + calls, 20), 3 + calls]


def test_a_plan_is_timed_apart(gpu, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(extras, "time", SimpleNamespace(perf_counter=lambda: now_s))

    class Planned(Right):
        calls = 0

        def planner(self, inputs: AttentionInputs, config: object) -> Callable[[], None]:
            def plan() -> None:
                nonlocal now_s
                Planned.calls += 1
                # The first ones compile.
                now_s += 0.05 if Planned.calls <= 3 else 0.002

            assert gpu.announced[-1] == self.name
            return plan

    rows = measure(gpu, Right("without"), Planned("planned"))
    assert "plan_us" not in rows["without"]
    assert rows["planned"]["plan_us"] == pytest.approx(2000.0)
    assert Planned.calls == 23
    assert rows["planned"]["latency_us"] == rows["without"]["latency_us"]


def test_occupancy_and_counters_only_when_asked(gpu, monkeypatch):
    def record_timeline(problem: object, kernel: Right, *rest: Any) -> SimpleNamespace:
        config, buffers, spec, latency_us = rest
        assert gpu.announced[-1] == kernel.name
        assert (problem, config, len(buffers), spec.sms) == (PROBLEM, CONFIG, 3, 132)
        return SimpleNamespace(sm_busy_share=latency_us / 100, traced_latency_us=1.5 * latency_us)

    def count(*request: Any) -> Any:
        assert request[1:] == (gpu.announced[-1], CONFIG, 0, "cold")
        if request[1] == "b":
            return "counters want rights"
        return SimpleNamespace(outcome=lambda: Outcome(counted_dram_bytes=7))

    monkeypatch.setattr(extras, "record_timeline", record_timeline)
    monkeypatch.setattr(extras, "count", count)
    plain = measure(gpu, Right())["right"]
    assert not {"sm_busy_share", "counted_dram_bytes"} & set(plain)
    assert plain["warnings"] == []
    gpu.crosschecks["b"] = CrossCheck((20.0,), ("b",))
    rows = measure(gpu, Right("a"), Right("b", [20.0]), occupancy=True, counters=True)
    assert [fields["sm_busy_share"] for fields in rows.values()] == [0.1, 0.2]
    assert [fields["instrumentation_cost"] for fields in rows.values()] == [1.5, 1.5]
    assert rows["a"]["counted_dram_bytes"] == 7
    assert "counted_dram_bytes" not in rows["b"]
    assert rows["b"]["warnings"] == ["counters want rights"]


def test_a_timeline_holds_the_plain_latency(gpu, monkeypatch):
    def record_timeline(*arguments: Any) -> Any:
        problem, kernel, config, buffers, _, latency_us = arguments
        found = (problem, kernel.name, config, len(buffers), latency_us)
        return None if kernel.name == "untraced" else found

    monkeypatch.setattr(one_gpu, "record_timeline", record_timeline)
    instruments = open_instruments(0)
    samples_us = [10.0, 11.0, 12.0] * 20
    timelines: Any = measure_timelines(
        attention_on(instruments, PROBLEM), Right("a", samples_us), "default"
    )
    assert timelines == [(PROBLEM, "a", CONFIG, 3, statistics.median(samples_us))]
    for problem, name, why in (
        (PROBLEM, "untraced", "untraced has no instrumented build"),
        (replace(PROBLEM, head_dim=256), "a", "a knows no head_dim 256"),
    ):
        assert measure_timelines(attention_on(instruments, problem), Right(name), "default") == why


def test_settings_that_are_tuned_or_given(gpu, monkeypatch):
    """leanbench.configs.lookup provides the source of the settings."""

    def choose(kernel: Right, problem: AttentionProblem, spec: GpuSpec, request: object) -> Choice:
        assert (problem, spec) == (PROBLEM, open_instruments(0).spec)
        requests.append(request)
        given = isinstance(request, TileConfig)
        return (
            Choice(request, "given", "given") if given else Choice(FASTER, "tuned", "from a file")
        )

    requests: list[object] = []
    monkeypatch.setattr(one_gpu.lookup, "resolve", choose)
    tuned, second = Right("tuned"), Right("other")
    tuned.tuned_as = "tuned"
    rows = measure_problem(
        attention_on(open_instruments(0), PROBLEM), [tuned, second], "heuristic", {"other": CONFIG}
    )
    assert requests == ["heuristic", CONFIG]
    names = ("config", "config_choice", "config_reason")
    chosen = [[fields[name] for name in names] for fields in rows.values()]
    assert chosen == [[FASTER.to_dict(), "tuned", "from a file"], [CONFIG.to_dict(), "given", None]]
    assert (tuned.prepared, second.prepared) == ([FASTER] * 3, [CONFIG] * 3)
