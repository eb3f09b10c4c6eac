"""Steps of leanbench.measure.protocol that follow the latency: plan and host time, and by the
options sustained latency, energy, occupancy, SM busy share and hardware counters.

A step that an option disables returns an empty outcome.
"""

from __future__ import annotations

import statistics
import time

from leanbench.core.kernel import caller
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.measure.candidate import Candidate
from leanbench.measure.counters import count
from leanbench.measure.energy import measure_window, sustained_outcome
from leanbench.measure.energy_meter import SustainedReading
from leanbench.measure.judge import SLOWDOWNS
from leanbench.measure.protocol import Step, Subject
from leanbench.measure.timeline import record_timeline
from leanbench.measure.timing import Replay
from leanbench.records.outcome import Outcome

#: Timed plans, and plans before them.
_PLANS, _FIRST_PLANS = 20, 3
#: Timed calls: the number that the GPU runs in this time, within limits, in chunks that leave room
#: in the launch queue. And calls before them.
_HOST_DEVICE_US, _LEAST_CALLS, _MOST_CALLS = 15_000.0, 9, 200
_CHUNK, _FIRST_CALLS = 20, 3


def plan_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Time what must run once for the lengths of a step, until the GPU is done."""
    import torch

    plan = candidate.kernel.planner(subject.buffers[0], candidate.config)
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


def host_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Time eager calls on the host, over the buffers in turn, without waiting for the GPU."""
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


def sustained_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Measure the latency over seconds of launches, and with the energy option their energy."""
    instruments = subject.instruments
    energy = instruments.options.energy
    if not (instruments.options.sustained or energy):
        return Outcome()
    readings = read_window(subject, candidate.replay)
    for rank, reading in enumerate(readings):
        prefix = f"rank {rank}: " if len(readings) > 1 else ""
        slowdowns = sorted(SLOWDOWNS.intersection(reading.throttle_reasons or ()))
        if slowdowns:
            names = ", ".join(slowdowns)
            candidate.warnings.append(
                f"{prefix}clocks were lowered in the sustained window ({names})"
            )
        candidate.warnings += [prefix + warning for warning in reading.warnings]
    if energy and instruments.nvml is None:
        candidate.warnings.append(
            "NVML cannot be used here, so there is no energy: run `leanbench doctor`"
        )
    floor = subject.floor_reading() if energy and instruments.nvml is not None else None
    if floor is not None:
        candidate.warnings += [f"read floor: {warning}" for warning in floor.warnings]
    # Of GPUs that share a problem, the first one's.
    raw = {**(candidate.outcome.raw_samples or {}), "window": readings[0].states}
    return sustained_outcome(readings, floor) | Outcome(raw_samples=raw)


def read_window(subject: Subject, replay: Replay) -> list[SustainedReading]:
    """Replay for the sustained window. Return a reading per GPU."""
    instruments, ranks = subject.instruments, subject.ranks

    def measure() -> SustainedReading:
        return measure_window(
            replay.graph.replay,
            replay.launches,
            instruments.nvml if instruments.options.energy else None,
            instruments.calibration,
            instruments.options.window_s,
            ranks=ranks,
        )

    return [measure()] if ranks is None else ranks.all_gather(ranks.together(measure, waits=True))


def resource_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Return the theoretical warp occupancy and the resources that limit it, if known."""
    instruments = subject.instruments
    if not instruments.options.occupancy:
        return Outcome()
    resources = candidate.kernel.resources(subject.buffers[0], candidate.config)
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


def busy_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Measure the SM busy share and the cost of the instrumented build, if the kernel has one."""
    instruments = subject.instruments
    if not instruments.options.occupancy:
        return Outcome()
    latency_us = candidate.timing.median_us
    timeline = record_timeline(
        subject.problem,
        candidate.kernel,
        candidate.config,
        subject.buffers,
        instruments.spec,
        latency_us,
    )
    if timeline is None:
        return Outcome()
    traced_us = timeline.traced_latency_us
    cost = None if traced_us is None else traced_us / latency_us
    return Outcome(sm_busy_share=timeline.sm_busy_share, instrumentation_cost=cost)


def counter_fields(subject: Subject, candidate: Candidate) -> Outcome:
    """Count with Nsight Compute. Failure is a warning."""
    instruments = subject.instruments
    if not instruments.options.counters:
        return Outcome()
    counted = count(
        subject.problem,
        candidate.name,
        candidate.config,
        instruments.device_index,
        instruments.options.cache,
    )
    if isinstance(counted, str):
        candidate.warnings.append(counted)
        return Outcome()
    return counted.outcome()


EXTRAS: tuple[Step, ...] = (
    plan_fields,
    host_fields,
    sustained_fields,
    resource_fields,
    busy_fields,
    counter_fields,
)
