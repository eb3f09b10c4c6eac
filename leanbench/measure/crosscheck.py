"""Second measurement of a latency: a kernel reads the GPU's own clock before and after launches in
one CUDA graph, and the kernels of the graph are counted.

It shares only the launches with the events around a replay: the clock is another one, and launches
are counted instead of assumed. It does not use the profiler: once CUPTI has been attached to a
process, every later graph replay is slower, by half a microsecond or more per launch
(docs/measuring.md).
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from leanbench.measure.timing import Launches

#: Allowed difference of the two methods, as a share of the latency or in microseconds. The
#: cross-check times a few launches only.
TOLERANCE_SHARE = 0.02
TOLERANCE_US = 1.0
#: Cross-checks longer than all samples by this factor contradict them. The largest of 5,800
#: published rows is 1.2 times the latency.
_CONTRADICTION = 1.5
#: GPU time per figure, and the minimum and maximum number of its launches.
_FIGURE_US = 2000.0
_LAUNCHES = (2, 32)
#: Maximum number of figures. Fewer if they would take longer than this together, so that a large
#: problem stays a burst.
_FIGURES = 3
_LONG_US = 10_000.0
#: Readings of the clock per graph: two in a row, whose difference is the time of a reading, and one
#: after the launches.
_READINGS = 3
#: Words of a reading: time in nanoseconds, cycles of the SM, and which SM. Padded, to align each.
_WORDS = 4
#: Name of the kernel that reads the clock.
_CLOCK = "clock_kernel"
#: Name of a kernel that the driver does not name.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class CrossCheck:
    """Microseconds per launch, one figure per replay."""

    samples_us: tuple[float, ...]
    #: Names of the GPU kernels of one launch; empty if the graph does not have them.
    kernels: tuple[str, ...]
    #: Median SM clock during the launches; None if no two readings were of one SM.
    clock_mhz: int | None = None

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def cross_check(launches: Launches, latency_us: float) -> CrossCheck | str:
    """Time a graph of the launches by the GPU's clock. Return a sentence if that gives no figure.

    Args:
        latency_us: Approximate duration of one launch.
    """
    import torch

    from leanbench.measure.timing import capture

    fewest, most = _LAUNCHES
    count = max(fewest, min(most, math.ceil(_FIGURE_US / latency_us)))
    figures = min(_FIGURES, math.ceil(_LONG_US / (count * latency_us)))
    try:
        read, readings = clock_readings()
        # Start with a launch. Costs of a graph's first launch alone are not timed.
        timed = [launches[index % len(launches)] for index in range(count)]
        stamped = [launches[-1], *readings[:2], *timed, *readings[2:]]
        graph = capture(stamped, len(stamped), keep_graph=True)
        # Use the buffers at the end of a rotation: the replay that counts must not find its own in
        # the L2. The GPU works on this graph while the host submits the other.
        before = capture(launches[-count:], count, keep_graph=True)
        kernels = kernels_of_a_launch(node_names(before), node_names(graph), count)
        if isinstance(kernels, str):
            return kernels
        samples_us, clocks_mhz = [], []
        for _ in range(figures):
            if len(launches) > count:
                for launch in launches:
                    launch()
            torch.cuda.synchronize()
            before.replay()
            graph.replay()
            torch.cuda.synchronize()
            first, second, third = read.tolist()
            samples_us.append(between_us((first[0], second[0], third[0]), count))
            clocks_mhz += clock_between(second, third)
    except RuntimeError as error:
        # Raises again if the kernel itself failed.
        torch.cuda.synchronize()
        return (
            f"the GPU's clock gave no time to cross-check with ({str(error).partition(chr(10))[0]})"
        )
    if min(samples_us) <= 0:
        return "the GPU's clock did not step between launches, so there is no cross-check"
    clock_mhz = round(statistics.median(clocks_mhz)) if clocks_mhz else None
    return CrossCheck(tuple(samples_us), kernels, clock_mhz)


def clock_readings() -> tuple[torch.Tensor, list[Callable[[], object]]]:
    """Return the tensor of readings, a row of `_WORDS` for each, and launches that write it."""
    import torch

    from leanbench.kernels.events import clock_kernel

    read = torch.zeros(_READINGS, _WORDS, dtype=torch.int64, device="cuda")

    def reading(row: torch.Tensor) -> Callable[[], object]:
        return lambda: clock_kernel[(1,)](row, num_warps=1)

    readings = [reading(row) for row in read]
    for each in readings:
        each()
    return read, readings


def clock_between(before: Sequence[int], after: Sequence[int]) -> list[float]:
    """Return the SM clock in MHz between two readings; nothing if another SM made the second.

    SMs begin to count at different times.
    """
    (start_ns, start, sm, *_), (end_ns, end, same, *_) = before, after
    return [(end - start) / (end_ns - start_ns) * 1e3] if sm == same and end_ns > start_ns else []


def between_us(times_ns: Sequence[int], launches: int) -> float:
    """Return microseconds per launch: from the second reading to the third, minus the time of a
    reading.
    """
    first, second, third = times_ns
    return ((third - second) - (second - first)) / 1e3 / launches


def kernels_of_a_launch(
    fewer: Sequence[str], more: Sequence[str], launches: int
) -> tuple[str, ...] | str:
    """Return the kernel names of one launch, as the difference of two graphs. Return a sentence if
    the graphs do not have that many kernels per launch.

    Args:
        fewer: Node names of a graph of `launches` launches, in any order.
        more: Node names of a graph with one more launch, and the readings of the clock.
    """
    if UNKNOWN in more or UNKNOWN in fewer:
        return ()
    seen, of_all = Counter(fewer), Counter(name for name in more if name != _CLOCK)
    # Kernels per graph, such as the one that counts replays of lean's graphs
    # (kernels/lean/workspace.py); the address of the count decides which. Kernels of a launch occur
    # at least twice.
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
    """Return a sentence if the cross-check lies outside all samples by more than the tolerance.

    It times a few launches, so it is as noisy as a single sample.
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


def contradiction(crosscheck_us: float, samples_us: Sequence[float]) -> str | None:
    """Return a sentence if launches take far longer by the GPU's clock than by the events."""
    longest_us = max(samples_us)
    if crosscheck_us <= _CONTRADICTION * longest_us + TOLERANCE_US:
        return None
    return (
        f"launches take {crosscheck_us:.2f} µs by the GPU's own clock, and at most"
        f" {longest_us:.2f} µs by the events: these did not time all of the work"
    )


def node_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Return the names of kernels, copies and fills of a graph captured with `keep_graph`, and of
    its child graphs, in the driver's order. Unnamed kernels are `UNKNOWN`.

    Raises:
        RuntimeError: A driver call failed.
    """
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return _names_in(driver, driver.CUgraph(graph.raw_cuda_graph()))


def _names_in(driver: Any, graph: Any) -> list[str]:
    types = driver.CUgraphNodeType
    others = {
        types.CU_GRAPH_NODE_TYPE_MEMCPY: "memcpy",
        types.CU_GRAPH_NODE_TYPE_MEMSET: "memset",
    }
    _, count = _checked(driver, driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver, driver.cuGraphGetNodes(graph, count)) if count else ((), 0)
    names = []
    for node in nodes[:count]:
        (kind,) = _checked(driver, driver.cuGraphNodeGetType(node))
        if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
            names.append(_kernel_name(driver, node))
        elif kind == types.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver, driver.cuGraphChildGraphNodeGetGraph(node))
            names += _names_in(driver, child)
        elif kind in others:
            names.append(others[kind])
    return names


def _kernel_name(driver: Any, node: Any) -> str:
    (params,) = _checked(driver, driver.cuGraphKernelNodeGetParams(node))
    status, name = (
        driver.cuFuncGetName(params.func)
        if int(params.func)
        else driver.cuKernelGetName(params.kern)
    )
    # Kernels of another context, or an older driver.
    return UNKNOWN if int(status) or not name else demangled(name)


def _checked(driver: Any, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a driver call without its status."""
    status, *rest = returned
    if int(status):
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {text.decode() if text else status}")
    return tuple(rest)


@cache
def demangled(name: bytes) -> str:
    """Return the C++ name of a symbol, or the symbol itself if it is not mangled."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
        free = ctypes.CDLL(None)["free"]
    except (OSError, AttributeError):
        return name.decode()
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    status = ctypes.c_int()
    # The caller frees the result.
    address = demangle(name, None, None, ctypes.addressof(status))
    if status.value or not address:
        return name.decode()
    text = ctypes.string_at(address).decode()
    free(address)
    return text
