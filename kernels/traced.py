"""Launches of a kernel with timeline events, and their timelines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from leanbench.kernels.events import EVENT_WORDS, HEADER_WORDS, REDUCTION, TILES, WAIT
from leanbench.kernels.launch import Launch, run_all

from leanbench.core.kernel import TracedCall
from leanbench.core.timeline import CtaTimeline, Span, SpanKind

_KINDS: dict[int, SpanKind] = {
    TILES.value: "tiles",
    WAIT.value: "wait",
    REDUCTION.value: "reduction",
}
#: Initial word of a CTA's row, before it starts.
_NEVER = -1


class TracedLaunches(TracedCall):
    """Launches of one call, each with a row of events per CTA.

    Args:
        max_events: capacity of a CTA's row; each value is a separate build.
    """

    def __init__(self, launches: Sequence[Launch], max_events: int, device: torch.device) -> None:
        self._launches = tuple(launches)
        self._max_events = max_events
        words = HEADER_WORDS.value + EVENT_WORDS.value * max_events
        self._events = [
            torch.full((launch.grid, words), _NEVER, dtype=torch.int64, device=device)
            for launch in launches
        ]
        self._run = run_all(
            [
                launch.traced(events, max_events)
                for launch, events in zip(launches, self._events, strict=True)
            ]
        )

    def launch(self) -> None:
        self._run()

    def read(self) -> tuple[CtaTimeline, ...]:
        """Return the timelines; see TracedCall.

        Raises:
            RuntimeError: no launch yet, or a CTA had more events than its row holds.
        """
        for events in self._events:
            if events.is_cuda:
                torch.cuda.synchronize(events.device)
        rows = [events.tolist() for events in self._events]
        origin_ns = min(row[0] for launch_rows in rows for row in launch_rows)
        if origin_ns == _NEVER:
            raise RuntimeError("the events were read before the traced call was launched")
        return tuple(
            self._cta(launch.name, cta, row, origin_ns)
            for launch, launch_rows in zip(self._launches, rows, strict=True)
            for cta, row in enumerate(launch_rows)
        )

    def _cta(self, launch: str, cta: int, row: list[int], origin_ns: int) -> CtaTimeline:
        start_ns, end_ns, sm, recorded = row[: HEADER_WORDS.value]
        if recorded > self._max_events:
            raise RuntimeError(
                f"CTA {cta} of {launch} had {recorded} events and its row holds"
                f" {self._max_events}: its schedule is not the one the call was prepared for,"
                " prepare it again"
            )

        def us(time_ns: int) -> float:
            return (time_ns - origin_ns) / 1e3

        kinds = row[HEADER_WORDS.value :: EVENT_WORDS.value][:recorded]
        times = row[HEADER_WORDS.value + 1 :: EVENT_WORDS.value][:recorded]
        # The first event ends no span.
        spans = tuple(
            Span(_KINDS[kind >> 32], kind & 0xFFFFFFFF, us(begin_ns), us(until_ns))
            for kind, begin_ns, until_ns in zip(kinds[1:], times, times[1:], strict=False)
        )
        return CtaTimeline(launch, cta, sm, us(start_ns), us(end_ns), spans)
