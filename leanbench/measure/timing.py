"""Latency of a launch: CUDA-graph replay over rotating buffers, with events around each replay."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Effort:
    """When to stop measuring."""

    #: Stop once the 95% confidence interval of the median is at most this wide on either side.
    relative_ci: float = 0.005
    min_samples: int = 10
    max_samples: int = 60
    max_seconds: float = 1.0
    #: Device time behind one sample: long against the microseconds that a graph takes to start.
    sample_ms: float = 4.0


#: Enough to rank candidates, not to report.
QUICK = Effort(relative_ci=0.02, min_samples=3, max_samples=6, max_seconds=0.05, sample_ms=0.5)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch, from `samples` replays of `launches_per_sample` launches."""

    samples_us: tuple[float, ...]
    launches_per_sample: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        if len(self.samples_us) < 2:
            return self.median_us, self.median_us
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high

    @property
    def interval_us(self) -> tuple[float, float]:
        """95% confidence interval of the median, from order statistics: no distribution is assumed.

        How many samples lie below the true median is binomial, so the k-th from either end enclose it with a
        probability that can be counted; with fewer than six samples even the extremes enclose it less often.
        """
        ordered = sorted(self.samples_us)
        count = len(ordered)
        outside, below = 0, 0
        # Both tails together hold 2 x sum of C(count, 0..k) of the 2^count ways.
        while below < (count - 1) // 2:
            outside += 2 * math.comb(count, below)
            if outside > 0.05 * 2**count:
                break
            below += 1
        below = max(0, below - 1)
        return ordered[below], ordered[count - 1 - below]

    @property
    def relative_ci(self) -> float:
        low, high = self.interval_us
        return max(high - self.median_us, self.median_us - low) / self.median_us


def capture(launches: Sequence[Callable[[], object]], count: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `count` launches, the given ones in turn. Each must have run before."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launches[index % len(launches)]()
    return graph


def time_launches(launches: Sequence[Callable[[], object]], effort: Effort | None = None) -> Timing:
    """Times launches that do the same work on different buffers.

    Graph replay, because a launch from Python costs more host time than a small kernel takes. Rotating buffers,
    because a serving step finds K and V in memory, not in the L2: pass enough launches that their buffers exceed it
    several times.
    """
    import torch

    effort = effort or Effort()
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    count = len(launches)
    graph = capture(launches, count)
    graph.replay()
    once_ms = _replay_ms(graph)
    rounds = max(1, math.ceil(effort.sample_ms / max(once_ms, 1e-3)))
    # A graph node costs memory and capture time; 2048 keeps the smallest kernels above a millisecond.
    rounds = min(rounds, max(1, 2048 // count))
    if rounds > 1:
        count *= rounds
        graph = capture(launches, count)
        graph.replay()
    return sample(lambda: _replay_ms(graph) * 1e3 / count, count, effort)


def sample(measure_us: Callable[[], float], launches_per_sample: int, effort: Effort) -> Timing:
    """Samples until the confidence interval is narrow enough, or effort is spent."""
    started = time.monotonic()
    samples: list[float] = []
    while True:
        samples.append(measure_us())
        timing = Timing(tuple(samples), launches_per_sample)
        if len(samples) < effort.min_samples:
            continue
        enough = timing.relative_ci <= effort.relative_ci
        spent = len(samples) >= effort.max_samples or time.monotonic() - started > effort.max_seconds
        if enough or spent:
            return timing


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def fastest(
    candidates: dict[object, Callable[[], Sequence[Callable[[], object]]]], finalists: int = 3
) -> tuple[object, int]:
    """Ranks candidates quickly, times the best `finalists` again, and returns (the fastest, how many were timed).

    A candidate is a function that prepares launches; one that does not fit the GPU raises and is passed over.

    Raises:
        RuntimeError: none could be prepared.
    """
    from triton.runtime.errors import OutOfResources

    quick: dict[object, float] = {}
    prepared: dict[object, Sequence[Callable[[], object]]] = {}
    for key, prepare in candidates.items():
        try:
            prepared[key] = prepare()
            quick[key] = time_launches(prepared[key], QUICK).median_us
        except OutOfResources:
            continue
    if not quick:
        raise RuntimeError("no candidate fits this GPU's shared memory and registers")
    ranked = list(islice(sorted(quick, key=lambda key: quick[key]), finalists))
    again = Effort(relative_ci=0.005, min_samples=5, max_samples=15, max_seconds=0.2, sample_ms=2.0)
    return min(ranked, key=lambda key: time_launches(prepared[key], again).median_us), len(quick)
