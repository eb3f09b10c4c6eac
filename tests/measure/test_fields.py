"""Row fields and verdicts from timings, and the limits of warnings."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from leanbench.gpu.catalogue import find
from leanbench.gpu.nvml import GpuProcess, GpuState
from leanbench.measure import judge
from leanbench.measure.candidate import sample_fields, timing_outcome
from leanbench.measure.timing import Effort, Timing

#: 4.8 TB/s, 50 MB of L2.
H200 = replace(find("h200"), bandwidth_tb_s=4.8, l2_mib=50)
L2_BYTES = 50 * 2**20
EFFORT = Effort(relative_ci=0.01, min_samples=6, max_samples=20)
STATE = ("sm_clock_mhz", "temperature_c", "power_w", "throttle_reasons")


def state(
    clock_mhz: Any = 1980, temperature_c: Any = 40, power_w: Any = 300.0, reasons: Any = None
):
    return GpuState(clock_mhz, 2619, temperature_c, power_w, reasons)


def timing(
    *samples_us: float, states: Sequence[GpuState | None] | None = None, throttled: int = 0
) -> Timing:
    count = len(samples_us)
    return Timing(
        32, list(samples_us), list(range(count)), list(states or [None] * count), throttled
    )


def test_the_figures_of_a_timing():
    assert timing_outcome(timing(9.0, 10.0, 11.0, 14.0, throttled=3), 21_000_000, 7.0).fields() == {
        "latency_us": 10.5,
        "latency_p25_us": 9.75,
        "latency_p75_us": 11.75,
        "latency_ci_low_us": 9.0,
        "latency_ci_high_us": 14.0,
        "samples": 4,
        "launches_per_sample": 32,
        "throttled_samples": 3,
        "bandwidth_tb_s": pytest.approx(2.0),
        "read_floor_us": 7.0,
        "read_floor_share": pytest.approx(7.0 / 10.5),
    }


def test_states_become_medians_the_highest_temperature_and_all_reasons():
    states = [
        state(1900, 41, 300.0, ["sw_power_cap"]),
        None,
        state(1980, 44, 310.0, ["hw_slowdown", "sw_power_cap"]),
        state(1980, 43, 350.0, []),
    ]
    fields = timing_outcome(timing(*[10.0] * 4, states=states), 1, 1.0).fields()
    expected = [1980, 44, 310.0, ["hw_slowdown", "sw_power_cap"]]
    assert [fields[name] for name in STATE] == expected
    fields = timing_outcome(timing(10.0, states=[state(None, None, None, None)]), 1, 1.0).fields()
    assert [fields[name] for name in STATE] == [None] * 4
    states = [state(reasons=None), state(reasons=[])]
    assert timing_outcome(timing(10.0, 10.0, states=states), 1, 1.0).throttle_reasons == []


def test_raw_samples_line_up():
    raw = sample_fields(
        timing(10.12345678, 10.5, 11.0, states=[state(1900), None, state(None)]), (10.98765432,)
    )
    assert raw == {
        "samples_us": [10.1235, 10.5, 11.0],
        "rounds": [0, 1, 2],
        "sm_clock_mhz": [1900, None, None],
        "crosscheck_us": [10.9877],
    }


def test_noise_by_the_stopping_rule():
    # The interval of 6 samples is their extremes.
    assert judge.noise(timing(*[100.0] * 5, 101.0), EFFORT) is None
    assert re.search(
        "1.1% .* 6 samples, above 1.0%", str(judge.noise(timing(*[100.0] * 5, 101.1), EFFORT))
    )


@pytest.mark.parametrize(
    "reason",
    ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"],
)
def test_a_gpu_in_trouble_is_noisy_however_narrow_the_interval(reason):
    states = [*[state(reasons=[])] * 5, state(reasons=["sw_power_cap", reason])]
    noisy = str(judge.noise(timing(*[100.0] * 6, states=states, throttled=10), EFFORT))
    assert noisy.startswith(f"the GPU lowered its clocks ({reason}) and 10 repeats ")


@pytest.mark.parametrize("reasons", [None, [], ["sw_power_cap"], ["sync_boost"]])
def test_the_power_limit_is_no_trouble(reasons):
    assert judge.noise(timing(*[100.0] * 6, states=[state(reasons=reasons)] * 6), EFFORT) is None


IDLE = GpuProcess(7, "idle", 0)


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        (None, None),
        ([], None),
        ([IDLE, GpuProcess(8, "unknown", None)], None),
        ([IDLE, GpuProcess(8, "train", 1)], "train (pid 8)"),
        (
            [GpuProcess(pid, None if pid == 2 else f"p{pid}", 50) for pid in (1, 2, 3, 4)],
            "p1 (pid 1), a program (pid 2), p3 (pid 3)",
        ),
    ],
)
def test_only_programs_that_used_the_sms_disturb(processes, names):
    reason = judge.disturbance(processes)
    assert reason == names if names is None else f": {names};" in str(reason)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_nothing_reads_faster_than_the_floor(cache):
    small = 1_000_000
    assert judge.impossible(97.0, 100.0, small, H200, cache) is None
    alarm = str(judge.impossible(96.99, 100.0, small, H200, cache))
    assert alarm.startswith("96.99 µs beats a kernel that only reads the same bytes (100.00 µs)")


def test_nothing_large_reads_faster_than_the_memory_nor_does_the_floor():
    large = 480_000_000  # 100 µs at 4.8 TB/s
    assert judge.impossible(100.0, 100.0, large, H200, "cold") is None
    alarm = judge.impossible(99.0, 100.0, large, H200, "cold")
    assert alarm is not None
    assert "4.85 TB/s is above the 4.8 TB/s" in alarm
    # The L2 is no memory, and holds part of slightly larger data.
    assert judge.impossible(99.0, 100.0, large, H200, "warm") is None
    assert judge.impossible(1.0, 1.0, 2 * L2_BYTES, H200, "cold") is None
    assert judge.impossible(1.0, 1.0, 2 * L2_BYTES + 1, H200, "cold") is not None
    # The floor read half of the bytes, so every share of it was half of the truth.
    large = 480_000_000
    alarm = judge.impossible(110.0, 50.0, large, H200, "cold")
    assert alarm is not None
    assert "9.60 TB/s of the read floor is above the 4.8 TB/s" in alarm
    assert judge.impossible(110.0, 99.9, large, H200, "cold") is not None
    assert judge.impossible(110.0, 50.0, large, H200, "warm") is None
    assert judge.impossible(110.0, 5.0, 2 * L2_BYTES, H200, "cold") is None
    unknown = replace(H200, source="driver; assumed: bandwidth")
    assert judge.impossible(110.0, 50.0, large, unknown, "cold") is None


def test_lowered_clocks_in_samples_that_count_are_said():
    assert judge.throttle_warning(timing(10.0)) is None
    assert judge.throttle_warning(timing(10.0, states=[state(reasons=[])], throttled=4)) is None
    states = [state(reasons=["sw_power_cap"]), None, state(reasons=["hw_slowdown"])]
    warning = str(judge.throttle_warning(timing(10.0, 10.0, 10.0, states=states, throttled=10)))
    assert re.search(r"lowered \(hw_slowdown, sw_power_cap\) in .*, after 10 were", warning)


def test_slow_floors_large_warm_caches_and_short_rotations_are_warnings():
    # 3.6 TB/s are three quarters of 4.8.
    assert judge.floor_warning(200.0, 720_000_000, H200, "cold") is None
    warning = str(judge.floor_warning(201.0, 720_000_000, H200, "cold"))
    assert warning.startswith("a kernel that only reads gets 3.58 of 4.8 TB/s: ")
    assert judge.floor_warning(201.0, 720_000_000, H200, "warm") is None
    # Small reads are far below it on any GPU.
    assert judge.floor_warning(1000.0, 499_999_999, H200, "cold") is None
    assert judge.floor_warning(1000.0, 500_000_000, H200, "cold") is not None
    assert judge.warm_warning(L2_BYTES // 2, H200, "warm") is None
    assert judge.warm_warning(L2_BYTES, H200, "cold") is None
    warning = str(judge.warm_warning(2 * L2_BYTES, H200, "warm"))
    assert warning.startswith("K and V (105 MB) are more than half of the 52 MB of L2: ")
    assert judge.warm_warning(L2_BYTES // 2 + 1, H200, "warm") is not None
    # 400 MB, the rotation's own size.
    assert judge.rotation_warning(40, 10_000_000, H200, "cold") is None
    assert judge.rotation_warning(39, 10_000_000, H200, "warm") is None
    warning = str(judge.rotation_warning(39, 10_000_000, H200, "cold"))
    assert warning.startswith("memory has room for 39 copies of K and V only (390 MB): ")
