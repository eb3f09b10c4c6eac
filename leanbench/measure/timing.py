"""Latency of a launch: CUDA-graph replay over rotating buffers, candidates in turn, until the
median is known.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from leanbench.core.errors import UserError
from leanbench.measure.statistics import median_interval

if TYPE_CHECKING:
    import torch

    from leanbench.gpu.nvml import GpuState

Launches = Sequence[Callable[[], object]]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Effort:
    """When to stop measuring a candidate."""

    #: Enough, once the 95% confidence interval of the median reaches at most this far to either
    #: side.
    relative_ci: float = 0.005
    min_samples: int = 10
    max_samples: int = 200
    #: Seconds in its own samples.
    max_seconds: float = 1.0
    #: Device time behind one sample: long against the microseconds that a graph takes to start.
    sample_ms: float = 4.0
    #: After a sample of more than `rest_above_ms`, a pause of this share of it: large problems
    #: would otherwise load the GPU for seconds without a gap, and what is asked for is a burst.
    rest_share: float = 0.5
    rest_above_ms: float = 5.0
    #: Samples taken at lowered clocks that are thrown away and repeated; later ones are kept and
    #: said.
    max_repeats: int = 5
    #: Pause after such a sample, for power and heat to fall.
    throttled_pause_s: float = 0.05


#: Replays that say how long one takes, before samples are made of as many as needed.
TRIAL_REPLAYS = 3
#: Launches of a graph at most, where one rotation has no more: each costs memory and capture time,
#: and so many of the smallest kernels take more than a millisecond.
_MOST_NODES = 2048
#: Enough to rank candidates, not to report.
RANKING = Effort(
    relative_ci=0.02, min_samples=3, max_samples=6, max_seconds=0.05, sample_ms=0.5, max_repeats=0
)
FINALS = Effort(
    relative_ci=0.005, min_samples=5, max_samples=15, max_seconds=0.2, sample_ms=2.0, max_repeats=0
)


@dataclass
class Timing:
    """Microseconds of one launch, from replays of `launches_per_sample` launches each."""

    launches_per_sample: int
    samples_us: list[float] = field(default_factory=list)
    #: For each sample: the round it was taken in, and the GPU's state right after it.
    rounds: list[int] = field(default_factory=list)
    states: list[GpuState | None] = field(default_factory=list)
    #: Thrown away because the clocks were lowered.
    throttled_samples: int = 0
    spent_s: float = 0.0

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
        """95% confidence interval of the median."""
        return median_interval(self.samples_us)

    @property
    def relative_ci(self) -> float:
        low, high = self.interval_us
        return max(high - self.median_us, self.median_us - low) / self.median_us

    def meets(self, effort: Effort) -> bool:
        return len(self.samples_us) >= effort.min_samples and self.relative_ci <= effort.relative_ci

    def is_spent(self, effort: Effort) -> bool:
        count = len(self.samples_us)
        return count >= effort.max_samples or (
            count >= effort.min_samples and self.spent_s > effort.max_seconds
        )


class Sampler(Protocol):
    """What takes the samples of one candidate."""

    launches: int

    def sample_us(self) -> float: ...


class Replay:
    """A CUDA graph of launches that do the same work, on different buffers in turn.

    Graph replay, because a launch from Python costs more host time than a small kernel takes.
    Rotating buffers, because a serving step finds K and V in memory, not in the L2: pass enough
    launches that their buffers exceed it several times.
    """

    def __init__(self, launches: Launches, sample_ms: float) -> None:
        import torch

        for launch in launches:
            launch()
        torch.cuda.synchronize()
        # A graph holds addresses: what the launches made for themselves must live as long.
        self._kept = tuple(launches)
        self.launches = len(launches)
        self.graph = capture(launches, self.launches)
        # The first replay of a graph also brings it to the GPU.
        self.graph.replay()
        rotations = self._rotations(sample_ms)
        if rotations > 1:
            self.launches *= rotations
            self.graph = capture(launches, self.launches)

    def _rotations(self, sample_ms: float) -> int:
        """How often a sample goes through all launches."""
        most = _MOST_NODES // self.launches
        if most < 2:
            return 1
        # The least: a replay whose submission the host was kept from looks longer than it is, and
        # samples of a few launches hold more of the graph's own time.
        once_ms = min(self._replay_ms() for _ in range(TRIAL_REPLAYS))
        return min(most, max(1, math.ceil(sample_ms / max(once_ms, 1e-3))))

    def sample_us(self) -> float:
        """Microseconds of one launch in one replay."""
        return self._replay_ms() * 1e3 / self.launches

    def _replay_ms(self) -> float:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def capture(launches: Launches, count: int, keep_graph: bool = False) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `count` launches, the given ones in turn. Each must have run before.

    Args:
        keep_graph: its nodes may be asked for (leanbench.measure.graph_nodes).
    """
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with _garbage_kept(), torch.cuda.graph(graph):
        for index in range(count):
            launches[index % len(launches)]()
    if keep_graph:
        graph.instantiate()  # not in the first replay
    return graph


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage is collected in here: a graph among it would be destroyed, which CUDA refuses
    while another one is captured and which invalidates that one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_rounds(
    samplers: Mapping[Key, Sampler],
    effort: Effort,
    state: Callable[[], GpuState | None] = lambda: None,
    announce: Callable[[Key], None] = lambda key: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Key, Timing]:
    """One sample of every candidate in each round, so that drifting clocks and temperatures meet
    all alike.

    All take part until the medians of all are known to `effort.relative_ci`; one whose effort is
    spent leaves earlier. The order turns by one from round to round: who comes first finds a cooler
    GPU. A round before the first is not counted: after an idle moment its samples are up to 2%
    high.

    Args:
        state: read after each sample. A sample at lowered clocks is thrown away,
            `effort.max_repeats` times a candidate at most.
        announce: called with whose sample comes next.
    """
    for key, sampler in samplers.items():
        announce(key)
        sampler.sample_us()
    timings = {key: Timing(sampler.launches) for key, sampler in samplers.items()}
    active = list(samplers)
    number = 0
    while active and not all(timings[key].meets(effort) for key in active):
        turn = number % len(active)
        for key in [*active[turn:], *active[:turn]]:
            announce(key)
            _take(samplers[key], timings[key], number, effort, state, sleep)
        active = [key for key in active if not timings[key].is_spent(effort)]
        number += 1
    return timings


def _take(
    sampler: Sampler,
    timing: Timing,
    number: int,
    effort: Effort,
    state: Callable[[], GpuState | None],
    sleep: Callable[[float], None],
) -> None:
    """One sample into `timing`, or one thrown away."""
    begun = time.perf_counter()
    sample_us = sampler.sample_us()
    timing.spent_s += time.perf_counter() - begun
    reading = state()
    sample_ms = sample_us * sampler.launches / 1e3
    if sample_ms > effort.rest_above_ms:
        sleep(effort.rest_share * sample_ms / 1e3)
    if (
        reading is not None
        and reading.throttle_reasons
        and timing.throttled_samples < effort.max_repeats
    ):
        timing.throttled_samples += 1
        sleep(effort.throttled_pause_s)
        return
    timing.samples_us.append(sample_us)
    timing.rounds.append(number)
    timing.states.append(reading)


def measure_interleaved(
    candidates: Mapping[Key, Launches], effort: Effort | None = None
) -> dict[Key, Timing]:
    """Times each candidate's launches, one sample of each in turn."""
    effort = effort or Effort()
    return run_rounds(
        {key: Replay(launches, effort.sample_ms) for key, launches in candidates.items()}, effort
    )


def time_launches(launches: Launches, effort: Effort | None = None) -> Timing:
    """Times launches that do the same work on different buffers."""
    return measure_interleaved({None: launches}, effort)[None]


def fastest(
    candidates: Mapping[Key, Callable[[], Launches]], finalists: int = 3
) -> tuple[Key, int]:
    """(the fastest candidate, how many ran), by quick rounds of all and longer ones of the best
    `finalists`.

    A candidate is a function that prepares launches; one that does not fit the GPU, or that a
    library refuses, raises and is passed over.

    Raises:
        UserError: a library refuses them all; the first one's sentence.
        RuntimeError: none fits.
    """
    from triton.runtime.errors import OutOfResources

    launches: dict[Key, Launches] = {}
    replays: dict[Key, Replay] = {}
    refusals: list[UserError] = []
    for key, prepare in candidates.items():
        try:
            launches[key] = prepare()
            replays[key] = Replay(launches[key], RANKING.sample_ms)
        except OutOfResources:
            continue
        except UserError as refusal:
            # Made anew: its traceback, and its cause's, would keep the graphs alive until garbage
            # is collected.
            refusals.append(type(refusal)(*refusal.args))
    if not replays and refusals:
        raise refusals[0]
    if not replays:
        raise RuntimeError("no candidate fits this GPU's shared memory and registers")
    ranking = run_rounds(replays, RANKING)
    ranked = sorted(ranking, key=lambda key: ranking[key].median_us)[:finalists]
    if len(ranked) == 1:
        return ranked[0], len(replays)
    finals = measure_interleaved({key: launches[key] for key in ranked}, FINALS)
    return min(finals, key=lambda key: finals[key].median_us), len(replays)
