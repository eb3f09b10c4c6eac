"""Figures of a timing, its precision, graphs and the choice of candidates, with fake launches."""

import gc
import statistics
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from leanbench.core.errors import UserError
from leanbench.measure import timing as module


def timing_of(*samples_us: float) -> module.Timing:
    return module.Timing(1, list(samples_us))


def test_median_quartiles_and_interval():
    timing = timing_of(9.0, 1.0, 5.0, 3.0, 7.0)
    assert timing.median_us == 5.0
    assert timing.quartiles_us == (3.0, 7.0)
    assert timing_of(1.0, 2.0, 3.0, 10.0).median_us == 2.5
    assert timing_of(1.0, 2.0, 3.0, 10.0).quartiles_us == (1.75, 4.75)
    timing = timing_of(4.0)
    assert (timing.quartiles_us, timing.interval_us) == ((4.0, 4.0), (4.0, 4.0))
    assert (timing.median_us, timing.relative_ci) == (4.0, 0.0)
    timing = timing_of(99.0, 100.0, 110.0)
    assert timing.interval_us == (99.0, 110.0)
    assert timing.relative_ci == pytest.approx(0.1)


EFFORT = module.Effort(
    relative_ci=0.01, min_samples=10, max_samples=40, max_seconds=1.0, max_repeats=4
)


def test_enough_is_the_fewest_samples_and_a_narrow_interval():
    assert timing_of(*[100.0] * 10).is_precise(EFFORT)
    assert not timing_of(*[100.0] * 9).is_precise(EFFORT)
    # 10 samples: the 2nd and the 9th, 1% from the median and then a little more.
    assert timing_of(*[100.0] * 8, 101.0, 101.0).is_precise(EFFORT)
    assert not timing_of(*[100.0] * 8, 101.1, 101.1).is_precise(EFFORT)


@pytest.mark.parametrize(
    ("samples", "spent_s", "spent"),
    [
        (39, 0.0, False),
        (40, 0.0, True),
        (10, 1.0, False),
        (10, 1.01, True),
        (9, 1.01, False),
        (0, 99.0, False),
    ],
)
def test_effort_is_spent_by_samples_or_by_seconds_but_not_below_the_fewest(samples, spent_s, spent):
    timing = module.Timing(1, [100.0] * samples, spent_s=spent_s)
    assert timing.is_exhausted(EFFORT) is spent


Launches = Sequence[Callable[[], object]]


class FakeReplay:
    """A fake of `Replay`: launches return the time of their replays."""

    made: list[tuple[str, float]]

    def __init__(self, launches: Launches, sample_ms: float) -> None:
        self._answer: Any = launches[0]()
        self.launches = len(launches)
        self.fill(sample_ms)

    def fill(self, sample_ms: float) -> None:
        self._us = self._answer["quick" if sample_ms == module.RANKING.sample_ms else "again"]
        FakeReplay.made.append((self._answer["name"], sample_ms))

    def sample_us(self) -> float:
        return self._us


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, float]]:
    """Return the replays made, by name and sample length."""
    monkeypatch.setattr(module, "Replay", FakeReplay)
    monkeypatch.setattr(FakeReplay, "made", [], raising=False)
    return FakeReplay.made


def candidate(name: str, quick: float, again: float) -> Callable[[], Launches]:
    launches: Launches = [lambda: {"name": name, "quick": quick, "again": again}]
    return lambda: launches


def too_large() -> Launches:
    raise OutOfResources(300_000, 232_448, "shared memory")


def too_large_when_launched() -> Launches:
    return [too_large]


def test_fastest_times_the_best_three_again(made):
    candidates = {
        "fourth": candidate("fourth", 13.0, 1.0),
        "first": candidate("first", 10.0, 10.5),
        "third": candidate("third", 12.0, 9.0),
        "second": candidate("second", 11.0, 11.0),
    }
    assert module.fastest(candidates) == ("third", 4)
    assert made == [
        *[(name, module.RANKING.sample_ms) for name in ("fourth", "first", "third", "second")],
        *[(name, module.FINALS.sample_ms) for name in ("first", "second", "third")],
    ]
    # Final times get more samples than times for ranking.
    assert module.FINALS.relative_ci < module.RANKING.relative_ci
    assert module.FINALS.min_samples > module.RANKING.min_samples


def test_fastest_passes_over_what_does_not_fit_and_says_when_nothing_does(made):
    too_many = {"a": too_large, "c": too_large_when_launched}
    # The only one that fits needs no final.
    assert module.fastest({**too_many, "b": candidate("b", 5.0, 5.0)}) == ("b", 1)
    assert made == [("b", module.RANKING.sample_ms)]
    own = {"b": candidate("b", 5.0, 5.0), "d": candidate("d", 4.0, 4.0)}
    assert module.fastest({**too_many, **own}) == ("d", 2)
    with pytest.raises(RuntimeError, match="no candidate fits this GPU's shared memory and reg"):
        module.fastest(too_many)


def refused(sentence: str) -> Callable[[], Launches]:
    def prepare() -> Launches:
        try:
            raise RuntimeError("Buffer overflow")
        except RuntimeError as error:
            raise UserError(sentence) from error

    return prepare


@pytest.mark.usefixtures("made")
def test_fastest_passes_over_what_a_library_refuses():
    candidates = {"a": refused("no room"), "b": candidate("b", 5.0, 5.0), "c": too_large}
    assert module.fastest(candidates) == ("b", 1)
    with pytest.raises(UserError, match=r"^no room$"):
        module.fastest({"a": refused("no room"), "b": refused("too old"), "c": too_large})
    with pytest.raises(ZeroDivisionError):
        module.fastest({"a": candidate("a", 1.0, 1.0), "b": lambda: 1 / 0})  # pyright: ignore


def test_fastest_leaves_no_graph_to_the_garbage_collector(made, monkeypatch):
    """A collection could destroy them at any time, even during the capture of another graph."""
    alive: weakref.WeakSet[FakeReplay] = weakref.WeakSet()

    class Watched(FakeReplay):
        def __init__(self, launches: Launches, sample_ms: float) -> None:
            super().__init__(launches, sample_ms)
            alive.add(self)

    monkeypatch.setattr(module, "Replay", Watched)
    gc.disable()
    try:
        assert module.fastest({"a": candidate("a", 1.0, 1.0), "b": refused("no room")}) == ("a", 1)
        assert len(alive) == 0
    finally:
        gc.enable()
    assert made == [("a", module.RANKING.sample_ms)]


@pytest.fixture
def collected_in_captures(monkeypatch) -> list[bool]:
    """Record whether garbage collection is enabled at the start and end of each capture."""
    seen: list[bool] = []

    @contextmanager
    def graph(graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        seen.append(gc.isenabled())
        try:
            yield
        finally:
            seen.append(gc.isenabled())

    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda keep_graph: object())
    monkeypatch.setattr("torch.cuda.graph", graph)
    return seen


def test_no_garbage_is_collected_while_a_graph_is_captured(collected_in_captures):
    """Destroying a garbage graph would break the capture."""
    launched, launches = counted(2)
    assert gc.isenabled()
    module.capture([*launches, lambda: collected_in_captures.append(gc.isenabled())], 5)
    assert launched == {0: 2, 1: 2}
    assert collected_in_captures == [False, False, False]
    assert gc.isenabled()
    with pytest.raises(OutOfResources):
        module.capture([too_large], 1)
    assert gc.isenabled()
    gc.disable()
    try:
        module.capture(launches, 2)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def pretended_graphs(monkeypatch) -> SimpleNamespace:
    """Fake graphs with replays of `launch_us` per launch; count the launches captured in each."""
    pretended = SimpleNamespace(launch_us=20.0, captured=[], replays=0)

    class Graph:
        def __init__(self, launches: Launches, count: int) -> None:
            self.count = count
            pretended.captured.append(Counter(index % len(launches) for index in range(count)))
            for index in range(count):
                launches[index % len(launches)]()

        def replay(self) -> None:
            pretended.replays += 1

    monkeypatch.setattr(module, "capture", Graph)

    def replay_ms(replay: Any) -> float:
        return replay.graph.count * pretended.launch_us / 1e3

    monkeypatch.setattr(module.Replay, "_replay_ms", replay_ms)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    return pretended


def counted(count: int) -> tuple[Counter[int], Launches]:
    launched: Counter[int] = Counter()
    return launched, [lambda index=index: launched.update([index]) for index in range(count)]


@pytest.mark.parametrize(
    ("launch_us", "buffers", "expected"),
    [
        (20.0, 5, 200),  # 40 rotations of 100 us make 4 ms
        (3000.0, 2, 2),  # one rotation takes longer
        (30.0, 7, 7 * 20),  # 210 us: 19.05 rotations, rounded up
        (1.0, 3, 682 * 3),  # maximum nodes of a graph, in whole rotations
        (1.0, 3000, 3000),  # more buffers than that
    ],
)
def test_a_sample_is_whole_rotations_of_about_4_ms(pretended_graphs, launch_us, buffers, expected):
    pretended_graphs.launch_us = launch_us
    launched, launches = counted(buffers)
    timing = module.time_launches(launches)
    assert timing.launches_per_sample == expected
    assert timing.median_us == pytest.approx(launch_us)
    assert len(timing.samples_us) == module.Effort().min_samples
    assert statistics.pstdev(launched.values()) == 0
    assert set(launched) == set(range(buffers))
    # The graph that is timed; an earlier one had each launch once.
    assert pretended_graphs.captured[-1] == Counter(list(range(buffers)) * (expected // buffers))


def test_a_replay_that_the_host_held_up_does_not_shorten_samples(pretended_graphs, monkeypatch):
    held_up_ms = iter([30.0])
    undisturbed = module.Replay._replay_ms
    monkeypatch.setattr(
        module.Replay, "_replay_ms", lambda replay: next(held_up_ms, undisturbed(replay))
    )
    assert module.Replay(counted(5)[1], sample_ms=4.0).launches == 200
    # Only the graph that estimates the duration; run_rounds warms up the sampled graph.
    assert pretended_graphs.replays == 1


@pytest.mark.parametrize(("buffers", "trials"), [(1024, 3), (1025, 0)])
def test_a_graph_that_no_other_can_replace_is_not_tried(
    pretended_graphs, monkeypatch, buffers, trials
):
    tried: list[None] = []
    monkeypatch.setattr(module.Replay, "_replay_ms", lambda replay: tried.append(None) or 0.5)
    module.Replay(counted(buffers)[1], sample_ms=4.0)
    assert len(tried) == trials


@pytest.mark.usefixtures("pretended_graphs")
def test_what_a_launch_made_for_itself_lives_as_long_as_its_graph():
    """A library's launch holds Q in another dtype, and a schedule. A graph has their addresses."""

    class Launch:
        def __call__(self) -> None:
            """Do nothing."""

    launch = Launch()
    alive = weakref.ref(launch)
    replay = module.Replay([launch], sample_ms=4.0)
    del launch
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("pretended_graphs")
def test_candidates_are_timed_under_their_own_names():
    timings = module.measure_interleaved(
        {"a": counted(5)[1], "b": counted(7)[1]}, module.Effort(sample_ms=1.0)
    )
    assert [timings[name].launches_per_sample for name in "ab"] == [50, 56]
