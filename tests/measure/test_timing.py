"""Statistics, the stopping rule and the choice among candidates, with pretended launches and clocks."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
from triton.runtime.errors import OutOfResources

from leanbench.measure import timing as module
from leanbench.measure.timing import QUICK, Effort, Timing, fastest, sample, time_launches


def timing_of(*samples_us: float) -> Timing:
    return Timing(samples_us, 1)


def test_median_and_quartiles():
    timing = timing_of(9.0, 1.0, 5.0, 3.0, 7.0)
    assert timing.median_us == 5.0
    assert timing.quartiles_us == (3.0, 7.0)
    assert timing_of(1.0, 2.0, 3.0, 10.0).median_us == 2.5
    assert timing_of(1.0, 2.0, 3.0, 10.0).quartiles_us == (1.75, 4.75)


def test_one_sample_has_no_spread_to_show():
    timing = timing_of(4.0)
    assert (timing.median_us, timing.quartiles_us, timing.interval_us) == (4.0, (4.0, 4.0), (4.0, 4.0))
    assert timing.relative_ci == 0.0


def test_the_interval_is_two_of_the_samples():
    # 20 / 2 -+ 0.98 sqrt(20): the 6th and the 15th of 20.
    assert timing_of(*range(20, 0, -1)).interval_us == (6, 15)
    assert timing_of(*range(1, 4)).interval_us == (1, 3)


def test_relative_ci_is_the_wider_side_over_the_median():
    timing = timing_of(99.0, 100.0, 110.0)
    assert timing.interval_us == (99.0, 110.0)
    assert timing.relative_ci == pytest.approx(0.1)


def coverage(count: int) -> float:
    """How probable it is that the true median lies in the interval: from 1 + low to high samples are below it."""
    low, high = timing_of(*range(count)).interval_us
    return sum(math.comb(count, below) for below in range(int(low) + 1, int(high) + 1)) / 2**count


@pytest.mark.parametrize("count", range(10, 61))
def test_coverage_of_the_interval(count):
    """At least 95%, and no wider than whole samples allow: 97.9% at 10."""
    assert 0.95 <= coverage(count) < 0.99


@pytest.mark.parametrize("count", [10, 11, 21, 30, 45, 60])
def test_coverage_of_the_interval_by_simulation(count):
    """Latencies have a long tail to one side; the interval assumes no distribution."""
    generator = random.Random(count)
    true_median = math.log(2)
    inside = 0
    for _ in range(2000):
        low, high = timing_of(*(generator.expovariate(1.0) for _ in range(count))).interval_us
        inside += low <= true_median <= high
    assert inside / 2000 == pytest.approx(coverage(count), abs=0.015)


EFFORT = Effort(relative_ci=0.01, min_samples=10, max_samples=40, max_seconds=1.0)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that only moves when told."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def endless(*values_us: float) -> Callable[[], float]:
    values: Iterator[float] = itertools.cycle(values_us)
    return lambda: next(values)


@pytest.mark.usefixtures("clock")
def test_sample_stops_at_the_fewest_when_they_agree():
    timing = sample(endless(100.0, 100.5), 32, EFFORT)
    assert len(timing.samples_us) == 10
    assert timing.launches_per_sample == 32
    assert timing.median_us == pytest.approx(100.25)


@pytest.mark.usefixtures("clock")
def test_sample_stops_at_the_most_when_they_do_not():
    timing = sample(endless(100.0, 150.0), 1, EFFORT)
    assert len(timing.samples_us) == 40
    assert timing.relative_ci > EFFORT.relative_ci


@pytest.mark.usefixtures("clock")
def test_sample_goes_on_until_the_interval_is_narrow():
    wild = itertools.chain([100.0, 150.0] * 5, itertools.repeat(100.0))
    timing = sample(lambda: next(wild), 1, EFFORT)
    assert 10 < len(timing.samples_us) < 40
    assert timing.relative_ci <= EFFORT.relative_ci
    assert Timing(timing.samples_us[:-1], 1).relative_ci > EFFORT.relative_ci


def slowly(clock: SimpleNamespace, seconds: float, *values_us: float) -> Callable[[], float]:
    next_value = endless(*values_us)

    def measure() -> float:
        clock.now += seconds
        return next_value()

    return measure


def test_sample_stops_when_time_is_up(clock):
    # After 20 samples 1 s is reached, after 21 exceeded.
    timing = sample(slowly(clock, 0.05, 100.0, 150.0), 1, EFFORT)
    assert len(timing.samples_us) == pytest.approx(21, abs=1)


def test_sample_takes_the_fewest_even_when_time_is_up(clock):
    assert len(sample(slowly(clock, 5.0, 100.0, 150.0), 1, EFFORT).samples_us) == 10


Launches = Sequence[Callable[[], object]]


@pytest.fixture
def timed(monkeypatch) -> list[tuple[object, Effort | None]]:
    """`time_launches` answers with what the launches return; the calls are noted."""
    calls = []

    def fake(launches: Launches, effort: Effort | None = None) -> Timing:
        calls.append((launches[0], effort))
        answer = launches[0]()
        assert isinstance(answer, dict)
        return timing_of(answer["quick" if effort is QUICK else "again"])

    monkeypatch.setattr(module, "time_launches", fake)
    return calls


def candidate(quick: float, again: float) -> Callable[[], Launches]:
    launches: Launches = [lambda: {"quick": quick, "again": again}]
    return lambda: launches


def too_large() -> Launches:
    raise OutOfResources(300_000, 232_448, "shared memory")


def too_large_when_launched() -> Launches:
    return [too_large]


def test_fastest_times_the_best_three_again(timed):
    candidates: dict[object, Callable[[], Launches]] = {
        "fourth": candidate(13.0, 1.0),
        "first": candidate(10.0, 10.5),
        "third": candidate(12.0, 9.0),
        "second": candidate(11.0, 11.0),
    }
    assert fastest(candidates) == ("third", 4)
    efforts = Counter(effort is QUICK for _, effort in timed)
    assert efforts == {True: 4, False: 3}
    # Times that are reported get more samples than times that only rank.
    again = next(effort for _, effort in timed if effort is not QUICK)
    assert again is not None
    assert again.relative_ci < QUICK.relative_ci


@pytest.mark.usefixtures("timed")
def test_fastest_passes_over_what_does_not_fit():
    candidates = {"a": too_large, "b": candidate(5.0, 5.0), "c": too_large_when_launched, "d": candidate(4.0, 4.0)}
    assert fastest({**candidates}) == ("d", 2)


@pytest.mark.usefixtures("timed")
def test_fastest_says_when_nothing_fits():
    with pytest.raises(RuntimeError, match="no candidate fits this GPU's shared memory and registers"):
        fastest({"a": too_large, "b": too_large_when_launched})


@pytest.mark.usefixtures("timed")
def test_fastest_lets_other_errors_through():
    def wrong() -> Launches:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fastest({"a": candidate(1.0, 1.0), "b": wrong})


@pytest.mark.parametrize(
    ("launch_us", "buffers", "expected"),
    [
        (20.0, 5, 200),  # 40 rounds of 100 us make 4 ms
        (3000.0, 2, 2),  # one round is longer already
        (30.0, 7, 7 * 20),  # 210 us: 19.05 rounds, rounded up
        (1.0, 3, 682 * 3),  # the most nodes of a graph, in whole rounds
    ],
)
def test_a_sample_is_whole_rounds_of_about_4_ms(monkeypatch, launch_us, buffers, expected):
    """The graph is pretended: its replay takes `launch_us` a launch."""
    launched: Counter[int] = Counter()

    class Graph:
        def __init__(self, launches: Launches, count: int) -> None:
            self.count = count
            for index in range(count):
                launches[index % len(launches)]()

        def replay(self) -> None:
            pass

    monkeypatch.setattr(module, "capture", Graph)
    monkeypatch.setattr(module, "_replay_ms", lambda graph: graph.count * launch_us / 1e3)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    timing = time_launches([lambda index=index: launched.update([index]) for index in range(buffers)])
    assert timing.launches_per_sample == expected
    assert timing.median_us == pytest.approx(launch_us)
    assert len(timing.samples_us) == Effort().min_samples
    assert statistics.pstdev(launched.values()) == 0
    assert set(launched) == set(range(buffers))
