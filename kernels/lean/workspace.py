"""Partials workspace: slots that pass partials between CTAs of a launch, for both implementations.

Slots are never cleared. Their numbers carry the epoch of the launch that stored them, and a launch
reads only its own, so earlier contents do no harm. Epochs come from the host, but a CUDA graph
replays the same one. A graph's first launch therefore increments a counter before it runs, and
launches of the graph add the counter to their epoch.
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

#: Maximum size of a launch's slots; its grid is capped accordingly. Fixed runs are not capped,
#: because the problem determines their number.
WORKSPACE_BYTES = 32 * 1000 * 1000
#: Initial size of a stream's workspace. A launch of 132 CTAs takes 0.3 MB (4 rows of 64) to 4.3 MB
#: (32 rows of 128).
_FIRST_BYTES = 4 << 20

#: Limit of 32-bit offsets of a partial's 8-byte numbers: the largest power of two among the sizes.
_MAX_PARTIALS_BYTES = 8 << 30
#: Increment of a graph's counter per replay: the golden ratio of 2^32. The consecutive epochs of a
#: graph's launches meet no epoch of the 100,000 previous replays.
_REPLAY_STEP = 0x9E3779B1 - (1 << 32)
#: Counters per device. Captures further apart share one.
_COUNTERS = 1 << 16
#: 32-bit numbers per device for work ranges that launches keep, and the most of one launch.
#: Launches further apart share some, and then neither finds its own.
_KEPT, _MOST_KEPT = 1 << 22, 1 << 18

T = TypeVar("T")


def one_number_each(row_count: int, head_dim: int, num_warps: int) -> bool:
    """Return True if a thread of the merge holds one number of the rows merged at once."""
    return merge_rows_at_once(row_count, head_dim, num_warps) * padded(head_dim) <= 32 * num_warps


def lean_grid_limit(row_count: int, head_dim: int, wanted: int) -> int:
    """Return the largest grid up to `wanted` with partials, two per CTA, that fit the workspace."""
    return min(wanted, WORKSPACE_BYTES // (2 * partial_bytes(row_count, head_dim)))


def partial_bytes(row_count: int, head_dim: int) -> int:
    """Return the bytes of a slot of the Triton kernel."""
    return 8 * row_count * (head_dim + PARTIAL_ROW_EXTRA)


def fixed_run_bytes(fixed_runs: int, slot_bytes: int) -> int:
    """Return the size of the slots of fixed runs, each of `slot_bytes`.

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
    """A launch's share of a workspace."""

    #: Slots, int64.
    slots: torch.Tensor
    #: Unique number of the launch on these slots: 32 bits, signed.
    epoch: int
    #: Addend of the epoch that differs in every replay of a graph: int32, (1,).
    replays: torch.Tensor
    #: True if slots and `replays` also serve later launches of the stream; False in a capture.
    #: Slots that the stream has outgrown stay allocated.
    stays: bool


@dataclass
class Workspaces:
    """Owner of all workspaces, one per stream and device.

    A launch captured by a CUDA graph has its slots in that graph's memory, like temporary tensors
    of other operators: graphs can replay concurrently with other graphs and calls.
    """

    #: Slots by device and stream.
    of_streams: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    #: Counters by device: those of captures, and one that stays 0.
    counters: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: Memory for work ranges, by device: kernels/lean/kept.cuh.
    kept: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    #: Active captures by device and stream, each with its counter.
    captures: dict[tuple[torch.device, int], tuple[int, torch.Tensor]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: Numbers of launches, shared with the C path of calls.
    epochs: itertools.count[int] = field(
        default_factory=lambda: itertools.count(random.getrandbits(32))
    )
    #: All slots of streams: a launch may still use slots that its stream has outgrown.
    _all_slots: list[torch.Tensor] = field(default_factory=list)
    _used_counters: itertools.count[int] = field(default_factory=itertools.count)
    _kept_numbers: int = 0
    _kept_keys: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def next_epoch(self) -> int:
        """Return a new epoch: 32 bits, signed, unique in the process."""
        # 0 is the content of new slots.
        number = next(self.epochs) & 0xFFFFFFFF or 1
        return number - (number >> 31 << 32)

    def lend(self, device: torch.device, slots_bytes: int) -> Lent:
        """Return the slots, epoch and counter of the next launch on the device's current stream.

        The stream's workspace is allocated on first use, and again if a launch needs a larger one.

        Args:
            slots_bytes: size of the slots.

        Raises:
            RuntimeError: a graph is captured before any call on this device.
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
                # Powers of two: a batch that grows by single sequences reallocates only a few
                # times.
                size = max(_FIRST_BYTES, padded(slots_bytes))
                slots = _made(device, lambda: _zeros(device, size // 8, "int64"))
                self._all_slots.append(slots)
                self.of_streams[device, stream] = slots
        return slots

    def no_replays(self, device: torch.device) -> torch.Tensor:
        """Return a counter that stays 0, for calls outside of captures.

        It lives as long as the process.
        """
        counters = self.counters.get(device)
        if counters is None:
            with self._lock:
                if device not in self.counters:
                    made = _made(device, lambda: _zeros(device, _COUNTERS + _KEPT, "int32"))
                    self.kept[device] = made[_COUNTERS:]
                    self.counters[device] = made, made[:1]
                counters = self.counters[device]
        return counters[1]

    def keep(self, device: torch.device, numbers: int) -> tuple[int, int]:
        """Return memory for the work ranges of a launch, and a key, unique in the process.

        Args:
            numbers: 32-bit numbers. If they are too many, nothing is kept: the address is 0.
        """
        memory = self.kept.get(device)
        if memory is None or numbers > _MOST_KEPT:
            return 0, 0
        with self._lock:
            first = self._kept_numbers
            if first + numbers > _KEPT:
                first = 0
            self._kept_numbers = first + numbers
        key = next(self._kept_keys) & 0xFFFFFFFF or next(self._kept_keys)
        return memory.data_ptr() + 4 * first, key

    def _counter_of_capture(self, device: torch.device, stream: int) -> torch.Tensor:
        """Return the counter of the active capture.

        The capture's first launch is preceded by an increment of the counter in each replay.
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
    """Return the identifier of a capture, unique in the process."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    status, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status} from cuStreamGetCaptureInfo")
    return int(capture)


def _made(device: torch.device, make: Callable[[], T]) -> T:
    """Return the result of `make`, with memory that outlives graphs."""
    if device.type != "cuda":
        return make()
    import torch

    def make_and_wait() -> T:
        made = make()
        torch.cuda.current_stream(device).synchronize()
        return made

    # In a separate thread: before torch.compile captures a graph, it redirects the calling thread's
    # allocations to that graph's memory, and rejects allocations that outlive it.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_and_wait).result()
