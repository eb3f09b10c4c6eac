"""The same play in a fraction of the time where every CTA has one segment, all of them equally
long.

Then all CTAs of an SM, and all SMs of a class, are in step: a class is one thing that fills,
streams and drains. Where fewer CTAs are left than slots fall free at once, the SMs take them in
turn. tests/model/test_waves.py holds this against leanbench.model.engine: the same but for
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leanbench.model.engine import SAME_BYTES, SAME_US, CtaWork
from leanbench.model.rates import SM_CLASSES, Rates
from leanbench.model.sharing import Load, share


def are_alike(work: Sequence[CtaWork], merge_launch: bool) -> bool:
    """Whether `play_alike` can play it: one segment each, as many bytes in all, no partial that a
    CTA waits for.
    """
    first = work[0].read_bytes
    return (
        all(cta.read_bytes == first for cta in work)
        and len(first) == 1
        and (merge_launch or all(cta.segments[0].is_whole for cta in work))
    )


@dataclass(slots=True, eq=False)
class _Squad:
    """SMs of one class with as many CTAs each, all in step."""

    load: Load
    speed_class: int
    left_bytes: float


def play_alike(ctas: int, read_bytes: float, rates: Rates) -> float:
    """Microseconds from the launch to the last CTA's end.

    Args:
        ctas: how many, each reading `read_bytes`.
    """
    waiting, now_us, last_us = ctas, 0.0, 0.0
    streaming: list[_Squad] = []
    # By class: when its next CTAs begin to stream, and with that who takes those that are left. All
    # take as long to fill, so this is the order in which slots fall free; a class that has read
    # before another may end after it.
    streams_us = dict.fromkeys(range(min(SM_CLASSES, rates.sms)), rates.first_byte_us)
    changes = [*rates.warm_up_ends(), float("inf")]
    while streaming or waiting:
        while changes[0] <= now_us + SAME_US:
            changes.pop(0)
        share(
            [squad.load for squad in streaming],
            rates.memory_bytes_per_us(now_us + SAME_US),
            rates.sm_bytes_per_us,
        )
        now_us = _advance(streaming, now_us, min([changes[0], *streams_us.values()]))
        for squad in [squad for squad in streaming if squad.left_bytes <= SAME_BYTES]:
            done_us = now_us + rates.drain_us(squad.load.reach)
            last_us = max(last_us, done_us)
            streaming.remove(squad)
            if waiting:
                streams_us[squad.speed_class] = done_us + rates.segment_us
        classes = sorted(
            number for number, at_us in streams_us.items() if at_us <= now_us + SAME_US
        )
        if classes:
            taken = [*_deal(waiting, classes, read_bytes, rates)]
            waiting -= sum(squad.load.sms * squad.load.ctas for squad in taken)
            streaming += taken
            streams_us = {
                number: at_us
                for number, at_us in streams_us.items()
                if waiting and number not in classes
            }
    return last_us


def _deal(
    waiting: int, classes: Sequence[int], read_bytes: float, rates: Rates
) -> Iterator[_Squad]:
    """As many CTAs as the SMs of these classes have slots, dealt in turn: some SMs may have one
    more than others.
    """
    sms = [len(range(speed_class, rates.sms, SM_CLASSES)) for speed_class in classes]
    fewest, more = divmod(min(waiting, sum(sms) * rates.resident), sum(sms))
    for place, (speed_class, size) in enumerate(zip(classes, sms, strict=True)):
        with_more = len(range(place, more, len(classes)))
        for count, some in ((fewest + 1, with_more), (fewest, size - with_more)):
            if count and some:
                load = Load(rates.weight(speed_class), count, rates.demand(count), some)
                yield _Squad(load, speed_class, read_bytes)


def _advance(streaming: Sequence[_Squad], now_us: float, until_us: float) -> float:
    """To the next event: a squad's last byte, or what comes at `until_us`."""
    then_us = min([until_us, *(now_us + squad.left_bytes / squad.load.rate for squad in streaming)])
    for squad in streaming:
        squad.left_bytes -= squad.load.rate * (then_us - now_us)
    return then_us
