"""Stamps: a kernel's own record of what each of its CTAs did and when, compiled in where a launch
passes `stamps`.

Every CTA has a row of int64 words: when it started and ended, its SM, how many marks it made; then
its marks, two words each. A mark ends what the CTA did since the mark before it: what that was (a
kind, and the output tile in the lower half), and the time. The first mark, `BEGIN`, ends what
precedes all work, such as finding out which LeanTiles to walk.

`MARKS` is how many marks a row has room for; 0 is the plain build, in which nothing of this is
left. A barrier comes before each mark, so that it speaks for all of the CTA's warps; one thread
stores it. A CTA counts marks for which there is no room and stores nothing.
"""

import triton
import triton.language as tl
from leanbench.kernels.tile import INTERPRETED
from triton.language.extra.cuda import globaltimer, smid

#: What a CTA did before a mark. `TILES` includes storing the result, as a partial or as a whole
#: tile's output.
BEGIN = tl.constexpr(0)
TILES = tl.constexpr(1)
WAIT = tl.constexpr(2)
REDUCTION = tl.constexpr(3)

#: Words before a row's marks, and words of a mark.
HEADER_WORDS = tl.constexpr(4)
MARK_WORDS = tl.constexpr(2)


@triton.jit
def _time_ns(marks):
    """The GPU's timer, which all SMs share. The interpreter has none: there a mark's time is its
    number.
    """
    return tl.cast(marks, tl.int64) if INTERPRETED else globaltimer()


@triton.jit
def _row(stamps, MARKS: tl.constexpr):
    return stamps + tl.program_id(0).to(tl.int64) * (HEADER_WORDS + MARK_WORDS * MARKS)


@triton.jit
def stamp_start(stamps, MARKS: tl.constexpr):
    """Stamps a CTA's start and its SM; returns its count of marks, 0."""
    if MARKS > 0:
        row = _row(stamps, MARKS)
        tl.store(row, _time_ns(0))
        tl.store(row + 2, 0 if INTERPRETED else smid().to(tl.int64))
    return 0


@triton.jit
def mark(stamps, marks, kind: tl.constexpr, output_tile, MARKS: tl.constexpr):
    """Marks the end of what the CTA did since the last mark; returns the count of marks with this
    one.
    """
    if MARKS > 0:
        tl.debug_barrier()
        at = _row(stamps, MARKS) + HEADER_WORDS + MARK_WORDS * marks
        has_room = marks < MARKS
        tl.store(at, tl.cast(output_tile, tl.int64) + (kind << 32), mask=has_room)
        tl.store(at + 1, _time_ns(marks), mask=has_room)
        marks += 1
    return marks


@triton.jit
def stamp_end(stamps, marks, MARKS: tl.constexpr):
    """Stamps a CTA's end and how many marks it made."""
    if MARKS > 0:
        tl.debug_barrier()
        row = _row(stamps, MARKS)
        tl.store(row + 1, _time_ns(marks))
        tl.store(row + 3, tl.cast(marks, tl.int64))


@triton.jit
def timer_kernel(times, count):
    """Reads the timer `count` times in a row, as fast as one thread does it."""
    for i in range(count):
        tl.store(times + i, _time_ns(i))
