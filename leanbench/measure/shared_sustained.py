"""Sustained latency and energy of a problem that GPUs share: every rank replays the same chain for
the same seconds and reads its own GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from leanbench.measure.energy import measure_sustained
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.measure.energy_meter import SustainedReading
    from leanbench.measure.instruments import Instruments
    from leanbench.measure.ranks import Ranks
    from leanbench.measure.replay_queue import ReplayQueue

_WARM_UP_S = 1.0
#: After the window: ranks whose counters tick at other times are busy until all have theirs.
_REST_S = 0.5


class EqualReplays:
    """Replays of a chain, in the end as many on each rank: one more on one of them would wait for
    the others for ever.

    Args:
        replay: enqueues one replay.
        end_s: until when all ranks replay, by the clock that they share.
    """

    def __init__(self, ranks: Ranks, replay: Callable[[], object], end_s: float) -> None:
        self._ranks, self._replay, self._end_s = ranks, replay, end_s
        self.count = 0

    def __call__(self) -> None:
        self._replay()
        self.count += 1

    def finish(self, queue: ReplayQueue) -> None:
        """Goes on until the common end, then up to the number of the rank with the most."""
        queue.keep_busy(self._end_s - time.perf_counter())
        for _ in range(max(self._ranks.of_all(self.count)) - self.count):
            self()


def sustained_of_all(
    ranks: Ranks, instruments: Instruments, replay: Callable[[], object], launches: int
) -> Outcome:
    """Sustained latency, and with the energy option the energy of all GPUs together.

    Args:
        replay: enqueues one replay of a chain whose launches wait for those of the other ranks.
        launches: of one replay.

    Raises:
        UserError: the window does not hold two replays.
    """
    options = instruments.options
    if not (options.sustained or options.energy):
        return Outcome()
    # One host: its processes have one clock.
    end_s = ranks.from_first(time.perf_counter() + _WARM_UP_S + options.window_s + _REST_S)
    replays = EqualReplays(ranks, replay, end_s)
    ranks.barrier()
    own = ranks.together(
        partial(
            measure_sustained,
            replays,
            launches,
            instruments.nvml if options.energy else None,
            instruments.calibration,
            options.window_s,
            _WARM_UP_S,
            before_drain=replays.finish,
        ),
        waits=True,
    )
    idle_w = None if instruments.calibration is None else instruments.calibration.idle_power_w
    return together(ranks.of_all(own), ranks.of_all(idle_w))


def together(
    readings: Sequence[SustainedReading], idle_powers_w: Sequence[float | None]
) -> Outcome:
    """The readings of all ranks as one row: times and clocks of the slowest, powers and energies
    added; what one rank cannot read is left out.
    """
    sustained_us = max(reading.sustained_us for reading in readings)
    energy_mj = _total([reading.energy_mj for reading in readings])
    clocks = [reading.clock_mhz for reading in readings if reading.clock_mhz is not None]
    return Outcome(
        sustained_us=sustained_us,
        sustained_s=min(reading.window_s for reading in readings),
        sustained_clock_mhz=min(clocks, default=None),
        energy_mj=energy_mj,
        energy_above_idle_mj=_total([reading.energy_above_idle_mj for reading in readings]),
        energy_by_power_mj=_total([reading.energy_by_power_mj for reading in readings]),
        sustained_power_w=_total([reading.power_w for reading in readings]),
        idle_power_w=_total(idle_powers_w),
        energy_delay_mj_us=None if energy_mj is None else energy_mj * sustained_us,
        warnings=[
            f"rank {rank}: {warning}"
            for rank, reading in enumerate(readings)
            for warning in reading.warnings
        ],
    )


def _total(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if len(present) == len(values) else None
