"""All candidates of a problem timed in turn, the read floor among them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from leanbench.measure.candidate import Candidate, TimedCandidate
from leanbench.measure.loaded import LoadedProblem
from leanbench.measure.timing import Replay, Timing, run_rounds

#: The read floor among the candidates of a problem.
FLOOR = None
#: A kernel that reaches this share of the floor's latency has the floor looked for again.
_NEAR_FLOOR = 0.99


def time_together(loaded: LoadedProblem, candidates: Sequence[Candidate]) -> list[TimedCandidate]:
    """Interleaved rounds of all candidates, until the median of each is known.

    Raises:
        SuspectResult: a kernel changed its inputs while its graph was made.
    """
    instruments = loaded.instruments
    started_us = int(time.time() * 1e6)
    replays: dict[str | None, Replay] = {}
    for candidate in candidates:
        instruments.announce(candidate.name)
        replays[candidate.name] = Replay(candidate.launches, instruments.options.effort.sample_ms)
        loaded.refuse_changed_inputs(candidate.name)
    timings = _rounds(loaded, replays)
    nvml = instruments.nvml
    seen = None if nvml is None else nvml.other_processes(started_us)
    # The sweep that started this worker is no stranger.
    strangers = [process for process in seen or () if process.pid != os.getppid()]
    return [
        TimedCandidate(
            **vars(candidate),
            replay=replays[candidate.name],
            timing=timings[candidate.name],
            read_floor_us=timings[FLOOR].median_us,
            other_processes=strangers,
        )
        for candidate in candidates
    ]


def _rounds(
    loaded: LoadedProblem, replays: Mapping[str | None, Replay]
) -> dict[str | None, Timing]:
    """Timings of the kernels and of the read floor.

    A kernel faster than the floor may only show that the floor's variant, chosen for a problem of
    nearly this size, is not the best one here: then it is chosen again and all are timed again.
    """
    timings = _rounds_with_floor(loaded, replays, rank_floor=False)
    fastest_us = min(timings[name].median_us for name in replays)
    if fastest_us > _NEAR_FLOOR * timings[FLOOR].median_us:
        return timings
    return _rounds_with_floor(loaded, replays, rank_floor=True)


def _rounds_with_floor(
    loaded: LoadedProblem, replays: Mapping[str | None, Replay], rank_floor: bool
) -> dict[str | None, Timing]:
    instruments = loaded.instruments
    effort, announce = instruments.options.effort, instruments.announce
    announce(None)
    reads = instruments.read_floor.launches(loaded.buffers, loaded.problem.kv_bytes, rank_floor)
    floor = Replay(reads, effort.sample_ms)
    return run_rounds({FLOOR: floor, **replays}, effort, instruments.gpu_state, announce)
