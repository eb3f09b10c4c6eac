"""A second opinion on a latency: the GPU's own clock, which a kernel reads ahead of and behind
launches in one CUDA graph, and the kernels of that graph, counted.

It shares nothing with the events around a replay but the launches: another clock, and launches
counted instead of assumed. Not the profiler: once CUPTI has looked at a process, every later graph
replay is slower, by half a microsecond and more a launch, most where it has two kernels
(docs/measuring.md).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.measure.graph_nodes import UNKNOWN, node_names

if TYPE_CHECKING:
    import torch

    from leanbench.measure.timing import Launches

#: The two methods may differ by this share of the latency, or by this many microseconds: it is the
#: figure of a few launches.
TOLERANCE_SHARE = 0.02
TOLERANCE_US = 1.0
#: Device time behind one figure, and the launches in it.
_FIGURE_US = 2000.0
_LAUNCHES = (2, 32)
#: At most so many figures, fewer where they would take longer than this together: a large problem
#: stays a burst.
_FIGURES = 3
_LONG_US = 10_000.0
#: Readings of the clock in a graph: two in a row, whose distance is what a reading takes, and one
#: behind the launches.
_READINGS = 3
#: Words from one reading to the next, so that a reading's address is a multiple of 16 bytes.
_WORDS = 2
#: The kernel that reads it.
_CLOCK = "timer_kernel"


@dataclass(frozen=True)
class CrossCheck:
    """Microseconds of one launch, a figure a replay."""

    samples_us: tuple[float, ...]
    #: Names of the GPU kernels of one launch; none where the graph does not tell.
    kernels: tuple[str, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def cross_check(launches: Launches, latency_us: float) -> CrossCheck | str:
    """Times of a graph of the launches by the GPU's clock; a sentence where that gives no figure.

    Args:
        latency_us: what one launch takes, roughly.
    """
    import torch

    from leanbench.measure.timing import capture

    fewest, most = _LAUNCHES
    count = max(fewest, min(most, math.ceil(_FIGURE_US / latency_us)))
    figures = min(_FIGURES, math.ceil(_LONG_US / (count * latency_us)))
    try:
        times, readings = clock_readings()
        # A launch comes first: what only a graph's first launch brings along is not timed.
        timed = [launches[index % len(launches)] for index in range(count)]
        stamped = [launches[-1], *readings[:2], *timed, *readings[2:]]
        graph = capture(stamped, len(stamped), keep_graph=True)
        # On the buffers that a rotation uses last: the replay that counts must not find its own in
        # the L2. The GPU works on it while the host submits the other.
        before = capture(launches[-count:], count, keep_graph=True)
        kernels = kernels_of_a_launch(node_names(before), node_names(graph), count)
        if isinstance(kernels, str):
            return kernels
        samples_us = []
        for _ in range(figures):
            if len(launches) > count:
                for launch in launches:
                    launch()
            torch.cuda.synchronize()
            before.replay()
            graph.replay()
            torch.cuda.synchronize()
            samples_us.append(between_us(times[::_WORDS].tolist(), count))
    except RuntimeError as error:
        # Raises again where it was an error of the kernel itself.
        torch.cuda.synchronize()
        return (
            f"the GPU's clock gave no time to cross-check with ({str(error).partition(chr(10))[0]})"
        )
    if min(samples_us) <= 0:
        return "the GPU's clock did not step between launches, so there is no cross-check"
    return CrossCheck(tuple(samples_us), kernels)


def clock_readings() -> tuple[torch.Tensor, list[Callable[[], object]]]:
    """Where readings of the clock are written, in nanoseconds, and launches that read it."""
    import torch

    from leanbench.kernels.events import timer_kernel

    times = torch.zeros(_READINGS * _WORDS, dtype=torch.int64, device="cuda")

    def reading(at: torch.Tensor) -> Callable[[], object]:
        return lambda: timer_kernel[(1,)](at, 1, num_warps=1)

    readings = [reading(times[index * _WORDS :]) for index in range(_READINGS)]
    for read in readings:
        read()
    return times, readings


def between_us(times_ns: Sequence[int], launches: int) -> float:
    """Microseconds of one launch: from the second reading to the third, less what a reading takes
    from the one before it.
    """
    first, second, third = times_ns
    return ((third - second) - (second - first)) / 1e3 / launches


def kernels_of_a_launch(
    fewer: Sequence[str], more: Sequence[str], launches: int
) -> tuple[str, ...] | str:
    """Names of the kernels of a launch: what a graph of one launch more has more; a sentence where
    the others are not as many of them, with what a graph has once for itself.

    Args:
        fewer: names of the nodes of a graph of `launches` launches, in any order.
        more: of one with another launch, and readings of the clock.
    """
    if UNKNOWN in more or UNKNOWN in fewer:
        return ()
    seen, of_all = Counter(fewer), Counter(name for name in more if name != _CLOCK)
    # Such as the kernel that counts the replays of lean's graphs (kernels/lean/workspace.py): which
    # one depends on where the count lies in memory. A launch's are in a graph twice and more.
    once = Counter(name for name, count in (seen | of_all).items() if count == 1)
    own, own_of_all = once & seen, once & of_all
    of_launch = of_all - seen - once
    launched = Counter(list(of_launch.elements()) * launches)
    if (
        not of_launch
        or seen != launched + own
        or of_all != launched + of_launch + own_of_all
        or own.total() != own_of_all.total()
        or (own_of_all - own).total() > 1
    ):
        return (
            f"graphs of {launches} and {launches + 1} launches have {_listed(seen)} and"
            f" {_listed(of_all)}, not as many kernels for each launch"
        )
    if (readings := more.count(_CLOCK)) != _READINGS:
        return f"a graph has {readings} readings of the GPU's clock, not {_READINGS}"
    return tuple(of_launch.elements())


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def disagreement(crosscheck_us: float, samples_us: Sequence[float]) -> str | None:
    """A sentence where the cross-check lies outside the samples, by more than a few launches may.

    Outside all of them: it is the figure of a few launches, as noisy as any one sample.
    """
    latency_us = statistics.median(samples_us)
    allowed_us = max(TOLERANCE_US, TOLERANCE_SHARE * latency_us)
    if min(samples_us) - allowed_us <= crosscheck_us <= max(samples_us) + allowed_us:
        return None
    return (
        f"the GPU's own clock gives {crosscheck_us:.2f} µs a launch,"
        f" {crosscheck_us / latency_us - 1:+.1%} from the graph replay's {latency_us:.2f} µs:"
        " neither figure is safe"
    )
