"""Timeline events: a kernel's own record of what each of its CTAs did and when, compiled in where a
launch passes `events`.

Every CTA has a row of int64 words: when it started and ended, its SM, how many events it had; then
its events, two words each. An event ends what the CTA did since the event before it: what that was
(a kind, and the output tile in the lower half), and the time. The first event, `BEGIN`, ends what
precedes all work, such as finding out which LeanTiles to walk.

`MAX_EVENTS` is how many events a row holds; 0 is the plain build, in which nothing of this is left.
A barrier comes before each event, so that it speaks for all of the CTA's warps; one thread stores
it. A CTA counts events past the last one that its row holds and stores nothing.
"""

import triton
import triton.language as tl
from leanbench.kernels.tile import INTERPRETED
from triton.language.extra.cuda import globaltimer, smid

#: What a CTA did before an event. `TILES` includes storing the result, as a partial or as a whole
#: tile's output.
BEGIN = tl.constexpr(0)
TILES = tl.constexpr(1)
WAIT = tl.constexpr(2)
REDUCTION = tl.constexpr(3)

#: Words before a row's events, and words of an event.
HEADER_WORDS = tl.constexpr(4)
EVENT_WORDS = tl.constexpr(2)


@triton.jit
def _time_ns(recorded):
    """The GPU's timer, which all SMs share. The interpreter has none: there an event's time is its
    number.
    """
    return tl.cast(recorded, tl.int64) if INTERPRETED else globaltimer()


@triton.jit
def _row(events, MAX_EVENTS: tl.constexpr):
    return events + tl.program_id(0).to(tl.int64) * (HEADER_WORDS + EVENT_WORDS * MAX_EVENTS)


@triton.jit
def start_events(events, MAX_EVENTS: tl.constexpr):
    """Records a CTA's start and its SM; returns its count of events, 0."""
    if MAX_EVENTS > 0:
        row = _row(events, MAX_EVENTS)
        tl.store(row, _time_ns(0))
        tl.store(row + 2, 0 if INTERPRETED else smid().to(tl.int64))
    return 0


@triton.jit
def record_event(events, recorded, kind: tl.constexpr, output_tile, MAX_EVENTS: tl.constexpr):
    """Records the end of what the CTA did since the last event; returns the count of events with
    this one.
    """
    if MAX_EVENTS > 0:
        tl.debug_barrier()
        at = _row(events, MAX_EVENTS) + HEADER_WORDS + EVENT_WORDS * recorded
        fits = recorded < MAX_EVENTS
        tl.store(at, tl.cast(output_tile, tl.int64) + (kind << 32), mask=fits)
        tl.store(at + 1, _time_ns(recorded), mask=fits)
        recorded += 1
    return recorded


@triton.jit
def end_events(events, recorded, MAX_EVENTS: tl.constexpr):
    """Records a CTA's end and how many events it had."""
    if MAX_EVENTS > 0:
        tl.debug_barrier()
        row = _row(events, MAX_EVENTS)
        tl.store(row + 1, _time_ns(recorded))
        tl.store(row + 3, tl.cast(recorded, tl.int64))


@triton.jit
def timer_kernel(times, count):
    """Reads the timer `count` times in a row, as fast as one thread does it."""
    for i in range(count):
        tl.store(times + i, _time_ns(i))
