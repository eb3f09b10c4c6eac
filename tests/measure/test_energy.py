"""Sustained latency and energy on a simulated GPU with known true values."""

import math
import re
import statistics
from contextlib import nullcontext
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import SimulatedGpu

from leanbench.core.errors import UserError
from leanbench.measure.energy import check_window, measure_window, sustained_outcome
from leanbench.measure.energy_meter import (
    EnergyCalibration,
    SustainedReading,
    calibrate,
    integrated_power_w,
)
from leanbench.records.row import Row

LAUNCHES = 40


def calibrated(gpu: Any, seconds: float = 1.8) -> EnergyCalibration:
    return calibrate(gpu, seconds, now=gpu.now, sleep=gpu.sleep)


def measured(
    gpu: Any, calibration: EnergyCalibration | None, window_s: float = 2.0, **options: Any
) -> SustainedReading:
    nvml = options.pop("nvml", gpu)
    own = {"record": gpu.record, "now": gpu.now, "sleep": gpu.sleep, **options}
    return measure_window(gpu.replay, LAUNCHES, nvml, calibration, window_s, **own)


def measured_gain(reading: SustainedReading) -> float:
    assert reading.energy_mj is not None
    assert reading.energy_by_power_mj is not None
    return reading.energy_by_power_mj / reading.energy_mj


def after(gpu: SimulatedGpu, seconds: float) -> float:
    """Return a time in the window of `measured`, after a warm-up of a second."""
    return gpu.time_s + 1.0 + seconds


@given(
    tick_s=st.floats(0.01, 0.1),
    phase_s=st.floats(0.001, 0.1),
    replay_s=st.floats(0.0005, 0.02),
    replay_jitter=st.floats(0, 0.2),
    load_w=st.floats(90, 1000),
    lag_s=st.floats(0.01, 0.15),
    nvml_call_s=st.floats(0.00002, 0.001),
    oversleep_s=st.floats(0, 0.001),
    window_s=st.floats(2.0, 3.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(40), report_multiple_bugs=False)
def test_energy_of_a_random_load_within_one_percent(window_s: float, **figures: Any):
    gpu = SimulatedGpu(**figures)
    calibration = calibrated(gpu)
    # Polls, every 2 to 5 ms, see the ticks.
    assert calibration.tick_ms == pytest.approx(gpu.tick_s * 1000, abs=5)
    assert calibration.idle_power_w == pytest.approx(gpu.idle_w, rel=0.01)
    started_s = gpu.time_s
    reading = measured(gpu, calibration, window_s)
    # Five standard deviations of the mean of this many replays with random lengths.
    chance = 5 * gpu.replay_jitter / math.sqrt(3 * window_s / gpu.replay_s)
    assert reading.sustained_us == pytest.approx(gpu.replay_s / LAUNCHES * 1e6, rel=1e-6 + chance)
    assert reading.energy_mj == pytest.approx(gpu.load_w * reading.sustained_us / 1000, rel=0.01)
    above_idle_w = gpu.load_w - gpu.idle_w
    tolerance_w = 0.01 * (gpu.load_w + gpu.idle_w)
    assert reading.energy_above_idle_mj == pytest.approx(
        above_idle_w * reading.sustained_us / 1000, abs=tolerance_w * reading.sustained_us / 1000
    )
    assert reading.energy_by_power_mj == pytest.approx(reading.energy_mj, rel=0.01)
    assert reading.warnings == []
    assert window_s <= reading.window_s + 1e-3
    assert reading.window_s < window_s + 2 * gpu.tick_s + 0.02
    # A replay is timed alone before the queue is filled, and the queue is empty at the end.
    probed_s = started_s + 3 * gpu.replay_s
    assert not [idle_s for idle_s in gpu.went_idle if probed_s < idle_s < gpu.time_s], (
        "the GPU was without work"
    )
    assert gpu.longest_queue <= 256


def test_readings_of_the_h200_s_figures():
    gpu = SimulatedGpu(
        clocks=[(0, 1980), (3.6, 1755)], reasons=[(0, []), (4.0, ["sw_power_cap"]), (4.2, [])]
    )
    calibration = calibrated(gpu)
    assert calibration.idle_power_by_reading_w == pytest.approx(80)
    reading = measured(gpu, calibration)
    assert reading.energy_mj == pytest.approx(60, rel=0.002)  # 600 W x 4 ms over 40 launches
    assert reading.power_w == pytest.approx(600, rel=0.002)
    assert reading.idle_power_w == calibration.idle_power_w
    assert (reading.clock_mhz, reading.throttle_reasons) == (1755, ["sw_power_cap"])
    seconds, clocks_mhz, powers_w = zip(*reading.states, strict=True)
    assert (seconds[0], seconds[-1]) == (0, pytest.approx(reading.window_s, abs=0.02))
    assert {*clocks_mhz} == {1755, 1980}
    assert statistics.median(powers_w) == pytest.approx(600, rel=0.02)
    # Two seconds are 20 ticks. Whether the last one is still ahead depends on a millisecond.
    assert min(abs(reading.window_s - ticks_s) for ticks_s in (2.0, 2.1)) < 0.004


def test_windows_lie_between_ticks_and_hold_replays():
    # With ticks of half a second, a window between ticks would be wrong by up to a quarter.
    gpu = SimulatedGpu(tick_s=0.5)
    reading = measured(gpu, calibrated(gpu, seconds=3), window_s=2.2)
    assert reading.window_s == pytest.approx(2.5, abs=0.004)
    assert reading.energy_mj == pytest.approx(60, rel=0.002)
    gpu = SimulatedGpu(replay_s=5.0)
    with pytest.raises(UserError, match="a window of 2 s does not hold two replays"):
        measured(gpu, None, nvml=None)
    gpu = SimulatedGpu(nvml_call_s=0.08)
    reading = measured(gpu, EnergyCalibration(100.0, 80.0, 80.0))
    assert any("ran out of queued work" in warning for warning in reading.warnings)
    assert any("NVML answered too slowly" in warning for warning in reading.warnings)


def test_latency_of_a_gpu_that_slows_down_is_the_mean():
    gpu = SimulatedGpu()
    calibration = calibrated(gpu)
    slow_from_s = after(gpu, 1.0)
    replay = gpu.replay

    def slowing() -> None:
        gpu.replay_s = 0.005 if gpu.time_s > slow_from_s else 0.004
        replay()

    gpu.replay = slowing  # type: ignore[method-assign]
    reading = measured(gpu, calibration)
    launches = 0.95 / 0.0001 + 1.05 / 0.000125  # the tick comes within 0.1 s of the warm-up's end
    assert reading.sustained_us == pytest.approx(2e6 / launches, rel=0.02)
    assert reading.energy_mj == pytest.approx(600 * reading.sustained_us / 1000, rel=0.002)


@pytest.mark.parametrize("replay_s", [0.0002, 0.004, 0.3])
def test_at_least_two_replays_are_queued_and_no_pile(replay_s: float):
    gpu = SimulatedGpu(replay_s=replay_s, nvml_call_s=0.001)
    calibration = calibrated(gpu)
    gpu.sleeps.clear()
    short: list[int] = []
    pause = gpu.sleep

    def watch(seconds: float) -> None:
        short.append(len(gpu._ends))
        pause(seconds)
        short.append(len(gpu._ends))

    gpu.sleep = watch  # type: ignore[method-assign]
    measured(gpu, calibration, window_s=3.0)
    assert min(short) >= 2
    assert gpu.longest_queue * replay_s <= max(0.03 + replay_s, 3 * replay_s)
    # Neither a busy loop nor a sleep as long as the queue.
    assert len(gpu.sleeps) < 4.2 / 0.0015


def test_without_nvml_or_its_readings_there_is_no_energy():
    gpu = SimulatedGpu()
    reading = measured(gpu, None, nvml=None)
    assert reading.sustained_us == pytest.approx(100)
    assert reading.window_s == pytest.approx(2.0, abs=0.01)
    assert reading == SustainedReading(
        reading.sustained_us, reading.window_s, None, None, None, None, None, None, warnings=[]
    )
    gpu = SimulatedGpu(has_counter=False, power_gain=None, clocks=[(0, None)], reasons=[(0, None)])
    calibration = calibrated(gpu)
    assert (calibration.tick_ms, calibration.idle_power_w) == (None, None)
    reading = measured(gpu, calibration)
    assert reading.sustained_us == pytest.approx(100)
    assert (reading.energy_mj, reading.energy_above_idle_mj, reading.power_w) == (None, None, None)
    assert (reading.clock_mhz, reading.throttle_reasons) == (None, None)
    assert reading.warnings == [
        "the GPU has no energy counter, and NVML has no instantaneous power: there is no energy"
    ]


def test_no_counter_leaves_the_power():
    gpu = SimulatedGpu(has_counter=False)
    calibration = calibrated(gpu)
    assert (calibration.tick_ms, calibration.idle_power_w) == (None, pytest.approx(80))
    reading = measured(gpu, calibration)
    assert reading.energy_mj == pytest.approx(60, rel=0.01)
    assert reading.energy_above_idle_mj == pytest.approx(52, rel=0.01)
    assert reading.energy_by_power_mj is None  # it is no second reading
    assert reading.warnings == [
        "the GPU has no energy counter: energy comes from the instantaneous power alone"
    ]


def test_a_counter_without_instantaneous_power_and_a_gpu_without_calibration():
    gpu = SimulatedGpu(power_gain=None)
    reading = measured(gpu, calibrated(gpu))
    assert reading.energy_mj == pytest.approx(60, rel=0.002)
    assert reading.energy_above_idle_mj == pytest.approx(52, rel=0.002)
    assert (reading.energy_by_power_mj, reading.warnings) == (None, [])
    reading = measured(SimulatedGpu(), None)
    assert reading.energy_mj == pytest.approx(60, rel=0.01)
    assert (reading.energy_above_idle_mj, reading.energy_by_power_mj) == (None, None)
    assert "was not calibrated" in reading.warnings[0]


@pytest.mark.parametrize(("tick_s", "moved"), [(10.0, 0), (0.8, 2)])
def test_calibration_notices_a_counter_that_hardly_moves(tick_s: float, moved: int):
    gpu = SimulatedGpu(tick_s=tick_s, phase_s=min(10.0, tick_s * 1.1))
    calibration = calibrated(gpu)
    assert (calibration.tick_ms, calibration.idle_power_w) == (None, pytest.approx(80))
    (warning,) = calibration.warnings
    assert warning.startswith(f"NVML's energy counter moved {moved} times in 1.8 s: ")


def test_calibration_notices_a_counter_that_goes_back_and_a_gpu_that_is_not_idle():
    calibration = calibrated(SimulatedGpu(counter_faults=[(1.0, -5e5)]))
    assert (calibration.tick_ms, calibration.idle_power_w) == (None, pytest.approx(80))
    assert calibration.warnings[0].startswith("NVML's energy counter went back from ")
    gpu = SimulatedGpu(lag_s=1.0)
    gpu._power_w = 300.0  # its load has ended
    calibration = calibrated(gpu)
    assert len(calibration.warnings) == 1
    assert calibration.warnings[0].startswith("power went from 2")
    assert measured(gpu, calibration, warm_up_s=6).warnings == list(calibration.warnings)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        # The driver was reloaded; less than the window uses, so it ends above the start.
        (lambda gpu: (after(gpu, 1.0), -gpu._energy_mj), "went back from "),
        (lambda gpu: (after(gpu, 1.0), -5e5), "went back from "),
        (lambda gpu: (after(gpu, -0.5), None), "stood still for 1.0 s under load"),
    ],
)
def test_a_counter_that_fails_under_load(fault: Any, sentence: str):
    gpu = SimulatedGpu()
    calibration = calibrated(gpu)
    gpu.counter_faults = [fault(gpu)]
    reading = measured(gpu, calibration)
    assert reading.energy_mj == pytest.approx(60, rel=0.01)
    assert reading.energy_by_power_mj is None
    assert len(reading.warnings) == 1
    assert sentence in reading.warnings[0]
    assert reading.warnings[0].endswith("energy comes from the instantaneous power alone")


def test_idle_power_is_taken_off_as_it_was_read():
    gpu = SimulatedGpu(power_gain=0.96)
    calibration = calibrated(gpu)
    assert calibration.idle_power_by_reading_w == pytest.approx(76.8)
    assert measured(gpu, calibration).energy_above_idle_mj == pytest.approx(52, rel=0.002)
    gpu.sleep(2.0)
    gpu.counter_faults = [(after(gpu, 1.0), -5e5)]
    assert measured(gpu, calibration).energy_above_idle_mj == pytest.approx(0.96 * 52, rel=0.01)


def test_power_is_integrated_by_trapezoids():
    assert integrated_power_w([(1.0, 100.0), (2.0, 300.0), (2.5, 300.0)]) == pytest.approx(
        350 / 1.5
    )
    assert integrated_power_w([(1.0, 100.0)]) is None


@pytest.mark.parametrize(
    ("gain", "flagged"), [(0.96, False), (1.04, False), (0.93, True), (1.07, True)]
)
def test_divergence_of_the_two_readings(gain: float, flagged: bool):
    gpu = SimulatedGpu(power_gain=gain)
    reading = measured(gpu, calibrated(gpu))
    assert reading.energy_mj == pytest.approx(60, rel=0.002)
    assert reading.energy_by_power_mj == pytest.approx(60 * gain, rel=0.002)
    assert len(reading.warnings) == flagged
    if flagged:
        share, power = abs(measured_gain(reading) - 1), 600 * gain
        assert re.search(f"by {share:.1%}: .* 600 W by .*, {power:.0f} W by", reading.warnings[0])


def test_idle_power_above_the_load_is_no_energy_above_idle():
    gpu = SimulatedGpu(load_w=200)
    reading = measured(gpu, EnergyCalibration(100.0, 350.0, 350.0))
    assert reading.energy_mj == pytest.approx(20, rel=0.002)
    assert reading.energy_above_idle_mj is None
    assert reading.warnings == [
        "200 W under load is below the 350 W of the GPU that was called idle"
    ]


@pytest.mark.parametrize(
    ("window_s", "tick_ms", "words"),
    [
        *((window_s, None, None) for window_s in (2.0, 3600)),
        *((window_s, 50 * window_s, None) for window_s in (2, 4.0, 10.0)),
        (2.0, 101.9, None),
        (1.0, None, "a window of 1 s .* in steps: give it 2 to 3600 s"),
        (1.9, 20.0, "a window of 1.9 s .* every 20 ms: give it 2 to"),
        (3.8, 200.0, "a window of 3.8 s .* every 200 ms: give it 4 to"),
        (0.0, 100.0, "give it 2 to "),
        (-5.0, 100.0, "give it 2 to "),
        (math.inf, None, "a window of inf s"),
        (math.nan, 100.0, "a window of nan s"),
    ],
)
def test_windows(window_s: float, tick_ms: float | None, words: str | None):
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_window(window_s, tick_ms)


def test_row_fields():
    reading = SustainedReading(
        100.0, 2.1, 1755, 600.0, 60.0, 52.0, 61.0, ["sw_power_cap"], [], idle_power_w=80.0
    )
    floor = SustainedReading(90.0, 2.0, 1755, 500.0, 45.0, 38.0, 45.0, [], [])
    fields = sustained_outcome([reading], floor).fields()
    energies = {"": 60.0, "_above_idle": 52.0, "_by_power": 61.0, "_floor": 45.0}
    assert fields == {
        "sustained_us": 100.0,
        "sustained_s": 2.1,
        "sustained_clock_mhz": 1755,
        "sustained_power_w": 600.0,
        "idle_power_w": 80.0,
        "energy_delay_mj_us": 6000.0,
        **{f"energy{kind}_mj": energy_mj for kind, energy_mj in energies.items()},
    }
    assert set(fields) <= set(Row.model_fields)
