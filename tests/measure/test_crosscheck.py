"""The second opinion: kernel spans to a figure a launch, and when two figures contradict each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanbench.measure import crosscheck as module
from leanbench.measure.crosscheck import (
    CrossCheck,
    KernelStart,
    cross_check,
    disagreement,
    from_spans,
)


def replay(
    launches: int, *kernels: tuple[str, float, float], every_us: float, at_us: float = 0.0
) -> list[KernelStart]:
    """`launches` launches, one each `every_us`, of (name, start in the launch, duration)."""
    return [
        KernelStart(name, at_us + launch * every_us + start)
        for launch in range(launches)
        for name, start, _ in kernels
    ]


def test_one_kernel_a_launch_counts_with_the_gap_behind_it():
    checked = from_spans([replay(4, ("attend", 0.0, 9.0), every_us=10.0)], launches=4)
    assert checked == CrossCheck((10.0,), ("attend",))


def test_two_kernels_a_launch_are_one_figure():
    spans = replay(5, ("split", 0.0, 20.0), ("merge", 22.0, 3.0), every_us=26.0, at_us=1e9)
    assert from_spans([spans], launches=5) == CrossCheck((26.0,), ("split", "merge"))


def test_spans_may_come_in_any_order():
    spans = replay(3, ("split", 0.0, 20.0), ("merge", 22.0, 3.0), every_us=26.0)
    assert from_spans([spans[::-1]], launches=3) == CrossCheck((26.0,), ("split", "merge"))


def test_each_replay_gives_a_figure_and_the_median_counts():
    replays = [
        replay(3, ("attend", 0.0, 9.0), every_us=every_us) for every_us in (10.0, 40.0, 11.0)
    ]
    checked = from_spans(replays, launches=3)
    assert isinstance(checked, CrossCheck)
    assert checked.samples_us == (10.0, 40.0, 11.0)
    assert checked.median_us == 11.0


def test_uneven_gaps_are_averaged():
    spans = [KernelStart("attend", start) for start in (0.0, 6.0, 20.0, 33.0)]
    assert from_spans([spans], launches=4) == CrossCheck((11.0,), ("attend",))


def test_a_kernel_that_a_graph_begins_with_is_of_no_launch():
    """Launches of lean: the first is captured with a kernel before it that counts replays."""
    spans = [KernelStart("count", 0.0), *replay(4, ("lean", 0.0, 9.0), every_us=10.0, at_us=1.5)]
    assert from_spans([spans], launches=4) == CrossCheck((10.0,), ("lean",))


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        (
            [
                *replay(3, ("split", 0.0, 5.0), ("merge", 5.0, 1.0), every_us=8.0),
                KernelStart("Memset", 30.0),
            ],
            "the profiler saw 7 kernels in 3 launches (3 x split, 3 x merge, 1 x Memset), no"
            " whole number each",
        ),
        (
            replay(2, ("attend", 0.0, 5.0), every_us=8.0),
            "the profiler saw 2 kernels in 3 launches (2 x attend), no whole number each",
        ),
    ],
)
def test_kernels_that_do_not_divide_evenly_give_no_figure(spans, sentence):
    even = replay(3, ("attend", 0.0, 5.0), every_us=8.0)
    assert from_spans([even, spans], launches=3) == sentence


def test_a_replay_without_kernels_gives_no_figure():
    even = replay(3, ("attend", 0.0, 5.0), every_us=8.0)
    assert (
        from_spans([even, []], launches=3)
        == "the profiler saw no kernel, so there is no cross-check"
    )


@given(
    launches=st.integers(2, 40),
    kernels=st.integers(1, 3),
    every_us=st.floats(1.0, 1e4),
    at_us=st.floats(0.0, 1e6),
    order=st.randoms(),
)
def test_regular_launches_give_their_period(launches, kernels, every_us, at_us, order):
    within = [
        (f"k{index}", every_us * index / kernels, every_us / kernels / 2)
        for index in range(kernels)
    ]
    spans = replay(launches, *within, every_us=every_us, at_us=at_us)
    order.shuffle(spans)
    checked = from_spans([spans], launches)
    assert isinstance(checked, CrossCheck)
    assert checked.median_us == pytest.approx(every_us, rel=1e-6)
    assert checked.kernels == tuple(name for name, _, _ in within)


@pytest.mark.parametrize(
    ("crosscheck_us", "samples_us", "differs"),
    [
        # Below 50 µs a microsecond is allowed.
        (11.0, [10.0], False),
        (9.0, [10.0], False),
        (11.01, [10.0], True),
        (8.99, [10.0], True),
        # Above, 2%.
        (1020.0, [1000.0], False),
        (1020.1, [1000.0], True),
        (979.9, [1000.0], True),
        # Beyond the samples, however far they scatter.
        (1119.9, [1000.0, 1000.0, 1100.0], False),
        (1120.1, [1000.0, 1000.0, 1100.0], True),
        (880.1, [900.0, 1000.0, 1000.0], False),
        (879.9, [900.0, 1000.0, 1000.0], True),
    ],
)
def test_disagreement_at_its_borders(crosscheck_us, samples_us, differs):
    assert (disagreement(crosscheck_us, samples_us) is not None) is differs


@pytest.mark.parametrize(("crosscheck_us", "share"), [(12.5, "+25.0%"), (7.5, "-25.0%")])
def test_disagreement_says_both_figures_and_how_far_they_are_apart(crosscheck_us, share):
    assert (
        disagreement(crosscheck_us, [9.9, 10.0, 10.1])
        == f"the profiler's kernel times give {crosscheck_us:.2f} µs a launch, {share} from the"
        " graph replay's 10.00 µs: neither figure is safe"
    )


@pytest.fixture
def captured(monkeypatch) -> list[int]:
    """How many launches each graph holds; the graphs do nothing."""
    counts: list[int] = []

    def capture(launches: list[object], count: int) -> SimpleNamespace:
        counts.append(count)
        return SimpleNamespace(replay=lambda: None, count=count)

    monkeypatch.setattr("leanbench.measure.timing.capture", capture)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    return counts


@pytest.mark.parametrize(
    ("latency_us", "launches", "figures"),
    [(1.0, 32, 3), (100.0, 20, 3), (600.0, 4, 3), (2000.0, 2, 3), (5000.0, 2, 1), (3e4, 2, 1)],
)
def test_a_replay_takes_two_milliseconds_and_all_ten(
    monkeypatch, captured, latency_us, launches, figures
):
    monkeypatch.setattr(
        module,
        "_profiled",
        lambda before, graph: replay(graph.count, ("attend", 0.0, 1.0), every_us=2.0),
    )
    assert cross_check([lambda: None] * 7, latency_us) == CrossCheck((2.0,) * figures, ("attend",))
    # One before it, on other buffers.
    assert captured == [launches, launches]


@pytest.mark.usefixtures("captured")
def test_a_profiler_that_fails_is_a_sentence(monkeypatch):
    def fail(before: object, graph: object) -> list[KernelStart]:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nand a stack")

    monkeypatch.setattr(module, "_profiled", fail)
    assert (
        cross_check([lambda: None], 10.0)
        == "the profiler gave no kernel times to cross-check with (CUPTI_ERROR_NOT_INITIALIZED)"
    )


def test_the_replay_before_the_one_that_counts_is_left_out(monkeypatch):
    def event(name: str, start_us: float, device: object) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=device,
            time_range=SimpleNamespace(start=start_us, end=start_us + 1),
        )

    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU  # pyright: ignore
    events = [
        event("b", 31.0, gpu),
        event("launch", 2.0, cpu),
        *(event("a", at, gpu) for at in (1.0, 11.0, 21.0)),
    ]

    class Profile:
        def __init__(self, **options: object) -> None:
            pass

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            return events

    replays: list[str] = []
    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    graphs = [
        SimpleNamespace(replay=lambda name=name: replays.append(name))
        for name in ("before", "counts")
    ]
    spans = module._profiled(*graphs)  # pyright: ignore[reportArgumentType]
    assert replays == ["before", "counts"]
    assert spans == [KernelStart("a", 21.0), KernelStart("b", 31.0)]


def test_the_buffers_that_count_have_left_the_l2(monkeypatch, captured):
    """A full rotation, then launches on the last buffers, then on the first ones."""
    used: list[int] = []
    graphs: list[list[int]] = []

    def capture(launches: list[Callable[[], None]], count: int) -> SimpleNamespace:
        before = len(used)
        for index in range(count):
            launches[index % len(launches)]()
        graphs.append(used[before:])
        del used[before:]
        return SimpleNamespace(count=count)

    monkeypatch.setattr("leanbench.measure.timing.capture", capture)
    monkeypatch.setattr(
        module,
        "_profiled",
        lambda before, graph: replay(graph.count, ("attend", 0.0, 1.0), every_us=2.0),
    )
    launches = [lambda index=index: used.append(index) for index in range(100)]
    cross_check(launches, 10.0)
    assert graphs == [list(range(32)), list(range(68, 100))]
    assert used == list(range(100)) * 3
    used.clear()
    graphs.clear()
    # Fewer buffers than launches: any replay is a full rotation.
    cross_check(launches[:20], 10.0)
    assert graphs == [[index % 20 for index in range(32)]] * 2
    assert used == []


@pytest.mark.usefixtures("captured")
def test_an_error_of_the_kernel_is_not_the_profilers(monkeypatch):
    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access, again")

    def fail(before: object, graph: object) -> list[KernelStart]:
        monkeypatch.setattr("torch.cuda.synchronize", sticky)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(module, "_profiled", fail)
    with pytest.raises(RuntimeError, match="again"):
        cross_check([lambda: None], 10.0)
