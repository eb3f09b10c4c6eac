"""FlashInfer's all-to-all for decode context parallelism, with its pre- and post-processing.

The workspace maps the memory of all ranks into one address range. On x86-64 hosts FlashInfer 0.6.13
allocates it as ordinary memory that processes of one host share through file descriptors. Neither
multicast nor a multi-host memory fabric is used.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from leanbench.kernels.distributed.collectives import WARPS, Launch, attend_to, part_of, peers_of
from leanbench.kernels.distributed.triton import deal_entries, merge_entries
from leanbench.kernels.launch import padded

from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.kernels.lean.configs import LeanConfig

    from leanbench.core.inputs import AttentionInputs


def all_to_all(inputs: AttentionInputs, config: LeanConfig) -> Launch:
    """Return a launch in which each GPU merges its share of the query heads.

    It writes only that share of `inputs.out`.
    """
    from flashinfer.comm import decode_cp_a2a_alltoall

    peers, part = peers_of(inputs), part_of(inputs)
    attend = attend_to(inputs, config, part)
    ranks, rank, heads = peers.ranks, peers.rank, inputs.q_heads
    workspace = _workspace(peers.processes, inputs.out.device)
    entries = part.rows // ranks
    numbers = part.out.new_empty(entries, ranks, part.head_dim)
    # FlashInfer exchanges at least a pair per entry.
    stats = part.lse.new_zeros(entries, ranks, 2)
    first = rank * (heads // ranks)
    out, lse = inputs.out[:, :, first:], inputs.lse[:, first:]
    options = {
        "HEAD_DIM": part.head_dim,
        "HEAD_DIM_PADDED": padded(part.head_dim),
        "RANKS": ranks,
        "num_warps": WARPS,
    }

    def launch() -> None:
        attend()
        deal_entries[(part.rows,)](
            part.out, part.lse, numbers, stats, heads, heads // ranks, **options
        )
        received = decode_cp_a2a_alltoall(numbers, stats, workspace, rank, ranks)
        merge_entries[(entries,)](
            *received, out, lse, heads, heads // ranks, RANKS_PADDED=padded(ranks), **options
        )

    return launch


@cache
def _workspace(processes: Any, device: torch.device) -> torch.Tensor:
    """Return the workspace that all launches share. The first call is a collective.

    Raises:
        UserError: the system does not let processes share file descriptors.
    """
    from flashinfer.comm import (
        Mapping,
        decode_cp_a2a_allocate_mnnvl_workspace,
        decode_cp_a2a_init_workspace,
    )
    from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend

    class Group(TorchDistBackend):
        """A process group for FlashInfer that spans all ranks; 0.6.13 would split a
        context-parallel group.
        """

        def Split(self, color: int, key: int) -> Group:
            return self

    rank, ranks = dist.get_rank(processes), dist.get_world_size(processes)
    mapping = Mapping(world_size=ranks, rank=rank, cp_size=ranks)
    config = MnnvlConfig(comm_backend=Group(processes))
    try:
        workspace = decode_cp_a2a_allocate_mnnvl_workspace(mapping, mnnvl_config=config)
    except RuntimeError as error:
        if "pidfd" not in str(error):
            raise
        raise UserError(
            f"flashinfer_all_to_all cannot take the other processes' memory ({error}): run as root,"
            " or with the capability SYS_PTRACE"
        ) from error
    decode_cp_a2a_init_workspace(workspace, rank, ranks)
    # No rank sends before all workspaces are ready.
    dist.barrier(processes)
    return workspace
