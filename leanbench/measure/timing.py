"""Latency measurement: interleaved CUDA-graph replays until each median is precise enough."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from leanbench.core.errors import UserError

if TYPE_CHECKING:
    import torch

    from leanbench.gpu.nvml import GpuState

Launches = Sequence[Callable[[], object]]
Key = TypeVar("Key")
T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """Sampling effort and stopping rule of one candidate."""

    #: Target half-width of the median's 95% confidence interval, relative to the median.
    relative_ci: float = 0.005
    min_samples: int = 10
    max_samples: int = 200
    #: Time limit, counting only the candidate's own samples.
    max_seconds: float = 1.0
    #: GPU time per sample. Makes the few microseconds of graph launch negligible.
    sample_ms: float = 4.0
    #: Pause after a sample longer than `rest_above_ms`, as a fraction of the sample. Without it,
    #: large problems would load the GPU for seconds; latency means a burst.
    rest_share: float = 0.5
    rest_above_ms: float = 5.0
    #: Maximum number of throttled samples to discard. Further ones are kept and reported.
    max_repeats: int = 5
    #: Pause after a throttled sample, to let the GPU cool down.
    throttled_pause_s: float = 0.05


#: Replays that estimate the duration of one rotation.
_TRIAL_REPLAYS = 3
#: Maximum number of launches per graph, unless one rotation has more. Each costs memory and capture
#: time. This many launches of the smallest kernels take more than a millisecond.
_MAX_LAUNCHES = 2048
#: Effort for ranking candidates. Too little for a report.
RANKING = Effort(
    relative_ci=0.02, min_samples=3, max_samples=6, max_seconds=0.05, sample_ms=0.5, max_repeats=0
)
FINALS = Effort(
    relative_ci=0.005, min_samples=5, max_samples=15, max_seconds=0.2, sample_ms=2.0, max_repeats=0
)


@dataclass
class Timing:
    """Latency samples of one candidate, in microseconds per launch."""

    launches_per_sample: int
    samples_us: list[float] = field(default_factory=list)
    #: Round of each sample, and GPU state right after it.
    rounds: list[int] = field(default_factory=list)
    states: list[GpuState | None] = field(default_factory=list)
    #: Number of samples discarded because the GPU throttled.
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

    def is_precise(self, effort: Effort) -> bool:
        """Return True if the median is known to within `effort.relative_ci`."""
        return len(self.samples_us) >= effort.min_samples and self.relative_ci <= effort.relative_ci

    def is_exhausted(self, effort: Effort) -> bool:
        """Return True if the effort allows no further samples."""
        count = len(self.samples_us)
        return count >= effort.max_samples or (
            count >= effort.min_samples and self.spent_s > effort.max_seconds
        )


class Sampler(Protocol):
    """Source of samples for one candidate."""

    launches: int

    def sample_us(self) -> float: ...


class Replay:
    """CUDA graph of equal launches that rotate over several sets of buffers.

    A graph, because launching a small kernel from Python takes longer than running it. Rotating
    buffers, because a serving step reads K and V from memory, not from the L2. Pass enough launches
    that their buffers exceed the L2 several times.

    Args:
        is_slow_to_start: Time each replay behind another one. The host takes most of a millisecond
            to start a graph of 1,400 kernels; the GPU would be idle in that time.
    """

    #: Launches per buffer in the shortest graph.
    _rounds = 1
    _max_launches = _MAX_LAUNCHES

    def __init__(
        self, launches: Launches, sample_ms: float, is_slow_to_start: bool = False
    ) -> None:
        import torch

        self._is_slow_to_start = is_slow_to_start
        self._together(partial(_launch_all, launches))
        torch.cuda.synchronize()
        # The graph stores addresses. Keep the launches, which own their buffers, alive.
        self._keep_alive = tuple(launches)
        self.launches = self._rounds * len(launches)
        self.graph = self._capture()
        # The first replay also uploads the graph.
        self.graph.replay()
        self.fill(sample_ms)

    def fill(self, sample_ms: float) -> None:
        """Repeat the graph's launches in it until they take `sample_ms`."""
        rotations = self._rotations(sample_ms)
        if rotations > 1:
            self.launches *= rotations
            self.graph = self._capture()

    def _rotations(self, sample_ms: float) -> int:
        """Return the number of times that the graph's launches fill one sample."""
        max_rotations = self._max_launches // self.launches
        if max_rotations < 2:
            return 1
        # Take the minimum. A delayed submission makes a replay look too long, which would make the
        # sample too short.
        rotation_ms = min(self._replay_ms() for _ in range(_TRIAL_REPLAYS))
        return min(max_rotations, max(1, math.ceil(sample_ms / max(rotation_ms, 1e-3))))

    def sample_us(self) -> float:
        """Replay the graph once. Return microseconds per launch."""
        return self._replay_ms() * 1e3 / self.launches

    def _replay_ms(self) -> float:
        import torch

        if self._is_slow_to_start:
            self.graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _capture(self) -> torch.cuda.CUDAGraph:
        return self._together(partial(capture, self._keep_alive, self.launches))

    def _together(self, work: Callable[[], T]) -> T:
        """Do a part of the setup, in a subclass on every GPU."""
        return work()


def _launch_all(launches: Launches) -> None:
    for launch in launches:
        launch()


def capture(launches: Launches, count: int, keep_graph: bool = False) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `count` launches, cycling through `launches`.

    Each launch must have run before.

    Args:
        keep_graph: Keep the graph's nodes readable, for leanbench.measure.crosscheck.
    """
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    stream = _stream_in_use()
    # A server's other threads may allocate meanwhile.
    mode = "global" if stream is None else "thread_local"
    captured = torch.cuda.graph(graph, stream=stream, capture_error_mode=mode)
    with _no_garbage_collection(), captured:
        for index in range(count):
            launches[index % len(launches)]()
    if keep_graph:
        graph.instantiate()  # otherwise the first replay does it
    return graph


def _stream_in_use() -> torch.cuda.Stream | None:
    """Return the current stream if it can be captured, None for one of torch.

    That is on the process' first device.
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_stream()
    return None if current == torch.cuda.default_stream() else current


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection. Destroying a graph during a capture invalidates the capture."""
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
    """Sample all candidates in rounds until every median is precise.

    Rounds expose all candidates to the same drift of clocks and temperature. The order rotates,
    because the first sample of a round finds a cooler GPU. A warm-up round is discarded: its
    samples are up to 2% slow. A candidate leaves early if its effort is exhausted.

    Args:
        state: Reads the GPU state after each sample. A throttled sample is discarded, at most
            `effort.max_repeats` times per candidate.
        announce: Called with the key of the next sample.
    """
    for key, sampler in samplers.items():
        announce(key)
        sampler.sample_us()
    timings = {key: Timing(sampler.launches) for key, sampler in samplers.items()}
    active = list(samplers)
    round_number = 0
    while active and not all(timings[key].is_precise(effort) for key in active):
        first = round_number % len(active)
        for key in [*active[first:], *active[:first]]:
            announce(key)
            _take_sample(samplers[key], timings[key], round_number, effort, state, sleep)
        active = [key for key in active if not timings[key].is_exhausted(effort)]
        round_number += 1
    return timings


def _take_sample(
    sampler: Sampler,
    timing: Timing,
    round_number: int,
    effort: Effort,
    state: Callable[[], GpuState | None],
    sleep: Callable[[float], None],
) -> None:
    """Take one sample and record or discard it."""
    start = time.perf_counter()
    sample_us = sampler.sample_us()
    timing.spent_s += time.perf_counter() - start
    gpu_state = state()
    sample_ms = sample_us * sampler.launches / 1e3
    if sample_ms > effort.rest_above_ms:
        sleep(effort.rest_share * sample_ms / 1e3)
    if (
        gpu_state is not None
        and gpu_state.throttle_reasons
        and timing.throttled_samples < effort.max_repeats
    ):
        timing.throttled_samples += 1
        sleep(effort.throttled_pause_s)
        return
    timing.samples_us.append(sample_us)
    timing.rounds.append(round_number)
    timing.states.append(gpu_state)


def measure_interleaved(
    candidates: Mapping[Key, Launches], effort: Effort | None = None
) -> dict[Key, Timing]:
    """Time several candidates in interleaved rounds."""
    effort = effort or Effort()
    return run_rounds(
        {key: Replay(launches, effort.sample_ms) for key, launches in candidates.items()}, effort
    )


def time_launches(launches: Launches, effort: Effort | None = None) -> Timing:
    """Time equal launches on different buffers."""
    return measure_interleaved({None: launches}, effort)[None]


def fastest(
    candidates: Mapping[Key, Callable[[], Launches]], finalists: int = 3
) -> tuple[Key, int]:
    """Find the fastest candidate: rank all quickly, then time the best `finalists` longer.

    Args:
        candidates: Functions that prepare launches. Those that raise OutOfResources or UserError
            are skipped.

    Returns:
        The fastest candidate and the number of candidates that ran.

    Raises:
        UserError: No candidate ran and a library rejected one; the first such error.
        RuntimeError: No candidate fits the GPU.
    """
    from triton.runtime.errors import OutOfResources

    replays: dict[Key, Replay] = {}
    errors: list[UserError] = []
    for key, prepare in candidates.items():
        try:
            replays[key] = Replay(prepare(), RANKING.sample_ms)
        except OutOfResources:
            continue
        except UserError as error:
            # Copy the error: the tracebacks of the original and its cause keep graphs alive.
            errors.append(type(error)(*error.args))
    if not replays and errors:
        raise errors[0]
    if not replays:
        raise RuntimeError("no candidate fits this GPU's shared memory and registers")
    ranking = run_rounds(replays, RANKING)
    ranked = sorted(ranking, key=lambda key: ranking[key].median_us)[:finalists]
    if len(ranked) == 1:
        return ranked[0], len(replays)
    # The host takes longer to launch and capture thousands of copies than the GPU to run them.
    chosen = {key: replays[key] for key in ranked}
    for replay in chosen.values():
        replay.fill(FINALS.sample_ms)
    finals = run_rounds(chosen, FINALS)
    return min(finals, key=lambda key: finals[key].median_us), len(replays)


#: Minimum number of samples on each side for `ratio_interval` to reach 95%.
FEWEST_FOR_RATIO = 4


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return two of the samples that enclose the true median with at least this confidence.

    The number of n independent samples below the true median is binomial with probability 1/2. The
    k-th smallest and the k-th largest therefore enclose the median with probability 1 - 2 x (C(n,0)
    + ... + C(n,k-1)) / 2^n. The interval uses the largest such k (Conover, Practical Nonparametric
    Statistics, chapter 3). With fewer than six samples even the extremes do not reach 95%; they are
    returned all the same.

    Args:
        samples: At least one finite number, in any order.
        confidence: Between 0 and 1, exclusive.

    Returns:
        (low, high), in the unit of the samples. The median of the samples lies between them.

    Raises:
        ValueError: No samples, or an invalid confidence.
    """
    _check_confidence(confidence)
    if not samples:
        raise ValueError("an interval of the median takes at least one sample")
    ordered = sorted(samples)
    count = len(ordered)
    # Stay with integers until the one division: 2^count overflows a float from 1024 samples on.
    tail, ways, dropped = 1, 1, 0
    while 2 * tail / 2**count <= 1 - confidence:
        dropped += 1
        ways = ways * (count - dropped + 1) // dropped
        tail += ways
    outside = max(0, dropped - 1)
    return ordered[outside], ordered[count - 1 - outside]


def ratio_interval(
    base: Sequence[float], new: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Return bounds of the ratio of `new` to `base` with about this confidence.

    Interval of Hodges and Lehmann for the rank-sum test of Mann, Whitney and Wilcoxon, on the scale
    of ratios: the k-th smallest and the k-th largest of all ratios of a new to a base sample, with
    k from the normal approximation of the rank sum (Hollander, Wolfe, Chicken, Nonparametric
    Statistical Methods, section 4.3). It assumes only that the distributions differ by a factor.
    Widened to contain the ratio of the medians if that lies outside.

    Args:
        base: At least one positive number, in any order. `new`: the same.
        confidence: Between 0 and 1, exclusive.

    Raises:
        ValueError: No samples on a side, or an invalid confidence.
    """
    _check_confidence(confidence)
    if not base or not new:
        raise ValueError("an interval of a ratio takes at least one sample on each side")
    ratios = sorted(later / earlier for later in new for earlier in base)
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    spread = math.sqrt(len(ratios) * (len(base) + len(new) + 1) / 12)
    outside = max(1, math.floor(len(ratios) / 2 - z * spread)) - 1
    of_medians = statistics.median(new) / statistics.median(base)
    return min(ratios[outside], of_medians), max(ratios[len(ratios) - 1 - outside], of_medians)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not above 0 and below 1")
