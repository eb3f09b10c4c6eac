"""The partials workspace: the slots through which CTAs of a launch hand partials to one another,
for both implementations.

Nothing clears a slot. What it holds carries the epoch of the launch that stored it, and a launch
takes only its own: so whatever a launch finds there, it is right. Epochs come from the host, but a
CUDA graph replays the same one: its first launch adds to a counter before, and launches of a graph
add that to their epoch.
"""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from leanbench.kernels.launch import PARTIAL_ROW_EXTRA, merge_rows_at_once, padded

from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

#: The most that the slots of a launch take: its grid is capped so that they fit. With fixed runs,
#: whose number the problem alone decides, they take what they need.
WORKSPACE_BYTES = 32 * 1000 * 1000
#: A stream's workspace at first. A launch of 132 CTAs takes 0.3 MB (4 rows of 64) to 4.3 (32 rows
#: of 128).
_FIRST_BYTES = 4 << 20

#: Partials that a merge loads at once, by whether a thread holds one number of each;
#: kernels/lean/reduce.py.
PARTIALS_AT_ONCE = {True: 8, False: 16}

#: Offsets of a partial's numbers, 8 bytes each, are 32-bit; the largest power of two among the
#: sizes.
_MAX_PARTIALS_BYTES = 8 << 30
#: What a replay adds to its graph's counter. The golden ratio of 2^32: the epochs of a graph's
#: launches, which follow one another, meet those of none of 100,000 replays before.
_REPLAY_STEP = 0x9E3779B1 - (1 << 32)
#: Counters of a device; captures that are further apart share one.
_COUNTERS = 1 << 16

T = TypeVar("T")


def one_number_each(row_count: int, head_dim: int, num_warps: int) -> bool:
    """Whether a thread of the merge holds one number of the rows that are merged at once."""
    return merge_rows_at_once(row_count, head_dim, num_warps) * padded(head_dim) <= 32 * num_warps


def lean_grid_limit(row_count: int, head_dim: int, wanted: int) -> int:
    """The largest grid up to `wanted` whose partials, two per CTA, fit the workspace."""
    return min(wanted, WORKSPACE_BYTES // (2 * partial_bytes(row_count, head_dim)))


def partial_bytes(row_count: int, head_dim: int) -> int:
    """Of a slot of the Triton kernel."""
    return 8 * row_count * (head_dim + PARTIAL_ROW_EXTRA)


def fixed_run_bytes(fixed_runs: int, slot_bytes: int) -> int:
    """What the slots of fixed runs take, `slot_bytes` each.

    Raises:
        UserError: more than kernels can address.
    """
    needed = fixed_runs * slot_bytes
    if needed > _MAX_PARTIALS_BYTES:
        raise UserError(
            f"the partials of {fixed_runs} parts that do not depend on the batch take"
            f" {needed / 1e9:.1f} GB, the limit is {_MAX_PARTIALS_BYTES / 1e9:.1f} GB: pass fewer"
            " sequences at a time, or a cache that has room for fewer tokens"
        )
    return needed


class Lent(NamedTuple):
    """What one launch has of a workspace."""

    #: int64: the slots.
    slots: torch.Tensor
    #: 32 bits, signed, that no launch on these slots had before.
    epoch: int
    #: int32, (1,): what the kernel adds to the epoch, another number in every replay of a graph.
    replays: torch.Tensor
    #: Whether slots and `replays` are for later launches of the stream, too: not in a capture. What
    #: the stream has outgrown stays in memory.
    stays: bool


@dataclass
class Workspaces:
    """The owner of all workspaces: one for each stream of each device.

    A launch that a CUDA graph captures has slots in that graph's memory instead, as other operators
    have their temporary tensors: graphs may be replayed at the same time, and beside other calls.
    """

    #: By device and stream.
    of_streams: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    #: By device: the counters of captures, and the one that nobody adds to.
    counters: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: By device and stream: the capture that goes on there, and its counter.
    captures: dict[tuple[torch.device, int], tuple[int, torch.Tensor]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _epochs: itertools.count[int] = field(
        default_factory=lambda: itertools.count(random.getrandbits(32))
    )
    #: All slots of streams: a launch may still use what its stream has outgrown.
    _all_slots: list[torch.Tensor] = field(default_factory=list)
    _used_counters: itertools.count[int] = field(default_factory=itertools.count)

    def next_epoch(self) -> int:
        """32 bits, signed, that no launch had before."""
        # Never 0, which new slots hold.
        number = next(self._epochs) & 0xFFFFFFFF or 1
        return number - (number >> 31 << 32)

    def lend(self, device: torch.device, slots_bytes: int) -> Lent:
        """What the next launch on the device's current stream has: the stream's workspace, made on
        first use and again where a launch needs a larger one.

        Args:
            slots_bytes: what the slots must hold.

        Raises:
            RuntimeError: a graph is captured, and no call was made on this device before.
        """
        epoch = self.next_epoch()
        if device.type != "cuda":
            return Lent(self._own(device, 0, slots_bytes), epoch, self.no_replays(device), True)
        import torch

        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if not torch.cuda.is_current_stream_capturing():
            slots = self._own(device, stream, slots_bytes)
            return Lent(slots, epoch, self.no_replays(device), True)
        counter = self._counter_of_capture(device, stream)
        slots = torch.empty(slots_bytes // 8, dtype=torch.int64, device=device)
        return Lent(slots, epoch, counter, False)

    def _own(self, device: torch.device, stream: int, slots_bytes: int) -> torch.Tensor:
        slots = self.of_streams.get((device, stream))
        if slots is None or slots.numel() * 8 < slots_bytes:
            with self._lock:
                # Powers of two: a batch that grows one by one needs more a few times only.
                size = max(_FIRST_BYTES, padded(slots_bytes))
                slots = _made(device, lambda: _zeros(device, size // 8, "int64"))
                self._all_slots.append(slots)
                self.of_streams[device, stream] = slots
        return slots

    def no_replays(self, device: torch.device) -> torch.Tensor:
        """What calls outside of captures add to their epoch, 0; it lives as long as the process."""
        counters = self.counters.get(device)
        if counters is None:
            with self._lock:
                if device not in self.counters:
                    made = _made(device, lambda: _zeros(device, _COUNTERS, "int32"))
                    self.counters[device] = made, made[:1]
                counters = self.counters[device]
        return counters[1]

    def _counter_of_capture(self, device: torch.device, stream: int) -> torch.Tensor:
        """The counter of the capture that goes on; the first launch of it is preceded by what adds
        to the counter in each replay.
        """
        capture = _capture_id(stream)
        known, counter = self.captures.get((device, stream), (None, None))
        if counter is not None and known == capture:
            return counter
        counters = self.counters.get(device)
        if counters is None:
            raise RuntimeError(
                f"LeanAttention has no workspace on {device} yet, and none can be made while a CUDA"
                " graph is captured: make the same call once before the capture"
            )
        index = 1 + next(self._used_counters) % (_COUNTERS - 1)
        counter = counters[0][index : index + 1]
        counter.add_(_REPLAY_STEP)
        self.captures[device, stream] = capture, counter
        return counter


WORKSPACES = Workspaces()


def _zeros(device: torch.device, numbers: int, dtype: str) -> torch.Tensor:
    import torch

    return torch.zeros(numbers, dtype=getattr(torch, dtype), device=device)


def _capture_id(stream: int) -> int:
    """What tells a capture from all others of the process."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    status, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status} from cuStreamGetCaptureInfo")
    return int(capture)


def _made(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` allocates, for all that is launched later."""
    if device.type != "cuda":
        return make()
    import torch

    def make_and_wait() -> T:
        made = make()
        torch.cuda.current_stream(device).synchronize()
        return made

    # In a thread of its own: before torch.compile captures a graph, it lets the calling thread's
    # allocations come from that graph's memory, and refuses one that lives on.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_and_wait).result()
