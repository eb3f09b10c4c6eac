"""Layout that every drawing of a timeline shares: which row an SM gets, which lane a CTA, and
the figures next to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from leanbench.core.timeline import CtaTimeline, SpanKind, Timeline

#: Output tile i has colour i modulo their number. Dark and light take turns, so that neighbours
#: differ by lightness alone for whoever sees no hue; all stand out from a white and from a black
#: page.
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


@dataclass(frozen=True, slots=True)
class Mark:
    """A rectangle of the picture: a CTA's life, or one of its spans on top of that."""

    kind: Literal["cta", SpanKind]
    #: Place of its SM among `Panel.sm_order`, from the top.
    row: int
    #: Which of the row's `lanes`.
    lane: int
    lanes: int
    start_us: float
    end_us: float
    launch: str
    cta: int
    #: None for a CTA.
    output_tile: int | None = None
    #: How many marks it stands for: neighbours too short to be drawn are one.
    merged: int = 1


@dataclass(frozen=True)
class Panel:
    """One kernel's timeline, ready to be drawn.

    Rows are SMs in the order of their first CTA: CTAs of neighbouring number stand next to each
    other, however the hardware spreads them. SMs without a CTA come last.
    """

    timeline: Timeline
    #: The schedule's own ceiling, see leanbench.core.decomposition.quantisation_efficiency.
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
            place = (launches[cta.launch], cta.cta)
            first[cta.sm] = min(first.get(cta.sm, place), place)
        empty = [sm for sm in range(self.timeline.sms) if sm not in first]
        return (*sorted(first, key=lambda sm: (first[sm], sm)), *empty)

    @cached_property
    def _ctas(self) -> list[CtaTimeline]:
        return sorted(self.timeline.ctas, key=_by_start)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """CTAs and spans, each lane's in the order of time."""
        rows = {sm: row for row, sm in enumerate(self.sm_order)}
        drawn: list[Mark] = []
        for group in _groups(self._ctas):
            own_lanes = _lanes(group)
            lanes = 1 + max(own_lanes)
            for cta, lane in zip(group, own_lanes, strict=True):
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
        """CTAs that were on one SM at once, at most."""
        return max((mark.lanes for mark in self.marks), default=1)

    @cached_property
    def figures(self) -> Figures:
        return _figures(self.timeline)


@dataclass(frozen=True)
class Figures:
    """Shares of SM time, SMs x duration: busy, waiting and idle add up to 1."""

    busy_share: float
    #: There was a CTA, and all that were there waited.
    waiting_share: float
    #: A part of the busy share: at least one CTA merged partials.
    reduction_share: float
    idle_share: float
    #: SMs that had a CTA.
    working_sms: int
    #: When the first and the last of those SMs saw its last CTA end: what is between them is the
    #: tail.
    first_end_us: float
    last_end_us: float


def merge_short(marks: Iterable[Mark], shortest_us: float) -> list[Mark]:
    """The same picture with no more marks than its resolution can show.

    Neighbours in a lane that together last no longer than `shortest_us` become one, of the kind and
    output tile of the longest among them. CTAs and spans are merged apart.
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
    """`merge_short`, with longer and longer `shortest_us` until at most `most` marks are left, if
    that can be.
    """
    merged = merge_short(marks, shortest_us)
    for _ in range(16):
        if len(merged) <= most:
            break
        shortest_us *= 2
        merged = merge_short(merged, shortest_us)
    return merged


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def ticks(end_us: float, most: int) -> list[float]:
    """Round times from 0 to `end_us`, at most `most` steps of 1, 2 or 5 times a power of ten."""
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
    """CTAs that share lanes, by start: a launch's, together with any launch that began before it
    had ended.
    """
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
    """For each CTA, by start: the first lane of its SM that is free.

    An SM's lanes are numbered by their first CTAs: which of two starts a moment earlier is chance.
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
    """The place of each number among them in order."""
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
