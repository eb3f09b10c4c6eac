"""The partials workspace: the slots through which CTAs of a launch hand partials to one another,
for both implementations.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leanbench.kernels.launch import EMPTY_BITS, PARTIAL_ROW_EXTRA, merge_rows_at_once, padded

from leanbench.core.errors import UserError

if TYPE_CHECKING:
    import torch

#: The workspace's size whatever the problem: the grid is capped so that its partials fit. With
#: fixed runs, whose number the problem alone decides, it grows instead.
WORKSPACE_BYTES = 16 * 1000 * 1000

#: Half of it is the slots of work ranges, the other half what host blocks keep of their own.
SLOTS_BYTES = WORKSPACE_BYTES // 2

#: Partials that a merge loads at once, by whether a thread holds one number of each;
#: kernels/lean/reduce.py.
PARTIALS_AT_ONCE = {True: 8, False: 16}

#: Offsets of a partial's numbers, 4 bytes each, are 32-bit; the largest power of two among the
#: sizes.
_MAX_PARTIALS_BYTES = 4 << 30


def one_number_each(row_count: int, head_dim: int, num_warps: int) -> bool:
    """Whether a thread of the merge holds one number of the rows that are merged at once."""
    return merge_rows_at_once(row_count, head_dim, num_warps) * padded(head_dim) <= 32 * num_warps


def lean_grid_limit(row_count: int, head_dim: int, wanted: int) -> int:
    """The largest grid up to `wanted` whose partials, two per CTA, fit the workspace."""
    return min(wanted, WORKSPACE_BYTES // (2 * partial_bytes(row_count, head_dim)))


def partial_bytes(row_count: int, head_dim: int) -> int:
    """Of a slot of the Triton kernel."""
    return 4 * row_count * (head_dim + PARTIAL_ROW_EXTRA)


def fixed_run_bytes(runs: int, slot_bytes: int) -> int:
    """What the slots of `runs` fixed runs take, `slot_bytes` each.

    Raises:
        UserError: more than kernels can address.
    """
    needed = runs * slot_bytes
    if needed > _MAX_PARTIALS_BYTES:
        raise UserError(
            f"the partials of {runs} parts that do not depend on the batch take {needed / 1e9:.1f}"
            f" GB, the limit is {_MAX_PARTIALS_BYTES / 1e9:.1f} GB: pass fewer sequences at a time,"
            " or a cache that has room for fewer tokens"
        )
    return needed


@dataclass(frozen=True, eq=False)
class Workspace:
    """Slots for partials. Launches on one stream may share it; launches that run at the same time
    may not.
    """

    #: int32, bit patterns of fp32, a slot per work range. A launch leaves them as it found them:
    #: all EMPTY.
    partials: torch.Tensor
    #: int32: what the host blocks of the Triton kernel keep of their own.
    host_partials: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, partials_bytes: int = SLOTS_BYTES) -> Workspace:
        """A new one whose `partials` hold at least that many bytes."""
        import torch

        def empty(size: int) -> torch.Tensor:
            return torch.full((size // 4,), EMPTY_BITS, dtype=torch.int32, device=device)

        # Powers of two: a context that grows token by token needs a larger one a few times only.
        size = SLOTS_BYTES if partials_bytes <= SLOTS_BYTES else padded(partials_bytes)
        return cls(empty(size), empty(SLOTS_BYTES))

    def holds(self, partials_bytes: int) -> bool:
        return self.partials.numel() * 4 >= partials_bytes


@dataclass
class Workspaces:
    """The owner of all workspaces: one for each stream of each device.

    Graphs captured on one stream share that stream's workspace, so they must not be replayed at the
    same time.
    """

    #: By device and stream.
    of_streams: dict[tuple[torch.device, int], Workspace] = field(default_factory=dict)
    #: One per device, for the next stream that captures a graph: none can be made during the
    #: capture.
    spares: dict[torch.device, Workspace] = field(default_factory=dict)
    #: Those that a graph was captured with, which may be replayed when the stream has a larger one.
    captured: set[Workspace] = field(default_factory=set)
    #: How often a stream's workspace was replaced or a spare taken: launches prepared before go
    #: through `of` again.
    changes: int = 0

    def of(self, device: torch.device, partials_bytes: int = SLOTS_BYTES) -> Workspace:
        """The workspace of the device's current stream, made on first use and again where a call
        needs a larger one.

        Args:
            partials_bytes: what its `partials` must hold.

        Raises:
            RuntimeError: a graph is captured, and no call before it needed a workspace as large.
        """
        if device.type != "cuda":
            if not _holds(self.of_streams.get((device, 0)), partials_bytes):
                self.of_streams[device, 0] = Workspace.on(device, partials_bytes)
            return self.of_streams[device, 0]
        import torch

        stream = device, torch.cuda.current_stream(device).cuda_stream
        own_holds = _holds(self.of_streams.get(stream), partials_bytes)
        spare_holds = _holds(self.spares.get(device), partials_bytes)
        if torch.cuda.is_current_stream_capturing():
            if not own_holds and not spare_holds:
                raise RuntimeError(
                    f"LeanAttention has no workspace of {(partials_bytes + SLOTS_BYTES) / 1e6:.0f}"
                    f" MB on {device} yet, and none can be made while a CUDA graph is captured:"
                    " make the same call once before the capture"
                )
            if not own_holds:
                self.of_streams[stream] = self.spares.pop(device)
                self.changes += 1
            self.captured.add(self.of_streams[stream])
            return self.of_streams[stream]
        if not own_holds:
            self.changes += stream in self.of_streams
            self.of_streams[stream] = _new_workspace(device, partials_bytes)
        if not spare_holds:
            self.spares[device] = _new_workspace(device, partials_bytes)
        return self.of_streams[stream]


WORKSPACES = Workspaces()


def _holds(workspace: Workspace | None, partials_bytes: int) -> bool:
    return workspace is not None and workspace.holds(partials_bytes)


def _new_workspace(device: torch.device, partials_bytes: int) -> Workspace:
    import torch

    def make() -> Workspace:
        workspace = Workspace.on(device, partials_bytes)
        torch.cuda.current_stream(device).synchronize()
        return workspace

    # What runs on the current stream may still use the workspace that this one takes the place of.
    torch.cuda.current_stream(device).synchronize()
    # In a thread of its own: before torch.compile captures a graph, it lets the calling thread's
    # allocations come from that graph's memory, and refuses one that lives on.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
