"""The cross-check: clock readings, kernels per launch, and contradicting figures."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanbench.measure import crosscheck as module


@given(
    start=st.integers(0, 1 << 60),
    reading=st.integers(0, 10_000),
    launch=st.integers(1, 10**7),
    launches=st.integers(2, 32),
)
def test_what_a_reading_takes_is_of_no_launch(start, reading, launch, launches):
    times = [start, start + reading, start + 2 * reading + launches * launch]
    assert module.between_us(times, launches) == pytest.approx(launch / 1e3)


def test_the_clock_is_that_of_one_sm():
    before = [1000, 5000, 7, 0]
    assert module.clock_between(before, [3000, 8500, 7, 0]) == [1750.0]
    assert module.clock_between(before, [3000, 8500, 8, 0]) == []
    assert module.clock_between(before, before) == []


def nodes(launch: list[str], launches: int, of_graph: list[str]) -> list[str]:
    """Return the nodes of a graph that reads the clock, in an arbitrary order."""
    return [*launch * launches, *["clock_kernel"] * 3, *of_graph]


@pytest.mark.parametrize(
    ("launch", "of_graph", "kernels"),
    [
        (["attend"], [], ("attend",)),
        (["split", "merge"], [], ("split", "merge")),
        (["merge", "split", "merge"], [], ("merge", "merge", "split")),
        # The kernel that counts replays of lean's graph belongs to no launch.
        (["lean"], ["count"], ("lean",)),
        (["split", "unknown"], [], ()),
    ],
)
@pytest.mark.parametrize("launches", [1, 2, 32])
def test_kernels_of_a_launch(launch, of_graph, kernels, launches):
    fewer = [*of_graph, *launch * launches]
    more = nodes(launch, launches + 1, of_graph)
    assert module.kernels_of_a_launch(fewer, more, launches) == kernels
    # torch adds to numbers at 16-byte boundaries by another kernel than elsewhere.
    others = ["vectorized", *fewer], ["elementwise", *more]
    assert module.kernels_of_a_launch(*others, launches) == kernels


@pytest.mark.parametrize("readings", [0, 2, 4])
def test_readings_of_the_clock_are_counted(readings):
    more = [*["attend"] * 3, *["clock_kernel"] * readings]
    sentence = f"a graph has {readings} readings of the GPU's clock, not 3"
    assert module.kernels_of_a_launch(["attend"] * 2, more, 2) == sentence


PAIRS = ["split", "merge"]


@pytest.mark.parametrize(
    ("fewer", "more", "counts"),
    [
        # One launch has more kernels than another.
        (PAIRS * 3, [*PAIRS * 4, "memset"], ("3 x split, 3 x merge", "1 x memset")),
        # The same kernels in both graphs, but other ones.
        (
            [*["attend"] * 3, "copy", "memset"],
            [*["attend"] * 4, *PAIRS],
            ("3 x attend, 1 x copy, 1 x memset", "4 x attend, 1 x split, 1 x merge"),
        ),
        # Missing launches, in one graph or both.
        (["attend"] * 2, ["attend"] * 4, ("2 x attend", "4 x attend")),
        (["attend"] * 2, ["attend"] * 3, ("2 x attend", "3 x attend")),
        # A repeated kernel that does not increase with the launches.
        (
            ["attend", "count", "attend", "count", "attend"],
            [*["attend"] * 4, "count", "count"],
            ("3 x attend, 2 x count", "4 x attend, 2 x count"),
        ),
        (["attend", "merge"] * 3, ["attend"] * 4, ("3 x attend, 3 x merge", "4 x attend")),
        ([], [], ("none", "none")),
    ],
)
def test_other_kernels_in_other_launches_give_no_figure(fewer, more, counts):
    reason = module.kernels_of_a_launch(fewer, [*more, *["clock_kernel"] * 3], 3)
    few, many = counts
    assert re.match(f"graphs of 3 and 4 launches have {few} and .*{many}", str(reason))


@pytest.mark.parametrize(
    ("crosscheck_us", "samples_us", "differs"),
    [
        # Below 50 µs, a difference of a microsecond is allowed.
        (11.0, [10.0], False),
        (9.0, [10.0], False),
        (11.01, [10.0], True),
        (8.99, [10.0], True),
        # Above, 2%.
        (1020.0, [1000.0], False),
        (1020.1, [1000.0], True),
        (979.9, [1000.0], True),
        # Beyond the samples, for any spread.
        (1119.9, [1000.0, 1000.0, 1100.0], False),
        (1120.1, [1000.0, 1000.0, 1100.0], True),
        (880.1, [900.0, 1000.0, 1000.0], False),
        (879.9, [900.0, 1000.0, 1000.0], True),
    ],
)
def test_disagreement_at_its_borders(crosscheck_us, samples_us, differs):
    assert (module.disagreement(crosscheck_us, samples_us) is not None) is differs
    figures = "gives 12.50 µs a launch, +25.0% from the graph replay's 10.00 µs: "
    assert figures in str(module.disagreement(12.5, [9.9, 10.0, 10.1]))


class Clock:
    """A GPU with launches of two microseconds, and clock readings of one."""

    def __init__(self) -> None:
        self.times = torch.zeros(3, 4, dtype=torch.int64)
        self.now_ns = 1 << 40
        #: Executed nodes: numbers of launches and letters of readings.
        self.ran: list[Any] = []
        #: Nodes of each graph.
        self.graphs: list[list[Any]] = []
        self.launch_ns = 2000

    def launch(self, number: int) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(number)
            self.now_ns += self.launch_ns

        return run

    def reading(self, index: int) -> Callable[[], None]:
        def run() -> None:
            self.ran.append("abc"[index])
            # 1.5 GHz.
            self.times[index, :2] = torch.tensor([self.now_ns, self.now_ns * 3 // 2])
            self.now_ns += 1000

        return run

    def capture(self, launches: Any, count: int, keep_graph: bool = False) -> SimpleNamespace:
        chosen = [launches[index % len(launches)] for index in range(count)]

        def replay() -> None:
            for launch in chosen:
                launch()

        before, times = len(self.ran), self.times.clone()
        replay()
        held = self.ran[before:]
        del self.ran[before:]
        self.times.copy_(times)
        self.graphs.append(held)
        return SimpleNamespace(replay=replay, keep_graph=keep_graph, held=held)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()

    def nodes(graph: SimpleNamespace) -> list[str]:
        assert graph.keep_graph
        return ["clock_kernel" if isinstance(of, str) else "attend" for of in graph.held]

    monkeypatch.setattr("leanbench.measure.timing.capture", clock.capture)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(module, "node_names", nodes)
    readings = [clock.reading(index) for index in range(3)]
    monkeypatch.setattr(module, "clock_readings", lambda: (clock.times, readings))
    return clock


@pytest.mark.parametrize(
    ("latency_us", "launches", "figures"),
    [(1.0, 32, 3), (100.0, 20, 3), (600.0, 4, 3), (2000.0, 2, 3), (5000.0, 2, 1), (3e4, 2, 1)],
)
def test_a_replay_takes_two_milliseconds_and_all_ten(clock, latency_us, launches, figures):
    checked = module.cross_check([clock.launch(number) for number in range(7)], latency_us)
    assert checked == module.CrossCheck((2.0,) * figures, ("attend",), 1500)
    stamped, before = clock.graphs
    numbers = [index % 7 for index in range(launches)]
    assert stamped == [6, "a", "b", *numbers, "c"]
    # One before it, on other buffers.
    assert len(before) == launches


def test_a_clock_that_stands_still_and_a_driver_that_fails_are_sentences(monkeypatch, clock):
    clock.launch_ns = 0
    standing = "the GPU's clock did not step between launches, so there is no cross-check"
    assert module.cross_check([clock.launch(0)], 10.0) == standing

    def fail(graph: object) -> list[str]:
        raise RuntimeError("CUDA driver: invalid argument\nand a stack")

    monkeypatch.setattr(module, "node_names", fail)
    failed = str(module.cross_check([clock.launch(0)], 10.0))
    assert failed.endswith("no time to cross-check with (CUDA driver: invalid argument)")


def test_launches_that_a_graph_lost_are_a_sentence(monkeypatch, clock):
    monkeypatch.setattr(module, "node_names", lambda graph: ["attend"] * 16)
    reason = str(module.cross_check([clock.launch(0)], 10.0))
    assert reason.startswith("graphs of 32 and 33 launches have 16 x attend and 16 x attend, ")


def test_the_buffers_that_count_have_left_the_l2(clock):
    """The graph has a full rotation, then launches on the last buffers, then on the first ones."""
    module.cross_check([clock.launch(number) for number in range(100)], 10.0)
    stamped, before = clock.graphs
    assert stamped == [99, "a", "b", *range(32), "c"]
    assert before == [*range(68, 100)]
    assert clock.ran == [*range(100), *before, *stamped] * 3
    clock.ran.clear()
    module.cross_check([clock.launch(number) for number in range(20)], 10.0)
    assert clock.graphs[3] == [*range(20), *range(12)]
    # Fewer buffers than launches per replay.
    assert clock.ran == [*clock.graphs[3], *clock.graphs[2]] * 3


def test_an_error_of_the_kernel_is_not_the_clocks(monkeypatch, clock):
    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access, again")

    def fail(graph: object) -> list[str]:
        monkeypatch.setattr("torch.cuda.synchronize", sticky)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(module, "node_names", fail)
    with pytest.raises(RuntimeError, match="again"):
        module.cross_check([clock.launch(0)], 10.0)
