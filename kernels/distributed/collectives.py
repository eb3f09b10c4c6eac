"""Launches that exchange and merge the partial results of GPUs through collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from leanbench.kernels.distributed.triton import deal_heads, divide, merge_parts, weigh
from leanbench.kernels.launch import padded
from leanbench.kernels.lean import LEAN

if TYPE_CHECKING:
    from leanbench.kernels.lean.configs import LeanConfig

    from leanbench.core.inputs import AttentionInputs, Peers

#: Alignment of parts, in bytes.
_ALIGNMENT = 256
#: Enough for the work of a row of up to 256 numbers.
WARPS = 1

Launch = Callable[[], None]


@dataclass(frozen=True)
class Part:
    """Output and LSE of one shard in a single buffer: rows of the output, then their LSEs."""

    memory: torch.Tensor
    rows: int
    head_dim: int
    dtype: torch.dtype

    @property
    def lse_at(self) -> int:
        """Offset of the LSEs, in bytes."""
        return self.rows * self.head_dim * self.dtype.itemsize

    @property
    def out(self) -> torch.Tensor:
        """(rows, head_dim)."""
        return self.memory[: self.lse_at].view(self.dtype).view(self.rows, self.head_dim)

    @property
    def lse(self) -> torch.Tensor:
        """(rows,)."""
        return self.memory[self.lse_at :][: 4 * self.rows].view(torch.float32)


def part_bytes(rows: int, head_dim: int, dtype: torch.dtype) -> int:
    needed = rows * (head_dim * dtype.itemsize + 4)
    return -(-needed // _ALIGNMENT) * _ALIGNMENT


def part_of(inputs: AttentionInputs, memory: torch.Tensor | None = None) -> Part:
    """Create a part for the output of a call, in `memory` if given."""
    rows, head_dim, dtype = (
        inputs.out.numel() // inputs.value_dim,
        inputs.value_dim,
        inputs.out.dtype,
    )
    if memory is None:
        size = part_bytes(rows, head_dim, dtype)
        memory = torch.empty(size, dtype=torch.uint8, device=inputs.out.device)
    return Part(memory, rows, head_dim, dtype)


def attend_to(inputs: AttentionInputs, config: LeanConfig, part: Part) -> Launch:
    """Return a launch of attention over this GPU's shard that writes to `part`."""
    out, lse = part.out.view(inputs.out.shape), part.lse.view(inputs.lse.shape)
    return LEAN.prepare(replace(inputs, out=out, lse=lse, peers=None), config)


def addresses_of(parts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(parts, dtype=torch.int64, device=device)


def merging(part: Part, addresses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Launch:
    """Return a launch that merges parts like `part`, at `addresses`, into consecutive rows."""

    def merge() -> None:
        merge_parts[(part.rows,)](
            addresses,
            out,
            lse,
            part.lse_at,
            part.rows,
            part.rows,
            HEAD_DIM=part.head_dim,
            HEAD_DIM_PADDED=padded(part.head_dim),
            RANKS=addresses.numel(),
            num_warps=WARPS,
        )

    return merge


def peers_of(inputs: AttentionInputs) -> Peers:
    assert inputs.peers is not None
    return inputs.peers


def all_gather(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    peers, part = peers_of(inputs), part_of(inputs)
    attend = attend_to(inputs, config, part)
    size = part.memory.numel()
    gathered = part.memory.new_empty(peers.ranks * size)
    places = [gathered.data_ptr() + rank * size for rank in range(peers.ranks)]
    merge = merging(part, addresses_of(places, gathered.device), inputs.out, inputs.lse)

    def launch() -> None:
        attend()
        dist.all_gather_into_tensor(gathered, part.memory, group=peers.processes)
        merge()

    return launch


def all_to_all(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    """Return a launch in which each GPU merges its share of the query heads.

    It writes only that share of `inputs.out`.
    """
    peers, part = peers_of(inputs), part_of(inputs)
    attend = attend_to(inputs, config, part)
    ranks, heads = peers.ranks, inputs.q_heads
    share = Part(part.memory, part.rows // ranks, part.head_dim, part.dtype)
    size = part_bytes(share.rows, part.head_dim, part.dtype)
    sent, received = (part.memory.new_empty(ranks * size) for _ in range(2))
    places = [received.data_ptr() + rank * size for rank in range(ranks)]
    addresses = addresses_of(places, received.device)
    first = peers.rank * (heads // ranks)
    out, lse = inputs.out[:, :, first:], inputs.lse[:, first:]
    dims = {"HEAD_DIM": part.head_dim, "HEAD_DIM_PADDED": padded(part.head_dim)}

    def launch() -> None:
        attend()
        deal_heads[(part.rows,)](
            part.out,
            part.lse,
            sent,
            size,
            share.lse_at,
            heads,
            heads // ranks,
            **dims,
            num_warps=WARPS,
        )
        dist.all_to_all_single(received, sent, group=peers.processes)
        merge_parts[(share.rows,)](
            addresses,
            out,
            lse,
            share.lse_at,
            heads // ranks,
            heads,
            **dims,
            RANKS=ranks,
            num_warps=WARPS,
        )

    return launch


@dataclass
class SharedBuffers:
    """Two buffers visible to all GPUs, used in turn by all launches of a size.

    A GPU overwrites a buffer only after all GPUs have passed the barrier that follows its last
    read. A CUDA graph must contain an even number of launches.
    """

    memories: list[torch.Tensor]
    handles: list[Any]
    turn: int = 0

    def next_turn(self) -> int:
        self.turn = 1 - self.turn
        return self.turn


@cache
def _shared_buffers(processes: Any, size: int, device: torch.device) -> SharedBuffers:
    """Return the buffers of a size. The first call is a collective."""
    import torch.distributed._symmetric_memory as symmetric

    memories = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    return SharedBuffers(memories, [symmetric.rendezvous(own, processes) for own in memories])


def symmetric_memory(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    peers, size = peers_of(inputs), part_of(inputs).memory.numel()
    buffers = _shared_buffers(peers.processes, size, inputs.out.device)
    attends: list[Launch] = []
    merges: list[Launch] = []
    for memory, handle in zip(buffers.memories, buffers.handles, strict=True):
        part = part_of(inputs, memory)
        addresses = addresses_of([int(at) for at in handle.buffer_ptrs], memory.device)
        attends.append(attend_to(inputs, config, part))
        merges.append(merging(part, addresses, inputs.out, inputs.lse))

    def launch() -> None:
        turn = buffers.next_turn()
        attends[turn]()
        buffers.handles[turn].barrier(channel=0)
        merges[turn]()

    return launch


def tree_attention(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    """Return a launch of Tree Attention's algorithm 2.

    It reduces the maximum of all LSEs, then the numerators and denominators relative to it.
    """
    peers, part = peers_of(inputs), part_of(inputs)
    attend = attend_to(inputs, config, part)
    most = torch.empty_like(part.lse)
    sums = torch.empty(part.rows * (part.head_dim + 1), dtype=torch.float32, device=most.device)
    numerator, denominator = sums.split([part.rows * part.head_dim, part.rows])
    dims = {"HEAD_DIM": part.head_dim, "HEAD_DIM_PADDED": padded(part.head_dim)}

    def launch() -> None:
        attend()
        most.copy_(part.lse)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=peers.processes)
        weigh[(part.rows,)](
            part.out, part.lse, most, numerator, denominator, **dims, num_warps=WARPS
        )
        dist.all_reduce(sums, group=peers.processes)
        divide[(part.rows,)](
            numerator, denominator, most, inputs.out, inputs.lse, **dims, num_warps=WARPS
        )

    return launch
