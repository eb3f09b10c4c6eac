"""Candidates sampled in turn, the stopping rule, and discarded samples, all scripted."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.gpu.nvml import GpuState
from leanbench.measure import timing as module
from leanbench.measure.timing import Effort, Timing, run_rounds

EFFORT = Effort(relative_ci=0.01, min_samples=10, max_samples=40, max_seconds=1.0, max_repeats=4)


class Clock:
    """A clock that moves only on request."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


#: The warm-up sample is discarded; otherwise it would be visible.
WARM_UP_US = 1e6


class Scripted:
    """A sampler: a warm-up sample, its samples, then the last one repeatedly."""

    def __init__(self, *samples_us, launches=1, clock=None, takes_s=0.0):
        self.launches = launches
        self._samples_us = itertools.chain(
            [WARM_UP_US], samples_us, itertools.repeat(samples_us[-1])
        )
        self._clock, self._takes_s = clock, takes_s

    def sample_us(self) -> float:
        if self._clock is not None:
            self._clock.now_s += self._takes_s
        return next(self._samples_us)


def state(*reasons: str, clock_mhz: int = 1980) -> GpuState:
    return GpuState(clock_mhz, 2619, 40, 300.0, list(reasons))


def states(*readings: GpuState | None) -> Callable[[], GpuState | None]:
    """Return a function that gives states in turn, then the last one repeatedly."""
    endless = itertools.chain(readings, itertools.repeat(readings[-1]))
    return lambda: next(endless)


def test_candidates_take_turns_when_announced_and_who_comes_first_changes():
    turns: list[str] = []

    class Announced(Scripted):
        name = ""

        def sample_us(self) -> float:
            assert turns[-1] == self.name
            return super().sample_us()

    samplers = {name: Announced(100.0) for name in "abc"}
    for name, sampler in samplers.items():
        sampler.name = name
    effort = Effort(min_samples=6, max_samples=6)
    timings = run_rounds(samplers, effort, announce=turns.append)
    rounds = ["".join(turns[first : first + 3]) for first in range(0, len(turns), 3)]
    # The first does not count.
    assert rounds == ["abc", "abc", "bca", "cab", "abc", "bca", "cab"]
    for timing in timings.values():
        assert timing.samples_us == [100.0] * 6
        assert timing.rounds == list(range(6))


WILD = [100.0, 150.0] * 30


def test_all_stay_until_all_medians_are_known():
    calm = run_rounds({"a": Scripted(100.0, 100.5, 100.0, launches=32)}, EFFORT)["a"]
    assert calm.samples_us == [100.0, 100.5, *[100.0] * 8]
    assert calm.launches_per_sample == 32
    settling = run_rounds({"a": Scripted(*WILD[:10], 100.0)}, EFFORT)["a"].samples_us
    assert 10 < len(settling) < 40
    assert Timing(1, settling).relative_ci <= EFFORT.relative_ci
    assert Timing(1, settling[:-1]).relative_ci > EFFORT.relative_ci
    never = run_rounds({"a": Scripted(*WILD)}, EFFORT)["a"]
    assert len(never.samples_us) == 40
    assert not never.is_precise(EFFORT)
    alone = run_rounds({"settling": Scripted(*WILD[:10], 100.0)}, EFFORT)["settling"]
    timings = run_rounds({"calm": Scripted(100.0), "settling": Scripted(*WILD[:10], 100.0)}, EFFORT)
    assert timings["settling"].samples_us == alone.samples_us
    assert timings["calm"].rounds == timings["settling"].rounds == alone.rounds


def test_who_has_spent_its_effort_leaves_and_holds_nobody_up(clock):
    samplers = {
        "settling": Scripted(*WILD[:14], 100.0),
        # A tenth of a second each, so it leaves after its eleventh.
        "slow": Scripted(*WILD, clock=clock, takes_s=0.1),
        "calm": Scripted(100.0),
    }
    turns: list[str] = []
    timings = run_rounds(samplers, EFFORT, announce=turns.append)
    counts = {name: len(timing.samples_us) for name, timing in timings.items()}
    assert counts["slow"] == pytest.approx(11, abs=1)
    assert counts["settling"] == counts["calm"] > 15
    assert timings["settling"].is_precise(EFFORT)
    assert not timings["slow"].is_precise(EFFORT)
    assert timings["slow"].spent_s == pytest.approx(0.1 * counts["slow"])
    assert timings["calm"].spent_s == 0.0
    # Rounds continue to count, and the order of the remaining ones rotates.
    assert timings["calm"].rounds == list(range(counts["calm"]))
    assert "".join(name[0] for name in turns[-4:]) in ("sccs", "cssc")


def test_samples_at_lowered_clocks_are_thrown_away_and_repeated():
    naps: list[float] = []
    sampler = Scripted(200.0, 100.0, 300.0, 100.0)
    readings = states(state("sw_power_cap"), state(), state("hw_slowdown"), state(clock_mhz=1900))
    timing = run_rounds({"a": sampler}, EFFORT, readings, sleep=naps.append)["a"]
    assert timing.samples_us == [100.0] * 10
    assert timing.throttled_samples == 2
    # The rounds of discarded samples are missing.
    assert timing.rounds == [1, *range(3, 12)]
    assert timing.states == [state(), *[state(clock_mhz=1900)] * 9]
    assert naps == [EFFORT.throttled_pause_s] * 2


def test_thrown_away_samples_are_few_and_leave_others(clock):
    naps: list[float] = []
    capped = state("sw_power_cap")
    samplers = {"a": Scripted(100.0), "b": Scripted(100.0)}
    timings = run_rounds(samplers, EFFORT, lambda: capped, sleep=naps.append)
    for timing in timings.values():
        assert timing.throttled_samples == 4
        assert timing.states == [capped] * 10
        assert timing.rounds == list(range(4, 14))
    assert len(naps) == 8
    # Each takes longer than the time limit, and the first ones are discarded.
    sampler = Scripted(100.0, clock=clock, takes_s=2.0)
    timing = run_rounds(
        {"a": sampler}, EFFORT, lambda: state("sw_power_cap"), sleep=lambda seconds: None
    )["a"]
    assert (timing.throttled_samples, len(timing.samples_us)) == (4, 10)
    assert timing.median_us == 100.0


def never(seconds: float) -> None:
    pytest.fail("there is nothing to wait for")


@pytest.mark.parametrize("reading", [None, GpuState(None, None, None, None, None), state()])
def test_a_gpu_that_says_nothing_of_throttling_is_believed(reading):
    timing = run_rounds({"a": Scripted(100.0)}, EFFORT, lambda: reading, sleep=never)["a"]
    assert timing.throttled_samples == 0
    assert timing.states == [reading] * 10


@given(
    samples=st.lists(
        st.lists(st.floats(50.0, 150.0), min_size=1, max_size=30), min_size=1, max_size=4
    ),
    throttled=st.lists(st.booleans(), min_size=1, max_size=60),
    fewest=st.integers(1, 8),
    most=st.integers(8, 20),
    repeats=st.integers(0, 5),
)
def test_rounds_end_and_their_lists_line_up(samples, throttled, fewest, most, repeats):
    effort = Effort(0.02, fewest, most, max_seconds=100.0, max_repeats=repeats)
    samplers = {number: Scripted(*sample) for number, sample in enumerate(samples)}
    readings = states(*[state("sw_power_cap") if low else state() for low in throttled])
    timings = run_rounds(samplers, effort, readings, sleep=lambda seconds: None)
    assert list(timings) == list(samplers)
    everyone = timings.values()
    for timing in timings.values():
        assert fewest <= len(timing.samples_us) <= most
        assert len(timing.samples_us) == most or all(
            candidate.is_precise(effort) or candidate.is_exhausted(effort) for candidate in everyone
        )
        assert len(timing.rounds) == len(timing.states) == len(timing.samples_us)
        assert timing.rounds == sorted(set(timing.rounds))
        assert 0 <= timing.throttled_samples <= repeats
        # Each round gave a sample or discarded one; the last ones can be either.
        assert timing.rounds[-1] + 1 <= len(timing.samples_us) + timing.throttled_samples
        assert WARM_UP_US not in timing.samples_us
        if timing.throttled_samples < repeats:
            assert all(
                reading is not None and not reading.throttle_reasons for reading in timing.states
            )


def test_after_a_long_sample_the_gpu_rests_for_half_of_it():
    naps: list[float] = []
    # 4 launches of 2 ms; 3 launches of 1.5 ms stay below 5 ms.
    samplers = {"large": Scripted(2000.0, launches=4), "small": Scripted(1500.0, launches=3)}
    timings = run_rounds(samplers, EFFORT, sleep=naps.append)
    assert [len(timing.samples_us) for timing in timings.values()] == [10, 10]
    assert naps == [pytest.approx(0.004)] * 10
