"""The same play in a fraction of the time where every CTA has one segment, all of them equally long.

Then all CTAs of an SM, and all SMs of a class, are in step: a class is one thing that fills, streams and drains, and
takes as many CTAs of what is left as it has slots. Where fewer are left, its SMs take them in turn.
tests/model/test_waves.py holds this against leanbench.model.engine: within 3%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leanbench.model.engine import SAME_BYTES, SAME_US, CtaWork
from leanbench.model.rates import SM_CLASSES, Rates
from leanbench.model.sharing import Load, share


def are_alike(work: Sequence[CtaWork], merge_launch: bool) -> bool:
    """Whether `play_alike` can play it: one segment each, as many bytes in all, no partial that a CTA waits for."""
    first = work[0].read_bytes
    return (
        all(one.read_bytes == first for one in work)
        and len(first) == 1
        and (merge_launch or all(one.segments[0].is_whole for one in work))
    )


@dataclass(slots=True, eq=False)
class _Squad:
    """SMs of one class with as many CTAs each, all in step."""

    load: Load
    speed_class: int
    #: When its CTAs begin to stream; then what each still has to read.
    streams_from_us: float
    left_bytes: float
    is_streaming: bool = False


def play_alike(ctas: int, read_bytes: float, rates: Rates) -> float:
    """Microseconds from the launch to the last CTA's end.

    Args:
        ctas: how many, each reading `read_bytes`.
    """
    waiting, now_us, last_us = ctas, 0.0, 0.0
    squads: list[_Squad] = []
    first_wave = min(ctas, rates.slots)
    for speed_class in range(SM_CLASSES):
        sms = len(range(speed_class, rates.sms, SM_CLASSES))
        dealt = first_wave // rates.sms * sms + len(range(speed_class, first_wave % rates.sms, SM_CLASSES))
        squads += _squads(speed_class, sms, dealt, rates.first_byte_us, read_bytes, rates)
    waiting -= first_wave
    changes = [*rates.warm_up_ends(), float("inf")]
    while squads:
        while changes[0] <= now_us + SAME_US:
            changes.pop(0)
        streaming = [squad for squad in squads if squad.is_streaming]
        share([squad.load for squad in streaming], rates.memory_bytes_per_us(now_us + SAME_US), rates.sm_bytes_per_us)
        now_us = _advance(squads, now_us, changes[0])
        for squad in [squad for squad in streaming if squad.left_bytes <= SAME_BYTES]:
            done_us = now_us + rates.drain_us(squad.load.reach)
            last_us = max(last_us, done_us)
            squads.remove(squad)
            taken = min(waiting, squad.load.sms * squad.load.ctas)
            waiting -= taken
            begin_us = done_us + rates.constants.segment_us
            squads += _squads(squad.speed_class, squad.load.sms, taken, begin_us, read_bytes, rates)
    return last_us


def _squads(
    speed_class: int, sms: int, ctas: int, begin_us: float, read_bytes: float, rates: Rates
) -> Iterator[_Squad]:
    """`ctas` dealt to `sms` in turn: some SMs may have one more than others."""
    each, more = divmod(ctas, sms) if sms else (0, 0)
    for count, size in ((each + 1, more), (each, sms - more)):
        if count and size:
            load = Load(rates.weight(speed_class), count, rates.demand(count), size)
            yield _Squad(load, speed_class, begin_us, read_bytes)


def _advance(squads: Sequence[_Squad], now_us: float, change_us: float) -> float:
    """Everybody to the next event."""
    then_us = change_us
    for squad in squads:
        at_us = now_us + squad.left_bytes / squad.load.rate if squad.is_streaming else squad.streams_from_us
        then_us = min(then_us, at_us)
    for squad in squads:
        if squad.is_streaming:
            squad.left_bytes -= squad.load.rate * (then_us - now_us)
        elif squad.streams_from_us <= then_us + SAME_US:
            squad.is_streaming = True
    return then_us
