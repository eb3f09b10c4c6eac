"""GPUs that share sequences, and the memory through which they exchange partials."""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from leanbench.core.errors import UserError
from leanbench.core.inputs import Peers

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: GPUs of a group at most: those of a host that NVLink connects.
MOST_RANKS = 8
#: That a launch waits for the other GPUs, and bytes of a peer workspace, where nobody says.
TIMEOUT_S, WORKSPACE_BYTES = 10.0, 64 << 20
#: That a launch may wait at most: a day.
MOST_TIMEOUT_S = 86_400.0
#: Of the smallest workspace: a unit of 16 bytes in each half.
_LEAST_BYTES = 32
#: Of a partial's piece, four columns: two units of 16 bytes.
_PIECE_BYTES = 32
#: Process groups of context groups, by name. torch's symmetric memory keeps the rank, size and
#: store of a name for the life of the process, and torch names process groups from the start again
#: after `destroy_process_group`: a rank that met the old ones would wait for them for ever.
_met: dict[str, weakref.ref[Any]] = {}


class PeerFields(ctypes.Structure):
    """PeerGroup in kernels/lean/params.cuh, with the maximum number of workspaces."""

    _fields_ = [
        ("tickets", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("failure", ctypes.c_uint64),
        ("half_numbers", ctypes.c_int64),
        ("rank", ctypes.c_uint64),
        ("workspaces", ctypes.c_uint64 * MOST_RANKS),
    ]


class Place(NamedTuple):
    """Host and GPU of a rank."""

    host: str
    #: UUID of its GPU; empty without one.
    gpu: str = ""
    #: As torch counts in the rank's process.
    device: int = 0
    #: UUIDs of the GPUs to which this one has no peer access, of those that its process sees.
    apart: tuple[str, ...] = ()
    #: Whether its process had a context group of an earlier process group by this one's name.
    had_another: bool = False


class ContextGroup:
    """GPUs that share sequences, for `lean_attn_with_kvcache(..., group=)`.

    A collective: all ranks make it, and later make the same calls in the same order, on one stream
    each or on synchronized streams. CUDA graphs with such calls are replayed equally often on all
    ranks.

    Each GPU has a peer workspace, which the others write directly: over NVLink, or over PCIe with
    peer access, which was not measured. Multicast is never used.

    Args:
        process_group: The processes of these GPUs; None: all.
        timeout_s: Maximum time that a launch waits for other GPUs, up to a day. After it the
            outputs are NaN, and the next call, or `check`, raises RuntimeError. Queued launches,
            and later ones in the same graph, do not wait again.
        workspace_bytes: Size of each GPU's workspace. A call takes 64 bytes per rank and 4 numbers
            of its output: 64 MB are enough for 4,096 query rows of 128 on 8 GPUs.

    Raises:
        UserError: torch.distributed is not initialized; the ranks are on several hosts, share a
            GPU, lack a GPU or peer access, or are too many; a rank had a context group before
            `destroy_process_group`; `process_group` is invalid or does not include this process; or
            `timeout_s` or `workspace_bytes` is out of range.
        RuntimeError: torch cannot map the peer workspaces.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        import torch
        import torch.distributed as dist

        check_limits(timeout_s, workspace_bytes)
        check_processes(process_group)
        self._processes = dist.group.WORLD if process_group is None else process_group
        self.rank = dist.get_rank(self._processes)
        if self.rank < 0:
            raise UserError(
                f"rank {dist.get_rank()} of all processes is no member of the process group of this"
                " ContextGroup: make it on the members alone, whose"
                " torch.distributed.get_rank(process_group) is not negative"
            )
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
            timeout_ns=math.ceil(timeout_s * 1e9),
            failure=self._failure.data_ptr(),
            half_numbers=half_numbers(workspace_bytes),
            rank=self.rank,
            workspaces=(ctypes.c_uint64 * MOST_RANKS)(*addresses),
        )
        self._fields = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(self.device)
        self.peers = Peers(self.size, self.rank, self._fields.data_ptr(), self._processes)
        torch.cuda.synchronize(self.device)
        dist.barrier(self._processes)

    def raise_failure(self) -> None:
        """Raise RuntimeError if a finished launch has timed out."""
        if failed := self._failed_rank.value:
            raise RuntimeError(late_sentence(failed - 1, self.rank, self._timeout_s))

    def check(self) -> None:
        """Wait for the launches of this GPU; raise RuntimeError if one has timed out."""
        import torch

        torch.cuda.synchronize(self.device)
        self.raise_failure()

    def barrier(self) -> None:
        """Make the current stream wait for those of all GPUs; only measurements need it."""
        self._handle.barrier(channel=0)

    def check_room(self, rows: int, columns: int) -> None:
        """Raise UserError if `rows` x `columns` numbers of output do not fit into the workspace."""
        needed = workspace_bytes_for(self.size, rows, columns)
        if needed > self.workspace_bytes:
            raise UserError(
                f"the partials of {rows} query rows from {self.size} GPUs take {needed} bytes, the"
                f" group's workspace has {self.workspace_bytes}: make the ContextGroup with"
                " workspace_bytes of that many"
            )


def workspace_bytes_for(ranks: int, rows: int, columns: int) -> int:
    """Return the bytes of a workspace that a call with `rows` x `columns` numbers of output takes.

    Each rank sends pieces of four numbers to each half.
    """
    return 2 * ranks * rows * columns // 4 * _PIECE_BYTES


def half_numbers(workspace_bytes: int) -> int:
    """Return the number of 32-bit numbers in half a peer workspace, in whole units."""
    return workspace_bytes // _LEAST_BYTES * 4


def check_limits(timeout_s: float, workspace_bytes: int) -> None:
    """Check the limits of a group.

    Raises:
        UserError: The time or the size is out of range.
    """
    is_time = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not is_time or not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise UserError(
            f"timeout_s is {timeout_s!r}: pass the seconds that a launch waits for the other GPUs,"
            f" above 0 and at most {MOST_TIMEOUT_S:,.0f}"
        )
    is_size = hasattr(workspace_bytes, "__index__") and not isinstance(workspace_bytes, bool)
    if not is_size or operator.index(workspace_bytes) < _LEAST_BYTES:
        raise UserError(
            f"workspace_bytes is {workspace_bytes!r}: pass a whole number of {_LEAST_BYTES} or more"
        )


def check_processes(process_group: object = None) -> None:
    """Check that torch.distributed is initialized and that a process group is valid.

    Raises:
        UserError: It is not.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "torch.distributed is not initialized: start a process for each GPU, as torchrun does,"
            " and call torch.distributed.init_process_group in each of them first"
        )
    try:
        dist.get_rank(process_group)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UserError(
            f"process_group is {process_group!r}, which is no process group, or one that was"
            " destroyed: pass one of torch.distributed.new_group, or None for all processes"
        ) from None


def late_sentence(late: int, rank: int, timeout_s: float) -> str:
    return (
        f"rank {late} of the context group did not deliver its partials to rank {rank} within"
        f" {timeout_s:g} s: it died, made other calls, or called with other shapes; outputs since"
        " then are NaN. Make a new ContextGroup once all ranks are there again"
    )


def check_places(places: list[Place]) -> None:
    """Check that ranks are on one host, with one GPU and peer access each.

    Args:
        places: Host and GPU by rank.

    Raises:
        UserError: They are not, they are too many, or torch cannot connect them.
    """
    if len(places) > MOST_RANKS:
        raise UserError(
            f"a context group has at most {MOST_RANKS} GPUs, this one would have {len(places)}:"
            " split the heads over the others (tensor parallel)"
        )
    for rank, place in enumerate(places):
        if place.host != places[0].host:
            raise UserError(
                f"rank 0 is on {places[0].host}, rank {rank} on {place.host}: a context group needs"
                " the GPUs of one host"
            )
        if not place.gpu:
            raise UserError(
                f"rank {rank} has no GPU that torch can use: a context group needs one for each"
                " rank"
            )
        if place.had_another:
            raise UserError(
                f"rank {rank} had a ContextGroup before torch.distributed.destroy_process_group,"
                " and torch would look for the ranks of that one, whose process group had the same"
                " name: start new processes for another ContextGroup"
            )
        for other in range(rank):
            _check_pair(other, places[other], rank, place)


def _check_pair(first: int, first_place: Place, second: int, second_place: Place) -> None:
    """Raise UserError if two ranks of a host cannot write to each other's memory."""
    if first_place.gpu == second_place.gpu:
        raise UserError(
            f"ranks {first} and {second} are both on GPU {first_place.gpu}: call"
            " torch.cuda.set_device with a GPU of its own on each rank"
        )
    if first_place.device == second_place.device:
        # torch takes them for one GPU.
        raise UserError(
            f"ranks {first} and {second} both count their GPU as cuda:{first_place.device}, a"
            " CUDA_VISIBLE_DEVICES for each rank: start them with the same GPUs visible to all, and"
            ' call torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
        )
    if second_place.gpu in first_place.apart or first_place.gpu in second_place.apart:
        raise UserError(
            f"the GPUs of ranks {first} and {second} have no peer access: choose GPUs that have it,"
            " `leanbench doctor` says which, or split the heads over them (tensor parallel)"
        )


def _places(processes: Any, size: int) -> list[Place]:
    import torch.distributed as dist

    places: list[Any] = [None] * size
    place = _own_place()._replace(had_another=_had_another(processes))
    dist.all_gather_object(places, place, processes)
    return places


def _had_another(processes: Any) -> bool:
    """Return True if another process group with this name has mapped workspaces."""
    met = _met.get(processes.group_name)
    return met is not None and met() is not processes


def _own_place() -> Place:
    """Describe this rank; a rank without a GPU takes part, so that others do not wait."""
    import socket

    import torch

    from leanbench.gpu.topology import has_peer_access

    host = socket.gethostname()
    if not torch.cuda.is_available():
        return Place(host)
    device = torch.cuda.current_device()
    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    apart = [
        uuid
        for index, uuid in enumerate(uuids)
        if index != device and not has_peer_access(device, index)
    ]
    return Place(host, uuids[device], device, tuple(apart))


def _peer_workspaces(
    processes: Any, device: torch.device, workspace_bytes: int
) -> tuple[torch.Tensor, Any]:
    """Return the peer workspace of this GPU, all zeros, and torch's handle of all workspaces."""
    import torch

    # Multicast memory is not needed, and has hung machines.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric_memory

    workspace = symmetric_memory.empty(workspace_bytes // 4, dtype=torch.int32, device=device)
    workspace.zero_()
    torch.cuda.synchronize(device)
    _met[processes.group_name] = weakref.ref(processes)
    return workspace, symmetric_memory.rendezvous(workspace, processes)
