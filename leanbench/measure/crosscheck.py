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
from itertools import takewhile
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
        kernels = kernels_of_a_launch(node_names(graph), 1 + count)
        if isinstance(kernels, str):
            return kernels
        # On the buffers that a rotation uses last: the replay that counts must not find its own in
        # the L2. The GPU works on it while the host submits the other.
        before = capture(launches[-count:], count)
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


def kernels_of_a_launch(nodes: Sequence[str], launches: int) -> tuple[str, ...] | str:
    """Names of the kernels of each of a graph's launches; a sentence where they are no whole number
    of each.

    Args:
        nodes: names of the graph's nodes, in the order of their capture.
        launches: 3 or more.
    """
    if UNKNOWN in nodes:
        return ()
    counts = Counter(name for name in nodes if name != _CLOCK)
    # What a graph has once, ahead of all else, is of the graph, as the kernel that counts the
    # replays of lean's (kernels/lean/workspace.py).
    ahead = takewhile(lambda name: name != _CLOCK, nodes)
    of_graph = {name for name in ahead if counts[name] == 1}
    launched = {name: count for name, count in counts.items() if name not in of_graph}
    if not launched or any(count % launches for count in launched.values()):
        seen = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
        return (
            f"the graph has {counts.total()} kernels for {launches} launches ({seen}), no whole"
            " number each"
        )
    return tuple(name for name, count in launched.items() for _ in range(count // launches))


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
