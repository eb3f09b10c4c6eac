"""Timeline of every CTA of a launch, measured by events in the kernel or predicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from leanbench.core.problem import AttentionProblem

#: `tiles`: read and compute LeanTiles of an output tile. `wait`: wait for other CTAs' partials.
#: `reduction`: merge partials and write the output.
SpanKind = Literal["tiles", "wait", "reduction"]


@dataclass(frozen=True)
class Span:
    """Activity of a CTA, in microseconds from the first CTA's start."""

    kind: SpanKind
    output_tile: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class CtaTimeline:
    """One CTA. Several can be on one SM at once."""

    #: GPU kernel: `lean_kernel`, `split_kernel`, `merge_kernel`...
    launch: str
    cta: int
    sm: int
    start_us: float
    end_us: float
    #: In order of time, without overlap.
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """All CTAs of one call, second launches included. Time 0 is the first CTA's start."""

    kernel: str
    problem: AttentionProblem
    #: Launch settings, as in a row.
    config: dict[str, Any] | None
    source: Literal["measured", "predicted"]
    #: Product name.
    gpu: str
    #: SMs of the GPU, with and without work.
    sms: int
    output_tiles: int
    ctas: tuple[CtaTimeline, ...]
    #: Median latency of the plain kernel, and of the instrumented one if measured.
    latency_us: float | None = None
    traced_latency_us: float | None = None
    #: Resolution of the event clock.
    tick_ns: int | None = None
    #: Rank of the GPU if several share the problem. Clocks of GPUs are not comparable: each has its
    #: own time 0.
    rank: int | None = None

    @property
    def name(self) -> str:
        """Kernel, with the rank if there are several."""
        return self.kernel if self.rank is None else f"{self.kernel}, rank {self.rank}"

    @property
    def own_problem(self) -> AttentionProblem:
        """Part of the problem on this GPU."""
        return self.problem if self.rank is None else self.problem.shard(self.rank)

    @cached_property
    def duration_us(self) -> float:
        """From the first CTA's start to the last one's end."""
        return max((cta.end_us for cta in self.ctas), default=0.0)

    @cached_property
    def busy_us(self) -> dict[int, float]:
        """Time in which an SM has at least one CTA that is not waiting, for each SM with a CTA."""
        by_sm: dict[int, list[tuple[float, float]]] = {}
        for cta in self.ctas:
            by_sm.setdefault(cta.sm, []).extend(_working(cta))
        return {sm: _union_us(intervals) for sm, intervals in sorted(by_sm.items())}

    @property
    def sm_busy_share(self) -> float:
        """Busy time of all SMs over SMs x duration. SMs without work count."""
        if not self.duration_us:
            return 0.0
        return sum(self.busy_us.values()) / (self.sms * self.duration_us)


def _working(cta: CtaTimeline) -> list[tuple[float, float]]:
    """Return the intervals of a CTA without its waits."""
    parts, at = [], cta.start_us
    for span in cta.spans:
        if span.kind == "wait":
            parts.append((at, span.start_us))
            at = span.end_us
    return [*parts, (at, cta.end_us)]


def _union_us(intervals: list[tuple[float, float]]) -> float:
    total, covered = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
