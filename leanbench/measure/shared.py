"""How a problem that GPUs share is measured: every rank takes the same steps over its shard, rank 0
decides how many samples are taken.

The latency is that of the slowest rank, of a chain of dependent launches: nobody's next launch ends
before all have come to it.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from leanbench.check.launches import launch_of
from leanbench.check.reference import CELL_PAIRS, CHECK_ELEMENTS, Reference
from leanbench.configs import lookup
from leanbench.core.config import KernelConfig
from leanbench.core.errors import GpuUnusable, UserError
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.core.problem import AttentionProblem
from leanbench.measure.buffers import free_memory, refuse_shortage, rotating_inputs
from leanbench.measure.fields import sample_fields, timing_outcome
from leanbench.measure.instruments import Instruments
from leanbench.measure.judge import impossible, noise
from leanbench.measure.prepare import settings_for
from leanbench.measure.ranks import Ranks
from leanbench.measure.timing import Launches, Replay, Timing, capture, run_rounds
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

#: Names of what is timed besides the kernels.
FLOOR, SHARD = "read floor", "shard"
#: Of the tensors that are drawn: all ranks of a group have the first one's.
_SAME = ("q", "sinks")
#: Options of what is measured on one GPU alone.
_OF_ONE_GPU = ("sustained", "energy", "occupancy", "counters")
#: Samples of launches after barriers.
_BARRIER_SAMPLES = 7


@dataclass(frozen=True)
class Request:
    """One problem for all ranks, as plain data."""

    problem: dict[str, Any]
    #: By kernel: what its settings come from, or the settings.
    requests: Mapping[str, Any]


def measure_shared(
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Mapping[str, str | KernelConfig],
) -> dict[str, Outcome]:
    """What rank 0 reports; `follow` is the other ranks' side.

    Raises:
        UserError: this machine has too few GPUs, or no room.
        GpuUnusable: a rank failed.
    """
    options = instruments.options.to_dict()
    ranks = instruments.gang.of(problem.gpus.gpus, instruments.device_index, options)
    ranks.from_first(Request(problem.to_dict(), dict(requests)))
    try:
        return _measure(ranks, instruments, problem, kernels, requests)
    except Exception as error:
        if error is ranks.refusal:
            raise
        # The others do not know, and are in the middle of something.
        raise GpuUnusable(f"rank 0: {type(error).__name__}: {error}") from error


def follow(ranks: Ranks, instruments: Instruments, request: Request) -> None:
    """A follower's part of `measure_shared`."""
    from leanbench.core.registry import kernel

    problem = AttentionProblem.from_dict(request.problem)
    kernels = [kernel(name) for name in request.requests]
    try:
        _measure(ranks, instruments, problem, kernels, request.requests)
    except UserError:
        # Rank 0 reports it; what breaks a process ends it.
        return


@dataclass
class Shard:
    """A rank's tensors of a problem, and what the outputs of all ranks together must be."""

    problem: AttentionProblem
    buffers: list[AttentionInputs]
    reference: Reference


@dataclass
class Shared:
    """A kernel on its way through the measurement, on one rank."""

    kernel: Kernel
    outcome: Outcome
    launches: Launches
    config: KernelConfig | None = None


class SharedReplay:
    """Replays of one chain of launches on all ranks at once. Only rank 0's `sample_us` is called,
    the others take their samples as it does.
    """

    def __init__(self, name: str, ranks: Ranks, launches: Launches, sample_ms: float) -> None:
        import torch

        self.name, self._ranks = name, ranks
        for launch in launches:
            launch()
        ranks.barrier()
        # An even number: kernels use buffers in turn.
        self.launches = 2 * len(launches)
        self.graph = capture(launches, self.launches)
        self.take_us()
        once_ms = self.take_us() * self.launches / 1e3
        rotations = max(1, math.ceil(sample_ms / max(once_ms, 1e-3)))
        rotations = min(rotations, max(1, 1024 // self.launches))
        if rotations > 1:
            self.launches *= rotations
            self.graph = capture(launches, self.launches)
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


def _measure(
    ranks: Ranks,
    instruments: Instruments,
    problem: AttentionProblem,
    kernels: Sequence[Kernel],
    requests: Mapping[str, str | KernelConfig],
) -> dict[str, Outcome]:
    announce, effort = instruments.announce, instruments.options.effort
    shard = _load(ranks, instruments, problem)
    shared = []
    for kernel in kernels:
        announce(kernel.name)
        shared.append(_prepare(ranks, instruments, shard, kernel, requests[kernel.name]))
    outcomes = {own.kernel.name: own.outcome for own in shared}
    correct = [own for own in shared if own.outcome.status is None]
    if not correct:
        return outcomes
    chains = {own.kernel.name: own.launches for own in correct}
    if problem.gpus.context > 1:
        chains[SHARD] = _alone(shard)
    replays: dict[str, SharedReplay] = {}
    for name, launches in chains.items():
        announce(None if name == SHARD else name)
        replays[name] = ranks.together(
            partial(SharedReplay, name, ranks, launches, effort.sample_ms)
        )
    if ranks.rank > 0:
        _take_samples(ranks, replays)
        timings: dict[str, Timing] = {}
    else:
        timings = _rounds(instruments, shard, replays)
        ranks.from_first(None)
    for own in correct:
        announce(own.kernel.name)
        own.outcome |= _from_barrier(ranks, problem, own, effort.sample_ms)
        own.outcome |= _check(ranks, shard, own, replays[own.kernel.name].graph.replay)
        if ranks.rank == 0:
            own.outcome = _fields(instruments, problem, own, timings) | own.outcome
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
    asked = [name for name in _OF_ONE_GPU if getattr(options, name)]
    if asked:
        own.outcome |= Outcome(
            warnings=[f"{', '.join(asked)}: not measured where GPUs share a problem"]
        )
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
        name: ranks.together(partial(SharedReplay, name, ranks, launches, sample_ms))
        for name, launches in chains.items()
    }
    medians_us = {
        name: statistics.median(replay.take_us() for _ in range(_BARRIER_SAMPLES))
        for name, replay in replays.items()
    }
    return Outcome(from_barrier_us=medians_us["both"] - medians_us["barrier"])


def _after(barrier: Callable[[], None], launch: Callable[[], object]) -> None:
    barrier()
    launch()


def _load(ranks: Ranks, instruments: Instruments, problem: AttentionProblem) -> Shard:
    """The rank's shard, in as many buffers as all ranks have room for."""
    import torch.distributed as dist

    own, spec, device = problem.shard(ranks.rank), instruments.spec, instruments.device

    def buffers() -> list[AttentionInputs]:
        free_memory(spec)
        refuse_shortage(own, device)
        return rotating_inputs(own, device, spec, instruments.options.cache)

    inputs = ranks.together(buffers)
    inputs = inputs[: min(ranks.of_all(len(inputs)))]
    group = ranks.layout(problem.gpus).group
    if group is not None:
        first = ranks.rank // problem.gpus.context * problem.gpus.context
        for buffer in inputs:
            for name in _SAME:
                if (tensor := getattr(buffer, name)) is not None:
                    dist.broadcast(tensor, src=first, group=group.peers.processes)
        inputs = [replace(buffer, peers=group.peers) for buffer in inputs]
    return Shard(own, inputs, ranks.together(lambda: _reference(problem, inputs[0])))


def _reference(problem: AttentionProblem, inputs: AttentionInputs) -> Reference:
    """The fp64 reference of the whole, from those of the shards; all ranks take the same heads."""
    longest = problem.shard(0)
    elements = longest.max_context * max(inputs.head_dim, inputs.group_size * inputs.q_len)
    # A sink is one logit of the whole: the first shard's.
    if inputs.peers is not None and inputs.peers.rank > 0:
        inputs = replace(inputs, sinks=None)
    state = random.getstate()
    random.seed(problem.label)
    reference = Reference(inputs, max_pairs=min(CELL_PAIRS, max(2, CHECK_ELEMENTS // elements)))
    random.setstate(state)
    if inputs.peers is not None:
        reference.merge(lambda tensor: _gathered(inputs, tensor))
    return reference


def _gathered(inputs: AttentionInputs, tensor: torch.Tensor) -> torch.Tensor:
    """(ranks, *): the tensor of every rank of the group."""
    import torch
    import torch.distributed as dist

    peers = inputs.peers
    assert peers is not None
    parts = [torch.empty_like(tensor) for _ in range(peers.ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=peers.processes)
    return torch.stack(parts)


def _alone(shard: Shard) -> Launches:
    """Attention over each GPU's own shard, and nothing else, as `lean` does it."""
    from leanbench.kernels.lean import LEAN_CUDA

    inputs = [replace(buffer, peers=None) for buffer in shard.buffers]
    config = settings_for(shard.buffers[0]).config
    return [LEAN_CUDA.prepare(own, config) for own in inputs]  # pyright: ignore


def _prepare(
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
    own.outcome |= _check(ranks, shard, own, made[0])
    return own


def _check(ranks: Ranks, shard: Shard, own: Shared, run: Callable[[], object]) -> Outcome:
    """Errors of what `run` writes into poisoned outputs, the worst of all ranks; `incorrect` where
    they are above the limits, or bits of ranks that share sequences differ.
    """
    import torch

    inputs = written_by(own.launches[0], shard.buffers[0])
    inputs.poison()
    ranks.barrier()
    run()
    torch.cuda.synchronize()
    inputs = written_by(own.launches[0], shard.buffers[0])
    if getattr(own.kernel, "shares_heads", False):
        inputs = _with_all_heads(inputs)
    check = shard.reference.check(inputs, own.kernel.lse_base)
    failures = ranks.of_all(check.failure(shard.problem.dtype))
    worst = max(check.relative_error for check in ranks.of_all(check))
    digests = ranks.of_all(_digest(inputs))
    places = len(digests) if inputs.peers is None else inputs.peers.ranks
    outcome = Outcome(
        relative_error=worst,
        lse_error=check.lse_error,
        checked_heads=check.checked_heads,
        total_heads=check.total_heads,
    )
    for rank, failure in enumerate(failures):
        if failure is not None:
            return outcome | Outcome(status="incorrect", reason=f"rank {rank}: {failure}")
    if inputs.peers is not None:
        for first in range(0, len(digests), places):
            if len(set(digests[first : first + places])) > 1:
                reason = f"ranks {first} to {first + places - 1} have different bits"
                return outcome | Outcome(status="incorrect", reason=reason)
    return outcome


def _with_all_heads(inputs: AttentionInputs) -> AttentionInputs:
    """The outputs of a kernel that leaves each rank its share of the heads, from all ranks."""
    peers = inputs.peers
    assert peers is not None
    share = inputs.q_heads // peers.ranks
    outs, lses = _gathered(inputs, inputs.out), _gathered(inputs, inputs.lse)
    out, lse = inputs.out.clone(), inputs.lse.clone()
    for rank in range(peers.ranks):
        own = slice(rank * share, (rank + 1) * share)
        out[:, :, own], lse[:, own] = outs[rank][:, :, own], lses[rank][:, own]
    return replace(inputs, out=out, lse=lse)


def _digest(inputs: AttentionInputs) -> str:
    import torch

    numbers = inputs.out.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()
