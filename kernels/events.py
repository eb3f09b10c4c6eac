"""Timeline events, recorded by each CTA of a kernel whose launch passes `events`.

Each CTA has a row of int64 words: start, end, SM and number of events, then two words per event. An
event ends the activity since the previous event. Its first word has the kind, and the output tile
in the lower half; its second word has the time. The first event, `BEGIN`, ends all preparation,
such as determining the LeanTiles to walk.

`MAX_EVENTS` is the capacity of a row. With 0 the compiler removes all recording. A barrier precedes
each event, so it covers all warps of the CTA; one thread stores it. Events beyond the capacity are
counted but not stored.
"""

import triton
import triton.language as tl
from leanbench.kernels.tile import INTERPRETED
from triton.language.extra.cuda import globaltimer, smid

#: Kinds of activity that an event ends. `TILES` includes storing the result: a partial, or the
#: output of a whole tile.
BEGIN = tl.constexpr(0)
TILES = tl.constexpr(1)
WAIT = tl.constexpr(2)
REDUCTION = tl.constexpr(3)

#: Words of a row's header, and words per event.
HEADER_WORDS = tl.constexpr(4)
EVENT_WORDS = tl.constexpr(2)


@triton.jit
def _time_ns(recorded):
    """Read the GPU's timer, shared by all SMs. The interpreter returns the event's number."""
    return tl.cast(recorded, tl.int64) if INTERPRETED else globaltimer()


@triton.jit
def _row(events, MAX_EVENTS: tl.constexpr):
    return events + tl.program_id(0).to(tl.int64) * (HEADER_WORDS + EVENT_WORDS * MAX_EVENTS)


@triton.jit
def start_events(events, MAX_EVENTS: tl.constexpr):
    """Record a CTA's start and SM; return the number of events, 0."""
    if MAX_EVENTS > 0:
        row = _row(events, MAX_EVENTS)
        tl.store(row, _time_ns(0))
        tl.store(row + 2, 0 if INTERPRETED else smid().to(tl.int64))
    return 0


@triton.jit
def record_event(events, recorded, kind: tl.constexpr, output_tile, MAX_EVENTS: tl.constexpr):
    """Record the end of an activity; return the number of events, including this one."""
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
    """Record a CTA's end and number of events."""
    if MAX_EVENTS > 0:
        tl.debug_barrier()
        row = _row(events, MAX_EVENTS)
        tl.store(row + 1, _time_ns(recorded))
        tl.store(row + 3, tl.cast(recorded, tl.int64))


@triton.jit
def timer_kernel(times, count):
    """Read the timer `count` times back to back in one thread."""
    for i in range(count):
        tl.store(times + i, _time_ns(i))


@triton.jit
def clock_kernel(reading):
    """Read the timer, the cycles of this SM, and the SM."""
    tl.store(reading, _time_ns(0))
    tl.store(reading + 1, 0 if INTERPRETED else _cycles())
    tl.store(reading + 2, 0 if INTERPRETED else smid().to(tl.int64))


@triton.jit
def _cycles():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
