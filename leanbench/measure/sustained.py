"""Sustained latency and energy of a candidate, side by side with those of the read floor."""

from __future__ import annotations

from leanbench.measure.candidate import TimedCandidate
from leanbench.measure.energy import measure_sustained, sustained_outcome
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.judge import SLOWDOWNS
from leanbench.measure.loaded import LoadedProblem
from leanbench.measure.timing import Replay
from leanbench.records.outcome import Outcome


def sustained_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Latency over seconds of launches; with the energy option, energy over the same seconds."""
    instruments = loaded.instruments
    options = instruments.options
    if not (options.sustained or options.energy):
        return Outcome()
    reading = _reading(loaded, candidate.replay)
    slowdowns = sorted(SLOWDOWNS.intersection(reading.throttle_reasons or ()))
    if slowdowns:
        candidate.warnings.append(
            f"clocks were lowered in the sustained window ({', '.join(slowdowns)})"
        )
    candidate.warnings += reading.warnings
    if not options.energy:
        return sustained_outcome(reading, None, None)
    if instruments.nvml is None:
        candidate.warnings.append(
            "NVML cannot be used here, so there is no energy: run `leanbench doctor`"
        )
        return sustained_outcome(reading, None, None)
    floor = _floor_reading(loaded)
    candidate.warnings += [f"read floor: {warning}" for warning in floor.warnings]
    return sustained_outcome(reading, instruments.calibration, floor)


def _floor_reading(loaded: LoadedProblem) -> SustainedReading:
    """That of the read floor, made once for a problem."""
    if loaded.floor_reading is None:
        instruments = loaded.instruments
        launches = instruments.read_floor.launches(loaded.buffers, loaded.problem.kv_bytes)
        replay = Replay(launches, instruments.options.effort.sample_ms)
        loaded.floor_reading = _reading(loaded, replay)
    return loaded.floor_reading


def _reading(loaded: LoadedProblem, replay: Replay) -> SustainedReading:
    instruments = loaded.instruments
    options = instruments.options
    return measure_sustained(
        replay.graph.replay,
        replay.launches,
        instruments.nvml if options.energy else None,
        instruments.calibration,
        options.window_s,
    )
