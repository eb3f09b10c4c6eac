"""How a cell is measured, on a pretended GPU: memory, inputs and clock are made up, the check is the real one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leanbench.decomposition import Schedule, TileGrid, one_cta_per_tile
from leanbench.gpu.catalogue import find
from leanbench.gpu.spec import GpuSpec
from leanbench.inputs import AttentionInputs, make_inputs
from leanbench.measure import cell as module
from leanbench.measure.cell import Bench, timing_fields
from leanbench.measure.timing import Timing
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig, kernel
from leanbench.row import Row

H200 = find("h200")
PROBLEM = AttentionProblem(2, 4, 2, 1000, 64)
CONFIG = KernelConfig(64, 4, 2)
FASTER = KernelConfig(128, 4, 2)
STEADY = Timing((10.0,) * 12, 64)
FLOOR = Timing((8.0,) * 12, 64)


class Right(Kernel):
    """The reference behind launch settings."""

    name = "right"
    title = "the reference"
    decomposition = "one_cta_per_tile"
    source = "test"

    def __init__(self) -> None:
        self.prepared: list[KernelConfig | None] = []
        self.launches = 0

    def unsupported_reason(self, problem: AttentionProblem) -> str | None:
        return "right knows no head_dim 256" if problem.head_dim == 256 else None

    def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig | None:
        return CONFIG

    def candidate_configs(self, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
        return [CONFIG, FASTER]

    def schedule(self, problem: AttentionProblem, config: KernelConfig | None, gpu: GpuSpec) -> Schedule:
        assert config is not None
        return one_cta_per_tile(TileGrid.of(problem, config.tile_tokens))

    def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
        self.prepared.append(config)
        attend_all = kernel("reference").prepare(inputs, None)

        def launch() -> None:
            self.launches += 1
            attend_all()
            self.spoil(inputs)

        return launch

    def spoil(self, inputs: AttentionInputs) -> None:
        """What a wrong kernel overrides."""


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """What the pretended GPU answers; tests change it."""
    gpu = SimpleNamespace(free=140e9, timing=STEADY, floors=0, made=[])

    def made(problem: AttentionProblem, device: torch.device, seed: int | None) -> AttentionInputs:
        assert device == torch.device("cuda", 0)
        assert seed is None, "a check wants fresh inputs"
        gpu.made.append(problem)
        return make_inputs(problem, "cpu", seed)

    def time_launches(launches: list[Callable[[], object]], effort: object) -> Timing:
        for launch in launches:
            launch()
        return gpu.timing

    def floor(buffers: list[AttentionInputs], kv_bytes: int) -> Timing:
        assert (len(buffers), kv_bytes) == (len(gpu.made), PROBLEM.kv_bytes)
        gpu.floors += 1
        return FLOOR

    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (int(gpu.free), int(141e9)))
    monkeypatch.setattr("leanbench.gpu.local.spec_of_device", lambda index: H200)
    monkeypatch.setattr(module, "_open_nvml", lambda device: None)
    monkeypatch.setattr(module, "make_inputs", made)
    monkeypatch.setattr(module, "time_launches", time_launches)
    monkeypatch.setattr(module, "measure_read_floor", floor)
    # 3 MB of cold buffers, not 400: as many copies of small problems.
    monkeypatch.setattr(module, "_COLD_BYTES", 3_000_000)
    monkeypatch.setattr(module, "_COLD_L2_MULTIPLE", 0)
    return gpu


def row(fields: dict[str, Any]) -> Row:
    beside = {"cell": "c", "problem": PROBLEM.to_dict(), "kernel": "k", "wall_s": 0.1, "time": "t", "environment": "e"}
    return Row.model_validate({**json.loads(json.dumps(fields)), **beside})


def test_a_cell(gpu):
    # K and V are 1,024,000 bytes: three buffers make 3 MB.
    fields = Bench(0).run(PROBLEM, Right(), "default")
    assert gpu.made == [PROBLEM] * 3
    assert fields["status"] == "ok"
    assert 0 < fields.pop("relative_error") < 1e-3
    assert fields.pop("lse_error") < 1e-6
    assert fields == {
        "source": "measured",
        "decomposition": "one_cta_per_tile",
        "kv_bytes": 1_024_000,
        "config": CONFIG.to_dict(),
        "config_choice": "default",
        "checked_heads": 4,
        "total_heads": 4,
        **timing_fields(STEADY, 1_024_000, 8.0),
        "quantisation_efficiency": pytest.approx(4 / 132),
        "status": "ok",
    }
    assert row(fields).latency_us == 10.0


def test_timing_fields():
    timing = Timing((9.0, 10.0, 11.0, 14.0), 32)
    assert timing_fields(timing, 21_000_000, 7.0) == {
        "latency_us": 10.5,
        "latency_p25_us": 9.75,
        "latency_p75_us": 11.75,
        "latency_ci_low_us": 9.0,
        "latency_ci_high_us": 14.0,
        "samples": 4,
        "launches_per_sample": 32,
        "bandwidth_tb_s": pytest.approx(2.0),
        "read_floor_us": 7.0,
        "read_floor_share": pytest.approx(7.0 / 10.5),
    }


def test_the_next_kernel_of_a_problem_finds_its_inputs_and_its_floor(gpu):
    bench = Bench(0)
    bench.run(PROBLEM, Right(), "default")
    bench.run(PROBLEM, Right(), "default")
    assert (len(gpu.made), gpu.floors) == (3, 1)
    gpu.made.clear()
    other = replace(PROBLEM, dtype="bf16")
    bench.run(other, Right(), "default")
    assert gpu.made == [other] * 3
    assert gpu.floors == 2


def test_the_fastest_candidate_is_measured(gpu, monkeypatch):
    def fastest(candidates: dict[object, Callable[[], object]]) -> tuple[object, int]:
        assert list(candidates) == [CONFIG, FASTER]
        for prepare in candidates.values():
            prepare()
        return FASTER, 2

    monkeypatch.setattr(module, "fastest", fastest)
    kernel = Right()
    fields = Bench(0).run(PROBLEM, kernel, "best")
    assert (fields["config"], fields["config_choice"]) == (FASTER.to_dict(), "best of 2")
    # Each candidate over all three buffers, then the best once more.
    assert kernel.prepared == [CONFIG] * 3 + [FASTER] * 6


@pytest.mark.usefixtures("gpu")
def test_resident_ctas_count_as_slots():
    class Resident(Right):
        def default_config(self, problem: AttentionProblem, gpu: GpuSpec) -> KernelConfig:
            return replace(CONFIG, ctas_per_sm=2)

    assert Bench(0).run(PROBLEM, Resident(), "default")["quantisation_efficiency"] == pytest.approx(4 / 264)


def test_unsupported_says_the_kernels_reason_and_allocates_nothing(gpu):
    fields = Bench(0).run(replace(PROBLEM, head_dim=256), Right(), "default")
    assert (fields["status"], fields["reason"]) == ("unsupported", "right knows no head_dim 256")
    assert gpu.made == []
    assert "latency_us" not in fields
    fields = Bench(0).run(PROBLEM, kernel("reference"), "default")
    assert fields["status"] == "unsupported"
    assert fields["reason"].startswith("reference is there to check others, it cannot be captured in a CUDA graph")
    assert gpu.made == []


def test_out_of_memory_says_both_numbers(gpu):
    gpu.free = 20e9
    problem = AttentionProblem(4, 32, 32, 1_000_000, 64)
    bench = Bench(0)
    fields = bench.run(problem, Right(), "default")
    # K and V: 2 x 4 x 10^6 x 32 x 64 x 2 bytes. The check: a head in fp64, 10^6 x (2 x 64 + 3) x 8, and 512 MB.
    assert (fields["status"], fields["reason"]) == (
        "out_of_memory",
        "needs 34.3 GB (K and V 32.8 GB, the rest for the check) and the GPU has 20.0 GB free: "
        "choose a smaller context, batch or number of KV heads",
    )
    assert row(fields).status == "out_of_memory"
    assert gpu.made == []
    # What does not fit leaves the bench usable.
    assert bench.run(PROBLEM, Right(), "default")["status"] == "ok"


@pytest.mark.parametrize(("free", "fits"), [(34_327_999_999, False), (34_328_000_000, True)])
def test_memory_shortage_to_the_byte(gpu, free, fits):
    gpu.free = free
    assert (Bench(0)._memory_shortage(AttentionProblem(4, 32, 32, 1_000_000, 64)) is None) == fits


def test_a_ragged_batch_needs_room_for_its_longest_sequence_in_every_row(gpu):
    gpu.free = 20e9
    ragged = AttentionProblem(4, 32, 32, (1, 1, 1, 1_000_000), 64)
    assert "K and V 32.8 GB" in (Bench(0)._memory_shortage(ragged) or "")


def test_copies_leave_a_fifth_of_the_memory_free(gpu, monkeypatch):
    monkeypatch.setattr(module, "_COLD_BYTES", 400e6)
    # 1.6 MB of 2 MB hold one copy of 1,024,000 bytes.
    monkeypatch.setattr(Bench, "_memory_shortage", lambda self, problem: None)
    gpu.free = 2e6
    Bench(0).run(PROBLEM, Right(), "default")
    assert len(gpu.made) == 1


def test_the_buffers_exceed_the_l2_several_times(gpu, monkeypatch):
    monkeypatch.setattr(module, "_COLD_L2_MULTIPLE", 6)
    monkeypatch.setattr(module, "make_inputs", lambda *_, **__: gpu.made.append(1))
    bench = Bench(0)
    bench.spec = replace(H200, l2_mb=100)
    assert bench._load(PROBLEM) is None
    assert len(gpu.made) == 586  # 600 MB over 1,024,000 bytes


class Wrong(Right):
    def spoil(self, inputs: AttentionInputs) -> None:
        inputs.out[1, 0, 3] *= 1.1


class Lazy(Right):
    def spoil(self, inputs: AttentionInputs) -> None:
        inputs.out[0, 0, 0, 0] = float("nan")


class Drifting(Right):
    """Right the first time only."""

    def spoil(self, inputs: AttentionInputs) -> None:
        if self.launches > 1:
            inputs.out.mul_(1.05)


class Failing(Right):
    def spoil(self, inputs: AttentionInputs) -> None:
        if self.launches > 1:
            inputs.out[0, 0, 0, 0] = float("nan")


def test_a_wrong_kernel_is_not_timed(gpu):
    # A tenth of one of two query heads that share a KV head.
    for wrong, error in [(Wrong(), pytest.approx(0.07, rel=0.2)), (Lazy(), math.inf)]:
        fields = Bench(0).run(PROBLEM, wrong, "default")
        assert fields["status"] == "incorrect"
        assert fields["relative_error"] == error
        assert fields["reason"].endswith("against the fp64 reference is above 2e-03")
        assert "latency_us" not in fields
        assert wrong.launches == 1
    assert gpu.floors == 0


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_writes_nothing_does_not_pass_on_the_last_one_s_output():
    class Idle(Right):
        def prepare(self, inputs: AttentionInputs, config: KernelConfig | None) -> Callable[[], Any]:
            return lambda: None

    bench = Bench(0)
    assert bench.run(PROBLEM, Right(), "default")["status"] == "ok"
    assert bench.run(PROBLEM, Idle(), "default")["status"] == "incorrect"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("wrong", "number"), [(Drifting(), "5.0e-02"), (Failing(), "nan")])
def test_an_output_that_changes_while_it_is_timed_is_wrong(wrong, number):
    fields = Bench(0).run(PROBLEM, wrong, "default")
    assert fields["status"] == "incorrect"
    assert fields["reason"] == f"the output after timing differs from the checked one by a relative {number}"


def test_a_wide_interval_is_noisy(gpu):
    gpu.timing = Timing((10.0, 12.0) * 10, 64)
    fields = Bench(0).run(PROBLEM, Right(), "default")
    assert fields["status"] == "noisy"
    assert (
        fields["reason"]
        == "the confidence interval of the median reaches 9.1% to one side after 20 samples, above 0.5%"
    )
    assert fields["latency_us"] == 11.0


def test_the_state_of_the_gpu_is_in_the_row(gpu, monkeypatch):
    state = SimpleNamespace(sm_clock_mhz=1755, temperature_c=44, power_w=412.5, throttle_reasons=["power cap"])
    monkeypatch.setattr(module, "_open_nvml", lambda device: SimpleNamespace(state=lambda: state))
    fields = Bench(0).run(PROBLEM, Right(), "default")
    assert {name: fields[name] for name in vars(state)} == vars(state)
    assert row(fields).sm_clock_mhz == 1755
