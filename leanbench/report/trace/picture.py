"""Layout of a timeline's picture: rows of SMs, lanes of CTAs, and the figures next to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from leanbench.core.timeline import CtaTimeline, SpanKind, Timeline
from leanbench.model.parts import parts_of

#: Colours of output tiles, in rotation. Dark and light alternate, so that neighbours differ without
#: hue; all contrast with a white and with a black page.
TILE_COLORS = (
    "#0072b2",
    "#e69f00",
    "#7a4fa3",
    "#56b4e9",
    "#c44e00",
    "#8fcb9b",
    "#00755a",
    "#e7a6c8",
)

Interval = tuple[float, float]
#: Smallest share that does not round to 0.0%.
_VISIBLE = 0.0005


@dataclass(frozen=True, slots=True)
class Mark:
    """A rectangle of the picture: a CTA, or a span on top of its CTA."""

    kind: Literal["cta", SpanKind]
    #: Index of its SM in `Panel.sm_order`.
    row: int
    #: Index of its lane among the row's `lanes`.
    lane: int
    lanes: int
    start_us: float
    end_us: float
    launch: str
    cta: int
    #: None for a CTA.
    output_tile: int | None = None
    #: Number of marks that it replaces. Neighbours too short to be drawn are merged.
    merged: int = 1


@dataclass(frozen=True)
class Panel:
    """One kernel's timeline, ready to be drawn.

    Rows are SMs in the order of their first CTA, so that CTAs of neighbouring number are adjacent.
    SMs without a CTA come last.
    """

    timeline: Timeline
    #: Upper bound by the schedule, see leanbench.core.decomposition.quantisation_efficiency.
    quantisation_efficiency: float | None = None

    @cached_property
    def sm_order(self) -> tuple[int, ...]:
        """SM of each row."""
        first: dict[int, tuple[float, int]] = {}
        launches = {
            name: index
            for index, name in enumerate(dict.fromkeys(cta.launch for cta in self._ctas))
        }
        for cta in self._ctas:
            position = (launches[cta.launch], cta.cta)
            first[cta.sm] = min(first.get(cta.sm, position), position)
        empty = [sm for sm in range(self.timeline.sms) if sm not in first]
        return (*sorted(first, key=lambda sm: (first[sm], sm)), *empty)

    @cached_property
    def _ctas(self) -> list[CtaTimeline]:
        return sorted(self.timeline.ctas, key=_by_start)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """CTAs and spans, in each lane in the order of time."""
        rows = {sm: row for row, sm in enumerate(self.sm_order)}
        drawn: list[Mark] = []
        for group in _groups(self._ctas):
            of_group = _lanes(group)
            lanes = 1 + max(of_group)
            for cta, lane in zip(group, of_group, strict=True):
                mark = Mark(
                    "cta", rows[cta.sm], lane, lanes, cta.start_us, cta.end_us, cta.launch, cta.cta
                )
                drawn.append(mark)
                drawn.extend(
                    replace(
                        mark,
                        kind=s.kind,
                        start_us=s.start_us,
                        end_us=s.end_us,
                        output_tile=s.output_tile,
                    )
                    for s in cta.spans
                )
        return tuple(drawn)

    @property
    def lanes(self) -> int:
        """Maximum number of CTAs on one SM at once."""
        return max((mark.lanes for mark in self.marks), default=1)

    @cached_property
    def figures(self) -> Figures:
        return _figures(self.timeline)


@dataclass(frozen=True)
class Figures:
    """Shares of SM time, SMs x duration: busy, waiting and idle add up to 1."""

    busy_share: float
    #: All CTAs on the SM waited.
    waiting_share: float
    #: Part of the busy share: at least one CTA merged partials.
    reduction_share: float
    idle_share: float
    #: Number of SMs with a CTA.
    working_sms: int
    #: End of the last CTA on the first and on the last of those SMs. The tail lies between them.
    first_end_us: float
    last_end_us: float


def merge_short(marks: Iterable[Mark], shortest_us: float) -> list[Mark]:
    """Merge neighbours in a lane that together last no longer than `shortest_us`.

    The result has the kind and output tile of the longest. CTAs and spans are merged separately.
    """
    by_lane: dict[tuple[bool, int, int, int], list[Mark]] = {}
    for mark in marks:
        by_lane.setdefault((mark.kind == "cta", mark.row, mark.lane, mark.lanes), []).append(mark)
    merged: list[Mark] = []
    for lane in by_lane.values():
        group: list[Mark] = []
        for mark in lane:
            if group and mark.end_us - group[0].start_us > shortest_us:
                merged.append(_as_one(group))
                group = []
            group.append(mark)
        merged.append(_as_one(group))
    return merged


def merge_to(marks: Sequence[Mark], shortest_us: float, most: int) -> list[Mark]:
    """Double `shortest_us` of `merge_short` until at most `most` marks are left, if possible."""
    merged = merge_short(marks, shortest_us)
    for _ in range(16):
        if len(merged) <= most:
            break
        shortest_us *= 2
        merged = merge_short(merged, shortest_us)
    return merged


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals and sort them."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def ticks(end_us: float, most: int) -> list[float]:
    """Choose ticks from 0 to `end_us`: at most `most` steps of 1, 2 or 5 times a power of ten."""
    if end_us <= 0:
        return [0.0]
    exponent = -3
    while True:
        for digit in (1, 2, 5):
            step = digit * 10.0**exponent
            if end_us / step <= most:
                return [round(index * step, 6) for index in range(int(end_us / step + 1e-9) + 1)]
        exponent += 1


def _as_one(group: list[Mark]) -> Mark:
    if len(group) == 1:
        return group[0]
    longest = max(group, key=lambda mark: mark.end_us - mark.start_us)
    count = sum(mark.merged for mark in group)
    return replace(
        longest, start_us=group[0].start_us, end_us=max(mark.end_us for mark in group), merged=count
    )


def _groups(ctas: list[CtaTimeline]) -> list[list[CtaTimeline]]:
    """Group the CTAs that share lanes: those of a launch, and of launches that overlap with it."""
    launches: dict[str, list[CtaTimeline]] = {}
    for cta in ctas:
        launches.setdefault(cta.launch, []).append(cta)
    groups: list[list[CtaTimeline]] = []
    for group in launches.values():
        if groups and group[0].start_us < max(cta.end_us for cta in groups[-1]):
            groups[-1] = sorted(groups[-1] + group, key=_by_start)
        else:
            groups.append(group)
    return groups


def _lanes(ctas: list[CtaTimeline]) -> list[int]:
    """Assign each CTA, by start, to the first free lane of its SM.

    An SM's lanes are numbered by their first CTAs, because the order of two starts is random.
    """
    free_from: dict[int, list[float]] = {}
    first: dict[int, list[int]] = {}
    lanes = []
    for cta in ctas:
        ends = free_from.setdefault(cta.sm, [])
        lane = next(
            (index for index, end_us in enumerate(ends) if end_us <= cta.start_us), len(ends)
        )
        if lane == len(ends):
            first.setdefault(cta.sm, []).append(cta.cta)
        ends[lane : lane + 1] = [cta.end_us]
        lanes.append(lane)
    ranks = {sm: _ranks(numbers) for sm, numbers in first.items()}
    return [ranks[cta.sm][lane] for cta, lane in zip(ctas, lanes, strict=True)]


def _ranks(numbers: list[int]) -> list[int]:
    """Return the rank of each number."""
    order = sorted(range(len(numbers)), key=lambda index: numbers[index])
    return [rank for _, rank in sorted((index, rank) for rank, index in enumerate(order))]


def _by_start(cta: CtaTimeline) -> tuple[float, int]:
    return cta.start_us, cta.cta


def _figures(timeline: Timeline) -> Figures:
    alive: dict[int, list[Interval]] = {}
    reducing: dict[int, list[Interval]] = {}
    for cta in timeline.ctas:
        alive.setdefault(cta.sm, []).append((cta.start_us, cta.end_us))
        spans = [(span.start_us, span.end_us) for span in cta.spans if span.kind == "reduction"]
        reducing.setdefault(cta.sm, []).extend(spans)
    sm_time_us = timeline.sms * timeline.duration_us or 1.0
    busy = timeline.sm_busy_share
    present = sum(map(_total_us, alive.values())) / sm_time_us
    ends = [max(end for _, end in intervals) for intervals in alive.values()] or [0.0]
    return Figures(
        busy_share=busy,
        waiting_share=max(0.0, present - busy),
        reduction_share=sum(map(_total_us, reducing.values())) / sm_time_us,
        idle_share=max(0.0, 1 - present),
        working_sms=len(alive),
        first_end_us=min(ends),
        last_end_us=max(ends),
    )


def _total_us(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def source_words(timeline: Timeline) -> str:
    """Name the source: ``measured on NVIDIA H200``."""
    if timeline.source == "measured":
        return f"measured on {timeline.gpu}"
    return f"predicted for {timeline.gpu}, nothing was measured"


def figure_words(panel: Panel) -> list[str]:
    """Describe the known figures, a phrase each."""
    figures, timeline = panel.figures, panel.timeline
    latency_us, efficiency = timeline.latency_us, panel.quantisation_efficiency
    words = [] if latency_us is None else [f"latency {microseconds(latency_us)} µs"]
    if parts := parts_by_name(timeline):
        named = " + ".join(f"{name} {microseconds(us)}" for name, us in parts.items())
        words.append(f"of it {named}")
    words.append(f"SMs busy {percent(figures.busy_share)}")
    if figures.waiting_share >= _VISIBLE:
        words.append(f"waiting {percent(figures.waiting_share)}")
    if figures.reduction_share >= _VISIBLE:
        words.append(f"merging {percent(figures.reduction_share)}")
    first, last = microseconds(figures.first_end_us), microseconds(figures.last_end_us)
    words.append(f"SMs end at {first} µs" if first == last else f"SMs end at {first} to {last} µs")
    if figures.working_sms < timeline.sms:
        words.append(f"{timeline.sms - figures.working_sms} of {timeline.sms} SMs without a CTA")
    if efficiency is not None:
        words.append(f"quantisation efficiency {percent(efficiency)}")
    cost = instrumentation_cost(timeline)
    if cost is not None:
        words.append(f"latency with events {cost:.3f}x")
    return words


def parts_by_name(timeline: Timeline) -> dict[str, float]:
    """Return the parts of the latency in microseconds; empty if they are not known."""
    parts = parts_of(timeline)
    if parts is None or not timeline.latency_us:
        return {}
    return parts.scaled(timeline.latency_us).by_name


def instrumentation_cost(timeline: Timeline) -> float | None:
    """Return the latency of the build with timeline events over the plain one's."""
    if timeline.traced_latency_us is None or not timeline.latency_us:
        return None
    return timeline.traced_latency_us / timeline.latency_us


def microseconds(value: float) -> str:
    """Format with three or four digits: ``0.83``, ``57.5``, ``1610``."""
    return (
        f"{value:.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"
