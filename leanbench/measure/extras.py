"""Measurements of a cell besides latency and energy: planning where there is some, host time; when
the options ask for them, occupancy, SM busy share and hardware counters. Steps of
leanbench.measure.protocol.
"""

from __future__ import annotations

import statistics
import time

from leanbench.core.kernel import caller
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.measure.candidate import TimedCandidate
from leanbench.measure.counters import count
from leanbench.measure.loaded import LoadedProblem
from leanbench.measure.timeline import record_timeline
from leanbench.records.outcome import Outcome

#: Repeats of a plan: those that count, and those before.
_PLANS, _FIRST_PLANS = 20, 3
#: Calls whose host time counts: as many as the GPU does in so many microseconds, within limits, in
#: chunks that leave room in the launch queue. And those before.
_HOST_DEVICE_US, _LEAST_CALLS, _MOST_CALLS = 15_000.0, 9, 200
_CHUNK, _FIRST_CALLS = 20, 3


def plan_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Wall time of what must run once for a step's lengths, until the GPU has done its part; empty
    without any.
    """
    import torch

    plan = candidate.kernel.planner(loaded.buffers[0], candidate.config)
    if plan is None:
        return Outcome()
    seconds: list[float] = []
    for _ in range(_FIRST_PLANS + _PLANS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return Outcome(plan_us=1e6 * statistics.median(seconds[_FIRST_PLANS:]))


def host_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Host time of an eager call on the buffers in turn: until it returns, not until the GPU has
    done its part.
    """
    import torch

    calls = [caller(launch) for launch in candidate.launches]
    wanted = int(_HOST_DEVICE_US / candidate.timing.median_us)
    count = min(_MOST_CALLS, max(_LEAST_CALLS, wanted))
    seconds: list[float] = []
    for number in range(_FIRST_CALLS + count):
        call = calls[number % len(calls)]
        if number % _CHUNK == _FIRST_CALLS:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return Outcome(host_us=1e6 * statistics.median(seconds[_FIRST_CALLS:]))


def resource_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Theoretical warp occupancy and what it comes from; a kernel that does not tell leaves them
    out.
    """
    instruments = loaded.instruments
    if not instruments.options.occupancy:
        return Outcome()
    resources = candidate.kernel.resources(loaded.buffers[0], candidate.config)
    if not resources:
        return Outcome()
    # The first launch reads K and V.
    reader = resources[0]
    return Outcome(
        theoretical_warp_occupancy=theoretical_occupancy(reader, instruments.spec).share,
        registers_per_thread=reader.registers_per_thread,
        shared_kb_per_cta=reader.shared_bytes / 1024,
        spilled_registers=reader.spilled_registers,
    )


def busy_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """SM busy share, and what measuring it cost; a kernel without an instrumented build leaves them
    out.
    """
    instruments = loaded.instruments
    if not instruments.options.occupancy:
        return Outcome()
    latency_us = candidate.timing.median_us
    timeline = record_timeline(
        loaded.problem,
        candidate.kernel,
        candidate.config,
        loaded.buffers,
        instruments.spec,
        latency_us,
    )
    if timeline is None:
        return Outcome()
    traced_us = timeline.traced_latency_us
    cost = None if traced_us is None else traced_us / latency_us
    return Outcome(sm_busy_share=timeline.sm_busy_share, instrumentation_cost=cost)


def counter_fields(loaded: LoadedProblem, candidate: TimedCandidate) -> Outcome:
    """Nsight Compute's counters; where it gives none, the candidate gets a warning."""
    instruments = loaded.instruments
    if not instruments.options.counters:
        return Outcome()
    counted = count(
        loaded.problem,
        candidate.name,
        candidate.config,
        instruments.device_index,
        instruments.options.cache,
    )
    if isinstance(counted, str):
        candidate.warnings.append(counted)
        return Outcome()
    return counted.outcome()
