"""Launches of a kernel with stamps, and what the stamps say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from leanbench.kernels.launch import Launch, run_all
from leanbench.kernels.stamps import HEADER_WORDS, MARK_WORDS, REDUCTION, TILES, WAIT

from leanbench.core.registry import TracedCall
from leanbench.core.timeline import CtaTimeline, Span, SpanKind

_KINDS: dict[int, SpanKind] = {
    TILES.value: "tiles",
    WAIT.value: "wait",
    REDUCTION.value: "reduction",
}
#: A CTA whose row starts with this has not started.
_NEVER = -1


class StampedCall(TracedCall):
    """Launches of one call, each with a row of stamps per CTA.

    Args:
        marks: how many marks a CTA's row has room for; each value is compiled on its own.
    """

    def __init__(self, launches: Sequence[Launch], marks: int, device: torch.device) -> None:
        self._launches = tuple(launches)
        self._marks = marks
        words = HEADER_WORDS.value + MARK_WORDS.value * marks
        self._stamps = [
            torch.full((launch.grid, words), _NEVER, dtype=torch.int64, device=device)
            for launch in launches
        ]
        self._run = run_all(
            [
                launch.stamped(stamps, marks)
                for launch, stamps in zip(launches, self._stamps, strict=True)
            ]
        )

    def launch(self) -> None:
        self._run()

    def read(self) -> tuple[CtaTimeline, ...]:
        """See TracedCall.

        Raises:
            RuntimeError: nothing was launched yet, or a CTA made more marks than its row has room
                for.
        """
        for stamps in self._stamps:
            if stamps.is_cuda:
                torch.cuda.synchronize(stamps.device)
        rows = [stamps.tolist() for stamps in self._stamps]
        origin_ns = min(row[0] for launch_rows in rows for row in launch_rows)
        if origin_ns == _NEVER:
            raise RuntimeError("the stamps were read before the traced call was launched")
        return tuple(
            self._cta(launch.name, cta, row, origin_ns)
            for launch, launch_rows in zip(self._launches, rows, strict=True)
            for cta, row in enumerate(launch_rows)
        )

    def _cta(self, launch: str, cta: int, row: list[int], origin_ns: int) -> CtaTimeline:
        start_ns, end_ns, sm, marks = row[: HEADER_WORDS.value]
        if marks > self._marks:
            raise RuntimeError(
                f"CTA {cta} of {launch} made {marks} marks and has room for {self._marks}: "
                "its schedule is not the one the call was prepared for, prepare it again"
            )

        def us(time_ns: int) -> float:
            return (time_ns - origin_ns) / 1e3

        kinds = row[HEADER_WORDS.value :: MARK_WORDS.value][:marks]
        times = row[HEADER_WORDS.value + 1 :: MARK_WORDS.value][:marks]
        # The first mark ends no span.
        spans = tuple(
            Span(_KINDS[kind >> 32], kind & 0xFFFFFFFF, us(begin_ns), us(until_ns))
            for kind, begin_ns, until_ns in zip(kinds[1:], times, times[1:], strict=False)
        )
        return CtaTimeline(launch, cta, sm, us(start_ns), us(end_ns), spans)
