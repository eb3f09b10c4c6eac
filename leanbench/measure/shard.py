"""Shard of a problem on one of the GPUs that share it, and the check across all ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.check.reference import CELL_PAIRS, CHECK_ELEMENTS, Reference
from leanbench.core.inputs import AttentionInputs
from leanbench.core.kernel import Kernel, written_by
from leanbench.core.problem import AttentionProblem
from leanbench.measure.buffers import free_memory, refuse_shortage, rotating_inputs
from leanbench.measure.candidate import check_outcome
from leanbench.measure.instruments import Instruments
from leanbench.measure.one_gpu import settings_for
from leanbench.measure.ranks import Ranks
from leanbench.measure.timing import Launches
from leanbench.records.outcome import Outcome

if TYPE_CHECKING:
    import torch

#: Random tensors that all ranks of a group copy from their first rank.
_SAME = ("q", "sinks")


@dataclass
class Shard:
    """Tensors of a rank, and the reference of the whole problem."""

    problem: AttentionProblem
    buffers: list[AttentionInputs]
    reference: Reference


def load_shard(ranks: Ranks, instruments: Instruments, problem: AttentionProblem) -> Shard:
    """Allocate the shard of this rank, with the number of buffers that fits on every rank.

    Raises:
        UserError: These GPUs cannot share a problem, or the shard does not fit on one of them.
    """
    import torch.distributed as dist

    own, spec, device = problem.shard(ranks.rank), instruments.spec, instruments.device

    def buffers() -> list[AttentionInputs]:
        free_memory(spec)
        refuse_shortage(own, device)
        return rotating_inputs(own, device, spec, instruments.options.cache)

    inputs = ranks.together(buffers)
    inputs = inputs[: min(ranks.all_gather(len(inputs)))]
    group = ranks.together(lambda: ranks.layout(problem.gpus), waits=True).group
    if group is not None:
        first = ranks.rank // problem.gpus.context * problem.gpus.context
        for buffer in inputs:
            for name in _SAME:
                if (tensor := getattr(buffer, name)) is not None:
                    dist.broadcast(tensor, src=first, group=group.peers.processes)
        inputs = [replace(buffer, peers=group.peers) for buffer in inputs]
    seed = ranks.all_gather(random.SystemRandom().random())[0]
    reference = ranks.together(lambda: _reference(problem, inputs[0], seed), waits=True)
    return Shard(own, inputs, reference)


def _reference(problem: AttentionProblem, inputs: AttentionInputs, seed: float) -> Reference:
    """Merge the fp64 references of the shards. All ranks take the heads of the same seed."""
    longest = problem.shard(0)
    elements = longest.max_context * max(inputs.head_dim, inputs.group_size * inputs.q_len)
    # A sink is a single logit: it belongs to the first shard.
    if inputs.peers is not None and inputs.peers.rank > 0:
        inputs = replace(inputs, sinks=None)
    pairs = min(CELL_PAIRS, max(2, CHECK_ELEMENTS // elements))
    reference = Reference(inputs, max_pairs=pairs, draw=random.Random(seed))
    if inputs.peers is not None:
        reference.merge(lambda tensor: _gathered(inputs, tensor))
    return reference


def _gathered(inputs: AttentionInputs, tensor: torch.Tensor) -> torch.Tensor:
    """Gather the tensor of every rank of the group, (ranks, *)."""
    import torch
    import torch.distributed as dist

    peers = inputs.peers
    assert peers is not None
    parts = [torch.empty_like(tensor) for _ in range(peers.ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=peers.processes)
    return torch.stack(parts)


def alone(shard: Shard) -> Launches:
    """Return launches of `lean` over the GPU's own shard alone."""
    from leanbench.kernels.lean import LEAN_CUDA

    inputs = [replace(buffer, peers=None) for buffer in shard.buffers]
    config = settings_for(shard.buffers[0]).config
    return [LEAN_CUDA.prepare(own, config) for own in inputs]  # pyright: ignore


def check_shared(
    ranks: Ranks,
    shard: Shard,
    kernel: Kernel,
    launch: Callable[[], object],
    run: Callable[[], object],
) -> Outcome:
    """Run over poisoned outputs. Return the worst errors of all ranks.

    The status is `incorrect` if they exceed a limit, or if ranks that share sequences have
    different bits.
    """
    import torch

    inputs = written_by(launch, shard.buffers[0])
    inputs.poison()
    ranks.barrier()
    run()
    torch.cuda.synchronize()
    inputs = written_by(launch, shard.buffers[0])
    if kernel.shares_heads:
        inputs = _with_all_heads(inputs)
    check = shard.reference.check(inputs, kernel.lse_base)
    failures = [
        f"rank {rank}: {failure}"
        for rank, failure in enumerate(ranks.all_gather(check.failure(shard.problem.dtype)))
        if failure is not None
    ]
    together = 1 if inputs.peers is None else inputs.peers.ranks
    failures += differing(ranks.all_gather(_digest(inputs)), together)
    worst = max(own.relative_error for own in ranks.all_gather(check))
    return check_outcome(replace(check, relative_error=worst), failures[0] if failures else None)


def differing(digests: list[str], together: int) -> list[str]:
    """Return a sentence for each group of `together` ranks whose outputs have different bits."""
    groups = [digests[first : first + together] for first in range(0, len(digests), together)]
    return [
        f"ranks {place * together} to {(place + 1) * together - 1} have different bits"
        for place, group in enumerate(groups)
        if len(set(group)) > 1
    ]


def _with_all_heads(inputs: AttentionInputs) -> AttentionInputs:
    """Gather the outputs of a kernel that leaves each rank a share of the heads."""
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
