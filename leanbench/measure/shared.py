"""How a problem that GPUs share is measured: every rank takes the same steps over its shard, rank 0
decides how many samples are taken.

The latency is that of the slowest rank, of a chain of dependent launches: nobody's next launch ends
before all have come to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from leanbench.check.launches import launch_of
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, UserError
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.measure.fields import sample_fields, timing_outcome
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import impossible, noise
from leanbench.measure.options import MeasureOptions
from leanbench.measure.prepare import settings_for
from leanbench.measure.ranks import RankLost, Ranks, is_rank_lost
from leanbench.measure.shard import Shard, alone, check_shared, load_shard
from leanbench.measure.shared_sustained import sustained_of_all
from leanbench.measure.timing import (
    TRIAL_REPLAYS,
    Launches,
    Replay,
    Timing,
    capture,
    run_rounds,
)
from leanbench.measure.torch_errors import first_line, what_broke
from leanbench.records.outcome import Outcome

T = TypeVar("T")
#: By kernel: what its settings come from, or the settings.
Requests = Mapping[str, str | KernelConfig]
#: What every rank does with its part of a problem, a function of a module.
Work = Callable[[Ranks, Instruments, AttentionProblem, Sequence[Kernel], Requests], T]

#: Names of what is timed besides the kernels.
FLOOR, SHARD = "read floor", "shard"
#: Options of what is measured on one GPU alone.
_OF_ONE_GPU = ("occupancy", "counters")
#: Samples of what is timed apart from the rounds.
_MEDIAN_OF = 7


@dataclass(frozen=True)
class Request:
    """One problem for all ranks, and what they do with it."""

    work: Work[Any]
    problem: dict[str, Any]
    requests: Requests


def measure_shared(
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Requests,
) -> dict[str, Outcome]:
    """The figures of each kernel, by name.

    Raises:
        UserError, GpuUnusable: as `lead`.
    """
    return lead(_measure, instruments, problem, kernels, requests)


def lead(
    work: Work[T],
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Requests,
) -> T:
    """What `work` returns on rank 0; `follow` is the other ranks' side.

    Raises:
        UserError: this machine has too few GPUs, or no room.
        MemoryError: a rank had no memory left.
        GpuUnusable: a rank failed.
    """
    options = instruments.options.to_dict()
    with instruments.gang.at_work():
        ranks = instruments.gang.of(problem.gpus.gpus, instruments.device_index, options)
        ranks.from_first(Request(work, problem.to_dict(), dict(requests)))
        try:
            return work(ranks, instruments, problem, kernels, requests)
        except Exception as error:
            if error is ranks.refusal:
                raise
            if is_rank_lost(error):
                raise RankLost from error
            # The others do not know, and are in the middle of something.
            raise GpuUnusable(f"rank 0: {first_line(what_broke(error))}") from error


def follow(ranks: Ranks, instruments: Instruments, request: Request) -> None:
    """A follower's part of `lead`."""
    from leanbench.core.registry import kernel

    problem = AttentionProblem.from_dict(request.problem)
    kernels = [kernel(name) for name in request.requests]
    try:
        request.work(ranks, instruments, problem, kernels, request.requests)
    except (UserError, MemoryError) as error:
        # Rank 0 reports what all know; what breaks a process ends it.
        if error is not ranks.refusal:
            raise


@dataclass
class Shared:
    """A kernel on its way through the measurement, on one rank."""

    kernel: Kernel
    outcome: Outcome
    launches: Launches
    config: KernelConfig | None = None

    def check(self, ranks: Ranks, shard: Shard, run: Callable[[], object]) -> Outcome:
        return check_shared(ranks, shard, self.kernel, self.launches[0], run)


class SharedReplay:
    """Replays of one chain of launches on all ranks at once. Only rank 0's `sample_us` is called,
    the others take their samples as it does.

    Raises:
        UserError, MemoryError, GpuUnusable: as `Ranks.together`.
    """

    def __init__(self, name: str, ranks: Ranks, launches: Launches, sample_ms: float) -> None:
        import torch

        self.name, self._ranks = name, ranks
        ranks.together(lambda: [launch() for launch in launches])
        ranks.barrier()
        # An even number: kernels use buffers in turn.
        self.launches = 2 * len(launches)
        self.graph = ranks.together(partial(capture, launches, self.launches))
        self.take_us()
        once_us = min(self.take_us() for _ in range(TRIAL_REPLAYS))
        once_ms = once_us * self.launches / 1e3
        rotations = max(1, math.ceil(sample_ms / max(once_ms, 1e-3)))
        rotations = min(rotations, max(1, 1024 // self.launches))
        if rotations > 1:
            self.launches *= rotations
            self.graph = ranks.together(partial(capture, launches, self.launches))
            torch.cuda.synchronize()

    def sample_us(self) -> float:
        self._ranks.from_first(self.name)
        return self.take_us()

    def take_us(self) -> float:
        """Microseconds of one launch in one replay, of the slowest rank."""
        import torch
        import torch.distributed as dist

        self._ranks.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        slowest = torch.tensor(start.elapsed_time(end) * 1e3 / self.launches, device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def median_us(self) -> float:
        """Of several replays, called by all ranks."""
        return statistics.median(self.take_us() for _ in range(_MEDIAN_OF))


def _measure(
    ranks: Ranks,
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Requests,
) -> dict[str, Outcome]:
    announce, effort = instruments.announce, instruments.options.effort
    shard = load_shard(ranks, instruments, problem)
    shared = []
    for kernel in kernels:
        announce(kernel.name)
        shared.append(prepare_shared(ranks, instruments, shard, kernel, requests[kernel.name]))
    outcomes = {own.kernel.name: own.outcome for own in shared}
    correct = [own for own in shared if own.outcome.status is None]
    if not correct:
        return outcomes
    chains = {own.kernel.name: own.launches for own in correct}
    if problem.gpus.context > 1:
        chains[SHARD] = ranks.together(lambda: alone(shard))
    replays: dict[str, SharedReplay] = {}
    for name, launches in chains.items():
        announce(None if name == SHARD else name)
        replays[name] = SharedReplay(name, ranks, launches, effort.sample_ms)
    if ranks.rank > 0:
        _take_samples(ranks, replays)
        timings: dict[str, Timing] = {}
    else:
        timings = _rounds(instruments, shard, replays)
        ranks.from_first(None)
    for own in correct:
        announce(own.kernel.name)
        own.outcome |= _from_barrier(ranks, problem, own, effort.sample_ms)
        replay = replays[own.kernel.name]
        own.outcome |= sustained_of_all(ranks, instruments, replay.graph.replay, replay.launches)
        own.outcome |= own.check(ranks, shard, replay.graph.replay)
        if ranks.rank == 0:
            fields = _fields(instruments, problem, own, timings)
            own.outcome = fields | own.outcome | _warnings(own.outcome, instruments.options)
            outcomes[own.kernel.name] = own.outcome
    announce(None)
    return outcomes


def _take_samples(ranks: Ranks, replays: Mapping[str, SharedReplay]) -> None:
    """A follower's side of the rounds: the sample that rank 0 names, until it names none."""
    while (name := ranks.from_first()) is not None:
        replays[name].take_us()


def _rounds(
    instruments: Instruments, shard: Shard, replays: Mapping[str, SharedReplay]
) -> dict[str, Timing]:
    """Timings of the kernels, of each GPU's shard without an exchange, and of this GPU's read floor
    while the others are idle.
    """
    effort, announce = instruments.options.effort, instruments.announce
    announce(None)
    reads = instruments.read_floor.launches(shard.buffers, shard.problem.kv_bytes)
    floor = Replay(reads, effort.sample_ms)
    return run_rounds(
        {FLOOR: floor, **replays},
        effort,
        instruments.gpu_state,
        lambda name: announce(None if name in (FLOOR, SHARD) else name),
    )


def _fields(
    instruments: Instruments,
    problem: AttentionProblem,
    own: Shared,
    timings: Mapping[str, Timing],
) -> Outcome:
    """The figures of a kernel, and its status."""
    timing, floor_us = timings[own.kernel.name], timings[FLOOR].median_us
    kv_bytes, options = problem.kv_bytes, instruments.options
    alarm = impossible(timing.median_us, floor_us, kv_bytes, instruments.spec, options.cache)
    noisy = noise(timing, options.effort)
    fields = timing_outcome(timing, kv_bytes, floor_us) | Outcome(
        status="suspect" if alarm else "noisy" if noisy else "ok",
        reason=alarm or noisy,
        raw_samples=sample_fields(timing, ()),
    )
    if SHARD not in timings:
        return fields
    shard_us = timings[SHARD].median_us
    return fields | Outcome(shard_us=shard_us, exchange_us=timing.median_us - shard_us)


def _warnings(outcome: Outcome, options: MeasureOptions) -> Outcome:
    """The warnings of an outcome, and one of options that are for one GPU."""
    missing = [name for name in _OF_ONE_GPU if getattr(options, name)]
    warnings = list(outcome.warnings or ())
    if missing:
        warnings.append(f"{', '.join(missing)}: not measured where GPUs share a problem")
    return Outcome(warnings=warnings) if warnings else Outcome()


def _from_barrier(
    ranks: Ranks, problem: AttentionProblem, own: Shared, sample_ms: float
) -> Outcome:
    """The latency of single launches, each after a barrier: that of both less that of barriers
    alone.
    """
    group = ranks.layout(problem.gpus).group
    if group is None:
        return Outcome()
    chains = {
        "both": [partial(_after, group.barrier, launch) for launch in own.launches],
        "barrier": [group.barrier],
    }
    replays = {
        name: SharedReplay(name, ranks, launches, sample_ms) for name, launches in chains.items()
    }
    medians_us = {name: replay.median_us() for name, replay in replays.items()}
    return Outcome(from_barrier_us=medians_us["both"] - medians_us["barrier"])


def _after(barrier: Callable[[], None], launch: Callable[[], object]) -> None:
    barrier()
    launch()


def prepare_shared(
    ranks: Ranks,
    instruments: Instruments,
    shard: Shard,
    kernel: Kernel,
    request: str | KernelConfig,
) -> Shared:
    """The kernel with its settings, launched once over poisoned outputs and checked."""

    def launches() -> tuple[lookup.Choice, Launches]:
        if request == "best":
            raise UserError(
                "configs 'best' times candidates on one GPU: choose default or heuristic where GPUs"
                " share a problem"
            )
        inputs = shard.buffers[0]
        if request == "default" and kernel.tuned_as == "lean":
            # As a call finds them, for all that attend with lean.
            choice = settings_for(inputs)
        else:
            choice = lookup.resolve(kernel, shard.problem, instruments.spec, request)
        return choice, [launch_of(kernel, own, choice.config, request) for own in shard.buffers]

    try:
        choice, made = ranks.together(launches)
    except UserError as error:
        return Shared(kernel, Outcome(status="unsupported", reason=str(error)), ())
    own = Shared(kernel, Outcome(**lookup.row_fields(kernel, choice)), made, choice.config)
    own.outcome |= own.check(ranks, shard, made[0])
    return own
