"""Timers, the energy counter and hardware counters."""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.errors import UserError
from leanbench.doctor import instruments
from leanbench.doctor.instruments import counters_are_restricted, smallest_step
from leanbench.doctor.spread import process_spread
from leanbench.measure.counters import ADMINISTRATORS_ONLY, CountedKernel, CountedLaunch
from leanbench.measure.energy_meter import EnergyCalibration
from leanbench.records.standing import recorded_spread


def test_smallest_step():
    assert smallest_step([1024, 1056, 1024, 1120]) == 32
    assert smallest_step([1024, 1024]) is None
    assert smallest_step([]) is None


@given(st.lists(st.integers(0, 10**6), min_size=2, unique=True), st.integers(1, 500))
def test_the_smallest_step_of_a_clock_is_a_multiple_of_its_tick(ticks, tick_ns):
    step = smallest_step(tick * tick_ns for tick in ticks)
    assert step is not None
    assert step % tick_ns == 0
    assert step == tick_ns * min(
        abs(earlier - later) for earlier, later in itertools.combinations(ticks, 2)
    )


@pytest.mark.parametrize(
    ("distances_ms", "status", "step_ns"),
    [
        ((0.001024, 0.001056, 0.00112), "ok", 32),
        ((0.001, 0.0015), "ok", 500),
        ((0.001, 0.006), "note", 5000),
        ((0.001, 0.001), "note", None),
    ],
)
def test_event_resolution(machine, monkeypatch, distances_ms, status, step_ns):
    distances = itertools.cycle(distances_ms)

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, end) -> float:
            return next(distances)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    finding = instruments.event_resolution(machine)
    assert (finding.status, finding.values) == (status, {"event_step_ns": step_ns})


@pytest.mark.parametrize(("tick_ns", "status"), [(32, "ok"), (1000, "ok"), (1_000_000, "note")])
def test_timer_tick(machine, monkeypatch, tick_ns, status):
    def tick(device):
        return tick_ns * (str(device) == "cuda:0")

    monkeypatch.setattr("leanbench.measure.timeline.timer_tick_ns", tick)
    finding = instruments.timer_tick(machine)
    assert finding.status == status
    assert f"ticks every {tick_ns} ns" in finding.text


TICKS = "the energy counter ticks every 100 ms"


@pytest.mark.parametrize(
    ("calibration", "status", "text"),
    [
        (EnergyCalibration(100.2, 76.4, 76.1), "ok", f"{TICKS}, 76 W idle"),
        (
            EnergyCalibration(100.2, 276.4, 276.1, ("the idle power moved",)),
            "note",
            f"{TICKS}, 276 W idle; the idle power moved",
        ),
        (EnergyCalibration(None, None, None, ("no counter",)), "note", "no counter"),
    ],
)
def test_energy_counter(machine, nvml, monkeypatch, calibration, status, text):
    nvml()
    monkeypatch.setattr("leanbench.measure.energy_meter.calibrate", lambda nvml: calibration)
    finding = instruments.energy_counter(machine)
    assert (finding.status, finding.text) == (status, text)
    assert finding.values["energy_tick_ms"] == calibration.tick_ms


NOBODY, ADMIN, PERFMON = "0000000000000000", "0000000000200000", "0000004000000000"


@pytest.mark.parametrize(
    ("option", "capabilities", "restricted"),
    [
        ("1", NOBODY, True),
        ("1", "00000000a80425fb", True),  # a container's root
        ("1", ADMIN, False),
        ("1", PERFMON, False),
        ("0", NOBODY, False),
    ],
)
def test_who_may_read_counters(tmp_path, option, capabilities, restricted):
    params = tmp_path / "driver" / "nvidia" / "params"
    params.parent.mkdir(parents=True)
    params.write_text(
        f"ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: {option}\nTCEBypassMode: 0\n"
    )
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(
        f"Name:\tpython\nCapPrm:\t{ADMIN}\nCapEff:\t{capabilities}\n"
    )
    assert counters_are_restricted(tmp_path) is restricted
    # Without a driver nothing is.
    assert not counters_are_restricted(tmp_path / "self")


@pytest.mark.parametrize(
    ("ncu", "restricted", "status", "text"),
    [
        (None, False, "note", "Nsight Compute is not here, so no hardware counters"),
        (
            *("/bin/ncu", True, "note"),
            "/bin/ncu is here, but the driver lets only administrators read hardware counters",
        ),
        (
            *("/bin/ncu", False, "ok"),
            "/bin/ncu is here and seems allowed to read counters; --deep tries it",
        ),
    ],
)
def test_hardware_counters_by_looking(machine, monkeypatch, ncu, restricted, status, text):
    monkeypatch.setattr(instruments, "find_ncu", lambda: ncu)
    monkeypatch.setattr(instruments, "counters_are_restricted", lambda: restricted)
    asked = "nobody asked for a try"
    monkeypatch.setattr(instruments, "count", lambda *arguments: pytest.fail(asked))
    finding = instruments.hardware_counters(machine)
    assert (finding.status, finding.text) == (status, text)
    if restricted:
        fix = "run as root, or set the driver's option NVreg_RestrictProfiling"
        assert (finding.fix or "").startswith(fix)


def test_hardware_counters_by_trying(machine, monkeypatch):
    machine.deep = True
    kv_bytes = 2 * 8 * 4096 * 128 * 2
    calls = []

    def count(problem, kernel, config, device_index):
        calls.append((problem.kv_bytes, kernel, config.ctas_per_sm, device_index))
        return answers.pop()

    answers = [
        ADMINISTRATORS_ONLY,
        CountedLaunch((CountedKernel("k", 0.125, kv_bytes, kv_bytes // 100, 10.0),)),
    ]
    monkeypatch.setattr(instruments, "find_ncu", lambda: "/bin/ncu")
    monkeypatch.setattr(instruments, "count", count)
    finding = instruments.hardware_counters(machine)
    assert finding.status == "ok"
    moves = "lean moves 1.010 times the bytes of K and V, and its warps fill 12% of an SM"
    assert moves in finding.text
    assert calls == [(kv_bytes, "lean", 1, 0)]
    finding = instruments.hardware_counters(machine)
    assert finding.status == "note"
    assert finding.text == f"hardware counters cannot be read: {ADMINISTRATORS_ONLY}"
    # Without ncu nothing is tried.
    monkeypatch.setattr(instruments, "find_ncu", lambda: None)
    assert instruments.hardware_counters(machine).status == "note"


def test_the_spread_between_processes_is_recorded_for_sweeps(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    # 10 and 100 us in three processes: the second differs by more.
    answers = iter([[10.0, 100.0], [10.1, 102.0], [10.0, 99.0]])
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=f"a note\n{json.dumps(next(answers))}\n")

    monkeypatch.setattr("leanbench.doctor.spread.subprocess.run", run)
    assert recorded_spread(machine.gpu.uuid) is None
    finding = process_spread(machine)
    assert (finding.status, finding.values) == ("ok", {"process_spread": pytest.approx(0.015)})
    assert "differs by ±1.50% between 3 processes" in finding.text
    assert asked == [[sys.executable, "-P", "-m", "leanbench.doctor.spread"]] * 3
    assert recorded_spread(machine.gpu.uuid) == pytest.approx(0.015)
    assert recorded_spread("GPU-b") is None
    assert recorded_spread(None) is None
    # A damaged file is none.
    (tmp_path / "home" / "spreads.json").write_text("[")
    assert recorded_spread(machine.gpu.uuid) is None


def test_a_process_that_cannot_time_is_a_sentence(machine, monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no GPU\n")
    monkeypatch.setattr("leanbench.doctor.spread.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"times lean failed: RuntimeError: no GPU$"):
        process_spread(machine)
