"""Ring Attention's decode: each GPU attends to one shard while it receives the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from leanbench.kernels.distributed.collectives import (
    Launch,
    addresses_of,
    attend_to,
    merging,
    part_of,
)

if TYPE_CHECKING:
    from leanbench.kernels.lean.configs import LeanConfig

    from leanbench.core.inputs import AttentionInputs


def ring_attention(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    """Return a launch that passes shards around the ring through two buffers.

    Parts are merged in the order of ranks, so all ranks compute the same bits.
    """
    peers = inputs.peers
    assert peers is not None
    ranks, rank, processes = peers.ranks, peers.rank, peers.processes
    own = (inputs.k_cache, inputs.v_cache)
    buffers = [tuple(_like(cache) for cache in own) for _ in range(2)]
    #: K and V of each step: this rank's shard, then the buffers in turn.
    shards = [own, *(buffers[step % 2] for step in range(ranks - 1))]
    parts = {(rank - step) % ranks: part_of(inputs) for step in range(ranks)}
    attends = [
        attend_to(replace(inputs, k_cache=k, v_cache=v), config, parts[(rank - step) % ranks])
        for step, (k, v) in enumerate(shards)
    ]
    places = [parts[source].memory.data_ptr() for source in range(ranks)]
    merge = merging(parts[0], addresses_of(places, inputs.out.device), inputs.out, inputs.lse)
    following = dist.get_global_rank(processes, (rank + 1) % ranks)
    previous = dist.get_global_rank(processes, (rank - 1) % ranks)

    def launch() -> None:
        for step, attend in enumerate(attends):
            transfers = []
            if step + 1 < ranks:
                sends = [
                    dist.P2POp(dist.isend, _in_order(cache), following, processes)
                    for cache in shards[step]
                ]
                receives = [
                    dist.P2POp(dist.irecv, _in_order(cache), previous, processes)
                    for cache in shards[step + 1]
                ]
                transfers = dist.batch_isend_irecv([*sends, *receives])
            attend()
            for transfer in transfers:
                transfer.wait()
        merge()

    return launch


def _in_order(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of the cache with dimensions in memory order."""
    return cache if cache.is_contiguous() else cache.transpose(1, 2)


def _like(cache: torch.Tensor) -> torch.Tensor:
    """Allocate a cache of the same shape and memory order, without gaps."""
    return torch.empty_like(cache, memory_format=torch.preserve_format)
