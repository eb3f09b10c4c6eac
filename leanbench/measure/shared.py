"""Attention that several GPUs share: every rank takes the same steps over its shard, rank 0 decides
how many samples are taken.

The latency is that of the slowest rank in a chain of dependent launches: no launch starts before
the previous one has ended on all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from leanbench.check.launches import launch_of
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, UserError
from leanbench.core.kernel import Kernel, TracedCall
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.measure.candidate import Candidate, sample_fields, timing_outcome
from leanbench.measure.extras import sustained_fields
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import impossible, noise, verdict
from leanbench.measure.one_gpu import OneGpu, settings_for
from leanbench.measure.protocol import FLOOR, Requests, Subject, measure_loaded
from leanbench.measure.ranks import RankLost, Ranks, is_rank_lost
from leanbench.measure.shard import Shard, alone, check_shared, load_shard
from leanbench.measure.timeline import (
    check_same_output,
    ends_us,
    median_launch,
    recorded_launches,
    timeline_of,
    traced_calls,
)
from leanbench.measure.timing import Launches, Replay, Sampler
from leanbench.measure.torch_errors import first_line, launch_error
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    from leanbench.core.timeline import Timeline
    from leanbench.gpu.processes import GpuProcess

T = TypeVar("T")

#: Name of attention over each GPU's own shard in the rounds.
SHARD = "shard"
#: Options that are measured on a single GPU only.
_ONE_GPU_OPTIONS = ("occupancy", "counters")
#: Number of samples outside the rounds.
_MEDIAN_OF = 7


def from_barrier(subject: SeveralGpus, candidate: Candidate) -> Outcome:
    """Time single launches that each follow a barrier: both together, less barriers alone."""
    group = subject.all_ranks.layout(subject.problem.gpus).group
    if group is None:
        return Outcome()
    both = [partial(_launch_after, group.barrier, launch) for launch in candidate.launches]
    replays = [subject.make_replay(chain) for chain in (both, [group.barrier])]
    both_us, barrier_us = map(median_us, replays)
    return Outcome(from_barrier_us=both_us - barrier_us)


def check_replay(subject: SeveralGpus, candidate: Candidate) -> Outcome:
    """Replay over poisoned outputs and check these again."""
    return subject.check(candidate.kernel, candidate.launches, candidate.replay.graph.replay)


def judge(subject: SeveralGpus, candidate: Candidate) -> Outcome:
    """Return the figures on rank 0, and the status unless a check has failed."""
    if subject.all_ranks.rank > 0:
        return Outcome()
    options, kv_bytes = subject.instruments.options, subject.problem.kv_bytes
    timing, floor_us = candidate.timing, subject.timings[FLOOR].median_us
    fields = timing_outcome(timing, kv_bytes, floor_us)
    fields |= Outcome(raw_samples=sample_fields(timing))
    if SHARD in subject.timings:
        shard_us = subject.timings[SHARD].median_us
        fields |= Outcome(shard_us=shard_us, exchange_us=timing.median_us - shard_us)
    missing = [name for name in _ONE_GPU_OPTIONS if getattr(options, name)]
    if missing:
        candidate.warnings.append(f"{', '.join(missing)}: not measured where GPUs share a problem")
    if candidate.is_incorrect:
        return fields
    spec, cache = subject.instruments.spec, options.cache
    alarm = impossible(timing.median_us, floor_us, kv_bytes, spec, cache)
    return fields | verdict(alarm, noise(timing, options.effort))


class SeveralGpus(Subject):
    """Problem of attention that GPUs share, on one of its ranks."""

    steps = (from_barrier, sustained_fields, check_replay, judge)

    shard: Shard

    @property
    def all_ranks(self) -> Ranks:
        assert self.ranks is not None
        return self.ranks

    def measure(self, kernels: Sequence[Kernel], requests: Requests) -> dict[str, Outcome]:
        return lead(self, measure_loaded, kernels, requests)

    def timelines(self, kernel: Kernel, request: str) -> list[Timeline] | str:
        return lead(self, record_timelines, [kernel], {kernel.name: request})

    def load(self) -> None:
        self.shard = load_shard(self.all_ranks, self.instruments, self.problem)
        self.buffers = self.shard.buffers

    def prepare(self, kernel: Kernel, request: str | KernelConfig) -> Candidate:
        def prepare() -> tuple[lookup.Choice, Launches]:
            choice = self._choose(kernel, request)
            return choice, [launch_of(kernel, own, choice.config, request) for own in self.buffers]

        try:
            choice, launches = self.all_ranks.together(prepare)
        except UserError as error:
            refused = Outcome(status="unsupported", reason=str(error))
            return Candidate(kernel=kernel, launches=(), outcome=refused)
        fields = Outcome(**lookup.row_fields(kernel, choice))
        fields |= self.check(kernel, launches, launches[0])
        return Candidate(kernel=kernel, launches=launches, config=choice.config, outcome=fields)

    def make_replay(self, launches: Launches) -> Replay:
        """Capture a chain of launches on all ranks."""
        return SharedReplay(self.all_ranks, launches, self.instruments.options.effort.sample_ms)

    def baselines(self) -> dict[str, Sampler]:
        """Capture the launches over each GPU's shard alone; on rank 0, reads of its shard too."""
        self.instruments.announce(None)
        samplers: dict[str, Sampler] = {}
        if self.problem.gpus.context > 1:
            launches = self.all_ranks.together(lambda: alone(self.shard))
            samplers[SHARD] = self.make_replay(launches)
        if self.all_ranks.rank == 0:
            read_floor, kv_bytes = self.instruments.read_floor, self.shard.problem.kv_bytes
            reads = read_floor.launches(self.buffers, kv_bytes)
            samplers[FLOOR] = Replay(reads, self.instruments.options.effort.sample_ms)
        return samplers

    def time(self, candidates: Sequence[Candidate]) -> None:
        """Time candidates and baselines. Other ranks take the samples that rank 0 names."""
        if self.all_ranks.rank == 0:
            super().time(candidates)
            self.all_ranks.broadcast(None)
            return
        samplers = {**self.baselines(), **{own.name: own.replay for own in candidates}}
        while (name := self.all_ranks.broadcast()) is not None:
            samplers[name].sample_us()

    def before_sample(self, name: str) -> None:
        super().before_sample(name)
        if name != FLOOR:
            self.all_ranks.broadcast(name)

    def processes_since(self, start_us: int) -> Sequence[GpuProcess]:
        """Return none: GPUs that share a problem are not checked for other programs."""
        return ()

    def check(self, kernel: Kernel, launches: Launches, run: Callable[[], object]) -> Outcome:
        return check_shared(self.all_ranks, self.shard, kernel, launches[0], run)

    def _choose(self, kernel: Kernel, request: str | KernelConfig) -> lookup.Choice:
        if request == "best":
            raise UserError(
                "configs 'best' times candidates on one GPU: choose default or heuristic where GPUs"
                " share a problem"
            )
        if request == "default" and kernel.tuned_as == "lean":
            # All kernels that attend with lean get the settings of its calls.
            return settings_for(self.buffers[0])
        return lookup.resolve(kernel, self.shard.problem, self.instruments.spec, request)


def attention_on(instruments: Instruments, problem: AttentionProblem) -> Subject:
    """Return the subject of a problem of attention: on one GPU, or on several that share it."""
    subject = OneGpu if problem.parallel == NONE else SeveralGpus
    return subject(instruments, problem)


class SharedReplay(Replay):
    """Replay of a chain of launches on all ranks at once. A sample is that of the slowest rank.

    Raises:
        UserError, MemoryError, GpuUnusable: See `Ranks.together`.
    """

    # Even: kernels use buffers in turn.
    _rounds = 2
    _max_launches = 1024

    def __init__(self, ranks: Ranks, launches: Launches, sample_ms: float) -> None:
        self._ranks = ranks
        super().__init__(launches, sample_ms)

    def _replay_ms(self) -> float:
        import torch
        import torch.distributed as dist

        self._ranks.barrier()
        slowest_ms = torch.tensor(super()._replay_ms(), device="cuda")
        dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
        return float(slowest_ms)

    def _together(self, work: Callable[[], T]) -> T:
        return self._ranks.together(work)


def median_us(replay: Sampler) -> float:
    """Sample outside the rounds, on all ranks."""
    return statistics.median(replay.sample_us() for _ in range(_MEDIAN_OF))


def _launch_after(barrier: Callable[[], None], launch: Callable[[], object]) -> None:
    barrier()
    launch()


@dataclass(frozen=True)
class Request:
    """Work of all ranks on a problem."""

    #: Function of a module.
    work: Callable[[SeveralGpus, Sequence[Kernel], Requests], Any]
    problem: dict[str, Any]
    requests: Requests


def lead(
    subject: SeveralGpus,
    work: Callable[[SeveralGpus, Sequence[Kernel], Requests], T],
    kernels: Sequence[Kernel],
    requests: Requests,
) -> T:
    """Load the subject and work on it, on rank 0. `follow` is the other ranks' side.

    Raises:
        UserError: This machine has too few GPUs or too little memory.
        MemoryError: A rank ran out of memory.
        GpuUnusable: A rank failed.
    """
    instruments, problem = subject.instruments, subject.problem
    with instruments.gang.at_work():
        options = instruments.options.to_dict()
        subject.ranks = ranks = instruments.gang.of(
            problem.gpus.gpus, instruments.device_index, options
        )
        ranks.broadcast(Request(work, problem.to_dict(), dict(requests)))
        try:
            with subject:
                return work(subject, kernels, requests)
        except Exception as error:
            if error is ranks.refusal:
                raise
            if is_rank_lost(error):
                raise RankLost from error
            # The other ranks do not know, and are in the middle of something.
            raise GpuUnusable(f"rank 0: {first_line(launch_error(error))}") from error


def follow(ranks: Ranks, instruments: Instruments, request: Request) -> None:
    """Do a follower's part of `lead`."""
    from leanbench.core.registry import kernel

    subject = SeveralGpus(instruments, AttentionProblem.from_dict(request.problem))
    subject.ranks = ranks
    kernels = [kernel(name) for name in request.requests]
    try:
        with subject:
            request.work(subject, kernels, request.requests)
    except (UserError, MemoryError) as error:
        # Rank 0 reports what all ranks know. Other errors end the process.
        if error is not ranks.refusal:
            raise


def record_timelines(
    subject: SeveralGpus, kernels: Sequence[Kernel], requests: Requests
) -> list[Timeline] | str:
    """Record the timelines of one launch of a chain, by rank. Return a sentence if there are none.

    Of the recorded launches, all ranks keep the one in which the slowest GPU took the median.
    """
    ranks, shard, (kernel,) = subject.all_ranks, subject.shard, kernels
    candidate = subject.prepare(kernel, requests[kernel.name])
    if candidate.outcome.status is not None:
        return candidate.outcome.reason or ""
    calls = ranks.together(lambda: traced_calls(kernel, candidate.config, shard.buffers))
    if calls is None:
        return f"{kernel.name} has no instrumented build"
    ranks.together(
        lambda: check_same_output(kernel, candidate.config, shard.buffers[0], calls[0]), waits=True
    )
    return ranks.all_gather(_own_timeline(subject, candidate, calls))


def _own_timeline(
    subject: SeveralGpus, candidate: Candidate, calls: Sequence[TracedCall]
) -> Timeline:
    """Record the timeline of this rank."""
    ranks, shard = subject.all_ranks, subject.shard
    chains = (candidate.launches, [call.launch for call in calls])
    plain_us, traced_us = (median_us(subject.make_replay(chain)) for chain in chains)
    ranks.barrier()
    recorded = ranks.together(lambda: recorded_launches(calls), waits=True)
    slowest_us = [max(ends) for ends in zip(*ranks.all_gather(ends_us(recorded)), strict=True)]
    ctas = median_launch(recorded, slowest_us)
    timeline = ranks.together(
        lambda: timeline_of(
            shard.problem,
            candidate.kernel,
            candidate.config,
            shard.buffers[0],
            subject.instruments.spec,
            ctas,
            plain_us,
            traced_us,
        )
    )
    return replace(timeline, problem=subject.problem, rank=ranks.rank)
