"""Plays a schedule over a GPU, event by event.

CTAs start in order as slots (SMs x resident CTAs) fall free. A CTA walks its segments: after
`segment_us` it streams the segment's K and V, then finishes its arithmetic and writes an output or
a partial. A host block keeps its slot until the partials of its output tile have arrived and are
merged. The rate of a streaming CTA depends on its SM: on how many of the SM's CTAs stream, and on
how the SMs share the memory (`share`).

SMs of one class with the same number of streaming CTAs form a group, in which all CTAs have the
same rate. `_Group.clock` is the progress of a group: the bytes that a CTA would have read in it
since the start. A CTA ends its segment when the clock has grown by the segment's bytes, whatever
the rate was. When an SM changes group, only that SM's CTAs are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby

from leanbench.core.decomposition import Schedule, Segment
from leanbench.core.problem import AttentionProblem
from leanbench.core.timeline import Span, SpanKind
from leanbench.model.rates import SM_CLASSES, Rates


@dataclass(slots=True, eq=False)
class Load:
    """SMs of one class with the same number of streaming CTAs."""

    #: Share of saturated memory over the mean, streaming CTAs per SM, and demand of an SM.
    weight: float
    ctas: int
    demand: float
    sms: int = 0
    #: Rate of each CTA, and the rate it could get if it were faster.
    rate: float = 0.0
    reach: float = 0.0


def share(loads: Sequence[Load], available: float, sm_limit: float) -> None:
    """Set rate and reach of the loads. No SM gets more than it demands. SMs that demand more than
    is left share the rest by weight.

    Args:
        available: Bytes per microsecond of the memory.
        sm_limit: Maximum that one SM reads.
    """
    if sum(load.demand * load.sms for load in loads) <= available:
        for load in loads:
            load.rate, load.reach = load.demand / load.ctas, sm_limit / load.ctas
        return
    weights = sum(load.weight * load.sms for load in loads)
    # The easiest to satisfy first: the others share the rest.
    for load in sorted(loads, key=lambda load: load.demand / load.weight):
        fair = load.weight * available / weights
        got = min(load.demand, fair)
        load.rate, load.reach = got / load.ctas, min(fair, sm_limit) / load.ctas
        available -= got * load.sms
        weights -= load.weight * load.sms


#: Events closer than this happen at once.
SAME_US = 1e-9
#: Rounding error of a segment.
SAME_BYTES = 1e-2


@dataclass(frozen=True, slots=True)
class CtaWork:
    """Work of one CTA, in order."""

    cta: int
    segments: tuple[Segment, ...]
    #: K and V of each segment.
    read_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """Short whole output tiles of one warp each. A CTA walks as many at a time as it has warps."""

    #: Tokens up to which output tiles are packed.
    tokens: int
    #: Tokens that a warp takes at a time, and warps.
    chunk: int
    warps: int

    def steps(
        self, segments: Sequence[Segment], tokens: Sequence[int], steps: Sequence[int]
    ) -> list[int]:
        """Return `steps` with those of packed output tiles replaced.

        The first tile of a turn of warps has the chunks of the turn's longest one. The other tiles
        of the turn have none, only their pauses.

        Args:
            tokens: Tokens of each segment.
        """
        packed = list(steps)
        first: int | None = None
        for at, (part, count) in enumerate(zip(segments, tokens, strict=True)):
            # Tiles of one LeanTile, without one for their end.
            if part.of > 1 or count > self.tokens:
                first = None
                continue
            if first is None or at == first + self.warps:
                first = at
            packed[at] = 0
            packed[first] = max(packed[first], -(-count // self.chunk))
        return packed


def work_of(
    schedule: Schedule,
    problem: AttentionProblem,
    tile_tokens: int,
    step_tokens: int = 1,
    tile_heads: int = 1,
    packing: Packing | None = None,
) -> list[CtaWork]:
    """Return every CTA with work. Tokens past the end of a context, or before its window, are not
    read.

    Args:
        step_tokens: Tokens of a segment per step. A shorter last step takes as long.
        tile_heads: KV heads whose tokens an output tile reads.
        packing: Packing of short output tiles; None if all warps walk each.
    """
    lengths, per_sequence = problem.visible_lengths, schedule.output_tiles // problem.batch
    work = []
    for cta, run in groupby(schedule.segments, key=lambda segment: segment.cta):
        segments = tuple(run)
        # A LeanTile that is counted for an output tile's end has none.
        tokens = [
            max(
                0,
                min(part.last * tile_tokens, lengths[part.output_tile // per_sequence])
                - part.first * tile_tokens,
            )
            for part in segments
        ]
        steps = [-(-count // step_tokens) for count in tokens]
        if packing is not None:
            steps = packing.steps(segments, tokens, steps)
        step_bytes = tile_heads * problem.token_bytes * step_tokens
        read = tuple(step_bytes * count for count in steps)
        work.append(CtaWork(cta, segments, read))
    return work


@dataclass(slots=True, eq=False)
class _Sm:
    number: int
    streaming: list[_Run] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Run:
    """A CTA that has started."""

    work: CtaWork
    sm: _Sm
    start_us: float
    #: The segment it is in, since when, and the value of its group's clock at which that ends.
    at: int = 0
    began_us: float = 0.0
    ends_at: float = 0.0
    #: The heap entry that counts; older ones are stale.
    entry: int = -1


@dataclass(slots=True, eq=False)
class _Group:
    load: Load
    clock: float = 0.0
    heap: list[tuple[float, int, _Run]] = field(default_factory=list)

    def left_bytes(self) -> float:
        """Return the bytes to the next end of a segment; infinite if no CTA streams."""
        heap = self.heap
        while heap and heap[0][1] != heap[0][2].entry:
            heappop(heap)
        return heap[0][0] - self.clock if heap else float("inf")

    def pop_ended(self) -> list[_Run]:
        ended = []
        while self.left_bytes() <= SAME_BYTES:
            ended.append(heappop(self.heap)[2])
        return ended


@dataclass(frozen=True, slots=True)
class Played:
    """When a CTA ran, in microseconds from the launch, and on which SM."""

    cta: int
    sm: int
    start_us: float
    end_us: float


class Player:
    """One play of a schedule."""

    def __init__(
        self,
        work: Sequence[CtaWork],
        rates: Rates,
        merge_launch: bool,
        spans: list[tuple[int, Span]] | None = None,
    ) -> None:
        self.rates = rates
        self.now_us = 0.0
        self.played: list[Played] = []
        self._work = work
        self._merge_launch = merge_launch
        self._spans = spans
        self._next = 0
        self._order = 0
        self._due: list[tuple[float, int, Callable[[_Run], None], _Run]] = []
        self._groups: dict[tuple[int, int], _Group] = {}
        self._active: list[_Group] = []
        self._stale = True
        self._parts = Counter(
            part.output_tile
            for cta in work
            for part in cta.segments
            if not (part.is_whole or merge_launch)
        )
        self._missing = dict(self._parts)
        #: By output tile: when the last partial so far arrived, and the host block once it has its
        #: own.
        self._arrived_us: dict[int, float] = {}
        self._hosts: dict[int, tuple[_Run, float]] = {}

    def play(self) -> float:
        """Return the microseconds from the launch to the last CTA's end."""
        sms = [_Sm(number) for number in range(self.rates.sms)]
        for slot in range(min(self.rates.slots, len(self._work))):
            self._start(sms[slot % len(sms)], self.rates.start_us, self.rates.first_byte_us)
        heapify(self._due)
        changes = [*self.rates.warm_up_ends(), float("inf")]
        while self._due or self._active:
            while self._due and self._due[0][0] <= self.now_us + SAME_US:
                _, _, event, run = heappop(self._due)
                event(run)
            while changes[0] <= self.now_us + SAME_US:
                changes.pop(0)
                self._stale = True
            if self._stale:
                self._share()
            self._step(changes[0])
        return max((cta.end_us for cta in self.played), default=0.0)

    def _step(self, change_us: float) -> None:
        """Advance to the next event: the last byte of a segment, a due event, or a change of the
        memory's rate.
        """
        if not self._active:
            # Nobody streams: the memory's rate matters to nobody either.
            self.now_us = max(self.now_us, self._due[0][0]) if self._due else self.now_us
            return
        soonest_us = min(group.left_bytes() / group.load.rate for group in self._active)
        until_us = min(change_us, self._due[0][0] if self._due else float("inf"))
        step_us = max(0.0, min(soonest_us, until_us - self.now_us))
        self.now_us += step_us
        ended: list[tuple[_Run, float]] = []
        for group in self._active:
            group.clock += group.load.rate * step_us
            ended += [(run, group.load.reach) for run in group.pop_ended()]
        # All of them found the memory as it was until now; their slots go to the next CTAs SM by
        # SM.
        for run, reach in sorted(ended, key=lambda run_and_reach: run_and_reach[0].work.cta):
            self._on_read(run, reach)

    def _share(self) -> None:
        self._active = [group for group in self._groups.values() if group.load.sms]
        available = self.rates.memory_bytes_per_us(self.now_us + SAME_US)
        share([group.load for group in self._active], available, self.rates.sm_bytes_per_us)
        self._stale = False

    def _group(self, sm: _Sm) -> _Group:
        """Return the group of an SM by the CTAs that stream on it now."""
        key = sm.number % SM_CLASSES, len(sm.streaming)
        group = self._groups.get(key)
        if group is None:
            weight, demand = self.rates.weight(sm.number), self.rates.demand(key[1])
            group = self._groups[key] = _Group(Load(weight, key[1], demand))
        return group

    def _regroup(self, sm: _Sm, joins: _Run | None = None, leaves: _Run | None = None) -> None:
        """Move an SM to its new group, when a CTA on it begins to stream or ends."""
        clock = 0.0
        if sm.streaming:
            old = self._group(sm)
            old.load.sms -= 1
            clock = old.clock
        if leaves is not None:
            sm.streaming.remove(leaves)
            leaves.entry = -1
        if joins is not None:
            sm.streaming.append(joins)
            joins.ends_at = clock + joins.work.read_bytes[joins.at]
        if sm.streaming:
            new = self._group(sm)
            new.load.sms += 1
            for run in sm.streaming:
                self._order += 1
                run.ends_at += new.clock - clock
                run.entry = self._order
                heappush(new.heap, (run.ends_at, self._order, run))
        self._stale = True

    def _start(self, sm: _Sm, at_us: float, first_byte_us: float) -> None:
        run = _Run(self._work[self._next], sm, at_us, began_us=at_us)
        self._next += 1
        self._at(first_byte_us, self._on_filled, run)

    def _at(self, due_us: float, event: Callable[[_Run], None], run: _Run) -> None:
        self._order += 1
        heappush(self._due, (due_us, self._order, event, run))

    def _on_filled(self, run: _Run) -> None:
        self._regroup(run.sm, joins=run)

    def _on_read(self, run: _Run, reach: float) -> None:
        """Handle the last byte of a segment."""
        has_read = run.work.read_bytes[run.at] > 0
        done_us = self.now_us + (self.rates.drain_us(reach) if has_read else 0.0)
        self._regroup(run.sm, leaves=run)
        part = run.work.segments[run.at]
        self._note("tiles", run, part, run.began_us, done_us)
        if part.is_whole or self._merge_launch:
            self._go_on(run, done_us)
            return
        tile = part.output_tile
        self._missing[tile] -= 1
        self._arrived_us[tile] = max(done_us, self._arrived_us.get(tile, 0.0))
        if part.is_host:
            self._hosts[tile] = run, done_us
        else:
            self._go_on(run, done_us)
        if not self._missing[tile]:
            self._merge(tile)

    def _merge(self, tile: int) -> None:
        """Merge an output tile in its waiting host block: the last partial is on its way."""
        run, waits_since_us = self._hosts[tile]
        part, arrived_us = run.work.segments[run.at], self._arrived_us[tile]
        done_us = self.rates.merge.end_us(arrived_us, self._parts[tile])
        self._note("wait", run, part, waits_since_us, arrived_us)
        self._note("reduction", run, part, arrived_us, done_us)
        self._go_on(run, done_us)

    def _go_on(self, run: _Run, done_us: float) -> None:
        """Advance a CTA to its next segment, or give its slot to the next CTA."""
        run.at += 1
        if run.at < len(run.work.segments):
            run.began_us = done_us
            self._at(done_us + self.rates.segment_us, self._on_filled, run)
            return
        self.played.append(Played(run.work.cta, run.sm.number, run.start_us, done_us))
        if self._next < len(self._work):
            self._at(done_us, self._on_free, run)

    def _on_free(self, run: _Run) -> None:
        if self._next < len(self._work):
            self._start(run.sm, self.now_us, self.now_us + self.rates.segment_us)

    def _note(
        self, kind: SpanKind, run: _Run, part: Segment, start_us: float, end_us: float
    ) -> None:
        if self._spans is not None and end_us > start_us:
            self._spans.append((run.work.cta, Span(kind, part.output_tile, start_us, end_us)))
