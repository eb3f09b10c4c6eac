"""A second opinion on a latency: the GPU's own timestamps of every kernel, by CUPTI through
torch's profiler.

It shares nothing with the events around a graph replay but the launches: another clock, each kernel
stamped by itself, and launches counted instead of assumed. What it gives is the time from one
launch's first kernel to the next one's, so the gap between launches is in it as it is in the
events' figure.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from leanbench.measure.timing import Launches

#: The two methods may differ by this share of the latency, or by this many microseconds: stamping
#: each kernel keeps it from overlapping its neighbours' start and end.
TOLERANCE_SHARE = 0.02
TOLERANCE_US = 1.0
#: Device time behind one figure, and the launches in it: the profiler spends host time on each.
_FIGURE_US = 2000.0
_LAUNCHES = (2, 32)
#: At most so many figures, fewer where they would take longer than this together: a large problem
#: stays a burst.
_FIGURES = 3
_LONG_US = 10_000.0


@dataclass(frozen=True)
class KernelStart:
    """When one GPU kernel (or copy) started, as CUPTI saw it."""

    name: str
    start_us: float


@dataclass(frozen=True)
class CrossCheck:
    """Microseconds of one launch, a figure a replay."""

    samples_us: tuple[float, ...]
    #: Names of the GPU kernels of one launch, in order.
    kernels: tuple[str, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def cross_check(launches: Launches, latency_us: float) -> CrossCheck | str:
    """Times of a graph of the launches under the profiler; a sentence where that gives no figure.

    Args:
        latency_us: what one launch takes, roughly.
    """
    import torch

    from leanbench.measure.timing import capture

    fewest, most = _LAUNCHES
    count = max(fewest, min(most, math.ceil(_FIGURE_US / latency_us)))
    figures = min(_FIGURES, math.ceil(_LONG_US / (count * latency_us)))
    graph = capture(launches, count)
    # On the buffers that a rotation uses last: the replay that counts must not find its own in the
    # L2.
    before = capture(launches[-count:], count)
    try:
        replays = []
        for _ in range(figures):
            if len(launches) > count:
                for launch in launches:
                    launch()
            torch.cuda.synchronize()
            replays.append(_profiled(before, graph))
    except RuntimeError as error:
        # Raises again where it was an error of the kernel itself.
        torch.cuda.synchronize()
        return (
            "the profiler gave no kernel times to cross-check with"
            f" ({str(error).partition(chr(10))[0]})"
        )
    return from_spans(replays, count)


def from_spans(replays: Sequence[Sequence[KernelStart]], launches: int) -> CrossCheck | str:
    """The figure of each replay from its kernels' spans."""
    if not all(replays):
        return "the profiler saw no kernel, so there is no cross-check"
    samples = []
    names: tuple[str, ...] = ()
    for spans in replays:
        counts = Counter(span.name for span in spans)
        launched = _launched(spans, {name for name in counts if counts[name] < launches})
        per_launch, rest = divmod(len(launched), launches)
        if rest or not launched:
            seen = ", ".join(f"{count} x {name}" for name, count in counts.items())
            return (
                f"the profiler saw {len(spans)} kernels in {launches} launches ({seen}), no whole"
                " number each"
            )
        starts = [span.start_us for span in launched[::per_launch]]
        samples.append((starts[-1] - starts[0]) / (launches - 1))
        names = names or tuple(span.name for span in launched[:per_launch])
    return CrossCheck(tuple(samples), names)


def _launched(spans: Sequence[KernelStart], rare: set[str]) -> list[KernelStart]:
    """The kernels of the launches, in order of time, without the `rare` ones that the graph begins
    with: the first captured launch of lean has a kernel before it that counts replays
    (kernels/lean/workspace.py).
    """
    in_order = sorted(spans, key=lambda span: span.start_us)
    return [*dropwhile(lambda span: span.name in rare, in_order)]


def disagreement(crosscheck_us: float, samples_us: Sequence[float]) -> str | None:
    """A sentence where the cross-check lies outside the samples, by more than what stamping costs.

    Outside all of them: it is the figure of a few launches, as noisy as any one sample.
    """
    latency_us = statistics.median(samples_us)
    allowed_us = max(TOLERANCE_US, TOLERANCE_SHARE * latency_us)
    if min(samples_us) - allowed_us <= crosscheck_us <= max(samples_us) + allowed_us:
        return None
    return (
        f"the profiler's kernel times give {crosscheck_us:.2f} µs a launch,"
        f" {crosscheck_us / latency_us - 1:+.1%} from the graph replay's {latency_us:.2f} µs:"
        " neither figure is safe"
    )


def _profiled(before: torch.cuda.CUDAGraph, graph: torch.cuda.CUDAGraph) -> list[KernelStart]:
    """The kernels of one replay, in order of time. As long a one before it is left out: after an
    idle moment the first is off.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        # It warns that a second session does not keep the first one's events; each is read before
        # the next.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            before.replay()
            graph.replay()
            torch.cuda.synchronize()
        events = profiler.events()
    on_gpu = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    spans = [
        KernelStart(event.name, event.time_range.start)
        for event in events or ()
        if event.device_type == on_gpu
    ]
    spans.sort(key=lambda span: span.start_us)
    return spans[len(spans) // 2 :]
