"""GPUs that share sequences, each with a part of their tokens, and the memory through which they
exchange partials.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.inputs import Peers

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: GPUs of a group at most: those of a host that NVLink connects.
MOST_RANKS = 8
#: That a launch waits for the other GPUs, and bytes of a peer workspace, where nobody says.
TIMEOUT_S, WORKSPACE_BYTES = 10.0, 64 << 20
#: Of a partial's piece, four columns: two units of 16 bytes.
_PIECE_BYTES = 32


class PeerFields(ctypes.Structure):
    """PeerGroup in kernels/lean/params.cuh, field by field, with as many workspaces as there may
    be.
    """

    _fields_ = [
        ("tickets", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("failure", ctypes.c_uint64),
        ("half_numbers", ctypes.c_int64),
        ("rank", ctypes.c_uint64),
        ("workspaces", ctypes.c_uint64 * MOST_RANKS),
    ]


class ContextGroup:
    """GPUs that share sequences, for `lean_attn_with_kvcache(..., group=)`.

    A collective: all ranks make it, and later make the same calls with it in the same order, on one
    stream each, or on streams that wait for one another. CUDA graphs with such calls are replayed
    as often on all ranks.

    Each GPU has a peer workspace, which the others write to directly (NVLink, or PCIe between GPUs
    with peer access). Multicast is never used.

    Args:
        process_group: whose GPUs these are; None: all processes.
        timeout_s: that a launch waits for the other GPUs. Past it the outputs are NaN, and the next
            call, or `check`, raises RuntimeError. Launches that are queued behind it, or in its
            graph, wait no longer.
        workspace_bytes: of each GPU. A call takes 64 bytes for each rank and each 4 numbers of its
            output: 64 MB are enough for 4,096 query rows of 128 on 8 GPUs.

    Raises:
        UserError: the ranks are on several hosts, share a GPU, have none, or are too many.
        RuntimeError: no peer access between two of the GPUs.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        import torch
        import torch.distributed as dist

        self._processes = process_group or dist.group.WORLD
        self.rank = dist.get_rank(self._processes)
        self.size = dist.get_world_size(self._processes)
        self.workspace_bytes = workspace_bytes
        check_places(_places(self._processes, self.size))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._workspace, self._handle = _peer_workspaces(
            self._processes, self.device, workspace_bytes
        )
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        # On the host, where the GPU writes and the host reads without waiting for it.
        self._failure = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._failed_rank = ctypes.c_int32.from_address(self._failure.data_ptr())
        self._timeout_s = timeout_s
        fields = PeerFields(
            timeout_ns=int(timeout_s * 1e9),
            failure=self._failure.data_ptr(),
            half_numbers=workspace_bytes // 8,
            rank=self.rank,
            workspaces=(ctypes.c_uint64 * MOST_RANKS)(*addresses),
        )
        self._fields = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(self.device)
        self.peers = Peers(self.size, self.rank, self._fields.data_ptr(), self._processes)
        torch.cuda.synchronize(self.device)
        dist.barrier(self._processes)

    def raise_failure(self) -> None:
        """Raises RuntimeError where a launch that has ended waited in vain."""
        if failed := self._failed_rank.value:
            raise RuntimeError(late_sentence(failed - 1, self.rank, self._timeout_s))

    def check(self) -> None:
        """Waits for this GPU's launches; raises RuntimeError where one waited in vain."""
        import torch

        torch.cuda.synchronize(self.device)
        self.raise_failure()

    def barrier(self) -> None:
        """Lets the current stream wait until those of all GPUs are here: for measurements, calls
        need none.
        """
        self._handle.barrier(channel=0)

    def check_room(self, rows: int, columns: int) -> None:
        """Raises UserError where the peer workspace has no room for `rows` x `columns` numbers of
        output.
        """
        needed = workspace_bytes_for(self.size, rows, columns)
        if needed > self.workspace_bytes:
            raise UserError(
                f"the partials of {rows} query rows from {self.size} GPUs take {needed} bytes, the"
                f" group's workspace has {self.workspace_bytes}: make the ContextGroup with"
                " workspace_bytes of that many"
            )


def workspace_bytes_for(ranks: int, rows: int, columns: int) -> int:
    """What a call with `rows` x `columns` numbers of output takes of a workspace: pieces of four
    numbers from each rank, in each of the two halves.
    """
    return 2 * ranks * rows * columns // 4 * _PIECE_BYTES


def late_sentence(late: int, rank: int, timeout_s: float) -> str:
    return (
        f"rank {late} of the context group did not deliver its partials to rank {rank} within"
        f" {timeout_s:g} s: it died, made other calls, or called with other shapes; outputs since"
        " then are NaN. Make a new ContextGroup once all ranks are there again"
    )


def check_places(places: list[tuple[str, str]]) -> None:
    """Whether ranks are on one host, on a GPU each.

    Args:
        places: (host, UUID of the GPU, empty without one) by rank.

    Raises:
        UserError: they are not, or are too many.
    """
    if len(places) > MOST_RANKS:
        raise UserError(
            f"a context group has at most {MOST_RANKS} GPUs, this one would have {len(places)}:"
            " split the heads over the others (tensor parallel)"
        )
    for rank, (host, gpu) in enumerate(places):
        if host != places[0][0]:
            raise UserError(
                f"rank 0 is on {places[0][0]}, rank {rank} on {host}: a context group needs the"
                " GPUs of one host"
            )
        if not gpu:
            raise UserError(
                f"rank {rank} has no GPU that torch can use: a context group needs one for each"
                " rank"
            )
        if (first := [gpu for _, gpu in places].index(gpu)) < rank:
            raise UserError(
                f"ranks {first} and {rank} are both on GPU {gpu}: call torch.cuda.set_device with"
                " a GPU of its own on each rank"
            )


def _places(processes: Any, size: int) -> list[tuple[str, str]]:
    import socket

    import torch
    import torch.distributed as dist

    places: list[Any] = [None] * size
    gpu = ""  # A rank without one takes part, so that no other waits for it.
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    dist.all_gather_object(places, (socket.gethostname(), gpu), processes)
    return places


def _peer_workspaces(
    processes: Any, device: torch.device, workspace_bytes: int
) -> tuple[torch.Tensor, Any]:
    """This GPU's peer workspace, all zeros, and torch's handle of those of all ranks."""
    import torch

    # Multicast memory is not needed, and has hung machines.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric_memory

    workspace = symmetric_memory.empty(workspace_bytes // 4, dtype=torch.int32, device=device)
    workspace.zero_()
    torch.cuda.synchronize(device)
    return workspace, symmetric_memory.rendezvous(workspace, processes)
