"""Plays a schedule over a GPU, event by event.

What is modelled: CTAs start in order as slots (SMs x resident CTAs) fall free. A CTA walks its segments: it fills its
pipeline, streams the segment's K and V, drains the last LeanTile and writes an output or a partial. The partials of a
split output tile are merged when the last has arrived (as by a host block that waited for it), or by a second launch.
All CTAs that stream share the bandwidth of the DRAM equally, none faster than a CTA alone can be, all together no
faster than the SMs' ports to the L2. The rates, and what is left out of them, are in leanbench.model.rates; left out
here: two CTAs of one SM slowing each other's arithmetic, a host block that waits in its slot, CTAs of a grid that have
no work, and DRAM traffic of partials that a stream-K merge finds in the L2.

Since all streaming CTAs have the same rate, one number tells how far each has come: the bytes that a CTA which had
streamed from the start would have read by now (`_Clock.streamed`). A CTA ends its segment when that number has grown by
the segment's bytes, whatever the rate was in between, so a heap of such ends is all the bookkeeping there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby

from leanbench.decomposition import Schedule, Segment, TileGrid, tile_rows
from leanbench.errors import UserError
from leanbench.gpu.spec import GpuSpec
from leanbench.model import rates
from leanbench.problem import ELEMENT_BYTES, AttentionProblem
from leanbench.registry import KernelConfig
from leanbench.timeline import Span, SpanKind

#: Before a segment's first byte counts: lengths, pointers and the query tile, read one after the other.
FILL_US = 1.0
#: After its last byte, beside the last LeanTile's arithmetic: the stores of an output or a partial.
WRITE_US = 0.3
#: stream-K: a partial's way to the L2 and from there to the CTA that merges.
ARRIVE_US = 0.7
#: The merge of an output tile: a round of dependent loads from the L2, the stores.
MERGE_US = 0.8
#: And for each partial: once, and for each of its numbers that one CTA merges (rows x head_dim; fitted up to 512).
MERGE_PARTIAL_US = 0.057
MERGE_NUMBER_US = 0.0002
#: fixed_split: the second kernel's node in the graph, waiting for the first to end.
MERGE_LAUNCH_US = 1.5


@dataclass(frozen=True)
class CtaSpan:
    """When a CTA ran, in microseconds from the launch, and where: CTAs of one SM share its slots."""

    cta: int
    sm: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Simulation:
    """What one launch would take."""

    latency_us: float
    #: The K and V that must be read, over the latency.
    bandwidth_tb_s: float
    #: CTAs that ran at once at most.
    slots: int
    #: CTAs that had work, by number; the second launch's are not among them.
    ctas: tuple[CtaSpan, ...]


def simulate(
    schedule: Schedule,
    problem: AttentionProblem,
    config: KernelConfig,
    spec: GpuSpec,
    spans: list[tuple[int, Span]] | None = None,
) -> Simulation:
    """One launch of `schedule` with cold caches.

    Args:
        spans: what every CTA did, by number, is appended; microseconds from the launch. Wait and reduction of a split
            output tile are its host block's, where the kernel has them, whichever CTA's partial came last.

    Raises:
        UserError: not even one CTA of this config fits an SM.
    """
    resident = rates.resident_ctas(problem, config, spec)
    if resident == 0:
        raise UserError(
            f"{config.num_stages} stages of {config.tile_tokens} tokens x head_dim {problem.head_dim} do not fit the "
            f"{spec.shared_kb_per_cta} KB of shared memory of a CTA on {spec.name}: lower num_stages or tile_tokens"
        )
    slots = spec.sms * resident
    player = _Player(schedule, problem, config, spec, slots, spans)
    player.run()
    latency_us = player.clock.now_us + (_merge_launch_us(schedule, problem, spec) if schedule.merge_launch else 0.0)
    ctas = tuple(CtaSpan(cta, player.sm[cta], player.start_us[cta], player.end_us[cta]) for cta in sorted(player.sm))
    return Simulation(latency_us, problem.kv_bytes / latency_us / 1e6, slots, ctas)


def merge_partial_us(numbers: int) -> float:
    """What one more partial adds to a merge in which a CTA reads `numbers` of its numbers."""
    return MERGE_PARTIAL_US + MERGE_NUMBER_US * numbers


_Event = Callable[[int, int], None]


@dataclass
class _Clock:
    """Time, and the bytes that a CTA which always streams would have read by then."""

    now_us: float = 0.0
    streamed: float = 0.0


@dataclass
class _Player:
    """One play of a schedule: the events to come, and who ran where and when so far."""

    schedule: Schedule
    problem: AttentionProblem
    config: KernelConfig
    spec: GpuSpec
    slots: int
    #: Filled on the way, where somebody wants them.
    spans: list[tuple[int, Span]] | None = None
    clock: _Clock = field(default_factory=_Clock)
    #: By CTA.
    sm: dict[int, int] = field(default_factory=dict)
    start_us: dict[int, float] = field(default_factory=dict)
    end_us: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        segments = self.schedule.segments
        self._work = [(cta, list(run)) for cta, run in groupby(segments, key=lambda segment: segment.cta)]
        self._parts = Counter(segment.output_tile for segment in segments if not segment.is_whole)
        self._missing = dict(self._parts)
        #: By index into _work: when the segment it is in began.
        self._began_us: dict[int, float] = {}
        #: By output tile: its host block, and when that had its own part done.
        self._hosts: dict[int, tuple[int, float]] = {}
        # A stream-K output tile's rows are merged by one CTA.
        rows = min(self.problem.group_size, tile_rows(self.problem.group_size, self.problem.head_dim))
        self._merge_partial_us = merge_partial_us(rows * self.problem.head_dim)
        self._per_sequence = TileGrid.of(self.problem, self.config.tile_tokens).per_sequence
        self._drain_us = rates.tile_compute_us(self.problem, self.config, self.spec) + WRITE_US
        self._cta_rate = rates.cta_bytes_per_us(self.problem, self.config, self.spec)
        self._gpu_rate = min(rates.achievable_bytes_per_us(self.spec), self.spec.sms * rates.sm_bytes_per_us(self.spec))
        self._next = 0
        self._order = 0
        #: (time, order, what happens then, index into _work, segment)
        self._waiting: list[tuple[float, int, _Event, int, int]] = []
        #: (value of clock.streamed at its end, order, index into _work, segment)
        self._streaming: list[tuple[float, int, int, int]] = []

    def run(self) -> None:
        for slot in range(min(self.slots, len(self._work))):
            self._start(slot % self.spec.sms, rates.LAUNCH_US, rates.RAMP_US + FILL_US)
        while self._waiting or self._streaming:
            self._step()

    def _step(self) -> None:
        """Moves the clock to the next event."""
        clock = self.clock
        rate = self._rate()
        if self._streaming:
            streamed, _, index, segment = self._streaming[0]
            done_us = clock.now_us + (streamed - clock.streamed) / rate
            if not self._waiting or done_us <= self._waiting[0][0]:
                heappop(self._streaming)
                clock.now_us, clock.streamed = done_us, streamed
                self._after(self._drain_us, self._on_written, index, segment)
                return
        at_us, _, event, index, segment = heappop(self._waiting)
        if self._streaming:
            clock.streamed += (at_us - clock.now_us) * rate
        clock.now_us = at_us
        event(index, segment)

    def _rate(self) -> float:
        """Bytes per microsecond of each streaming CTA."""
        return min(self._cta_rate, self._gpu_rate / max(1, len(self._streaming)))

    def _after(self, delay_us: float, event: _Event, index: int, segment: int) -> None:
        self._order += 1
        heappush(self._waiting, (self.clock.now_us + delay_us, self._order, event, index, segment))

    def _start(self, sm: int, at_us: float, fill_us: float) -> None:
        cta, _ = self._work[self._next]
        self.sm[cta], self.start_us[cta] = sm, at_us
        self._began_us[self._next] = at_us
        self._after(at_us - self.clock.now_us + fill_us, self._on_filled, self._next, 0)
        self._next += 1

    def _on_filled(self, index: int, segment: int) -> None:
        self._order += 1
        end = self.clock.streamed + self._bytes(self._work[index][1][segment])
        heappush(self._streaming, (end, self._order, index, segment))

    def _on_written(self, index: int, segment: int) -> None:
        part = self._work[index][1][segment]
        if part.is_whole or self.schedule.merge_launch:
            self._note("tiles", part.cta, part.output_tile, self._began_us[index], self.clock.now_us)
            self._on_merged(index, segment)
        else:
            self._after(ARRIVE_US, self._on_arrived, index, segment)

    def _on_arrived(self, index: int, segment: int) -> None:
        part, now_us = self._work[index][1][segment], self.clock.now_us
        output_tile = part.output_tile
        self._note("tiles", part.cta, output_tile, self._began_us[index], now_us)
        if part.is_host:
            self._hosts[output_tile] = part.cta, now_us
        self._missing[output_tile] -= 1
        if self._missing[output_tile]:
            self._on_merged(index, segment)
        else:
            merge_us = MERGE_US + self._merge_partial_us * self._parts[output_tile]
            host, waits_since_us = self._hosts[output_tile]
            self._note("wait", host, output_tile, waits_since_us, now_us)
            self._note("reduction", host, output_tile, now_us, now_us + merge_us)
            self._after(merge_us, self._on_merged, index, segment)

    def _on_merged(self, index: int, segment: int) -> None:
        """The CTA is through with a segment: on to its next one, or its slot to the next CTA."""
        cta, segments = self._work[index]
        if segment + 1 < len(segments):
            self._began_us[index] = self.clock.now_us
            self._after(FILL_US, self._on_filled, index, segment + 1)
            return
        self.end_us[cta] = self.clock.now_us
        if self._next < len(self._work):
            self._start(self.sm[cta], self.clock.now_us, FILL_US)

    def _note(self, kind: SpanKind, cta: int, output_tile: int, start_us: float, end_us: float) -> None:
        if self.spans is not None and end_us > start_us:
            self.spans.append((cta, Span(kind, output_tile, start_us, end_us)))

    def _bytes(self, segment: Segment) -> int:
        """K and V of a segment; tokens past the end of the context are masked and not read."""
        context = self.problem.contexts[segment.output_tile // self._per_sequence]
        tile_tokens = self.config.tile_tokens
        tokens = min(segment.last * tile_tokens, context) - segment.first * tile_tokens
        return 2 * tokens * self.problem.head_dim * ELEMENT_BYTES


def _merge_launch_us(schedule: Schedule, problem: AttentionProblem, spec: GpuSpec) -> float:
    """fixed_split's second kernel: one CTA per query head reads that head's partials."""
    parts = Counter(segment.output_tile for segment in schedule.segments)
    rows = problem.group_size * problem.q_len
    # fp32, with the two softmax statistics of each row; they come from the L2 mostly, DRAM's rate is a lower bound.
    partial_bytes = 4 * rows * (problem.head_dim + 2)
    waves = -(-len(parts) // (spec.sms * rates.MAX_CTAS_PER_SM))
    merge_us = waves * MERGE_US + merge_partial_us(problem.head_dim) * max(parts.values())
    traffic_us = sum(parts.values()) * partial_bytes / rates.achievable_bytes_per_us(spec)
    return MERGE_LAUNCH_US + merge_us + traffic_us
