"""Processes of one GPU each that measure a problem together: the worker is rank 0 and decides, the
followers are processes that it starts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from leanbench.core.errors import GpuUnusable, UserError
from leanbench.core.parallel import GpuCounts
from leanbench.measure.torch_errors import first_line, is_out_of_memory, launch_error
from leanbench.records.environment import environment_of_several

if TYPE_CHECKING:
    from leanbench.distributed.shards import Layout

T = TypeVar("T")

#: Time that a follower waits for the next request. The end of the worker ends it.
_IDLE = timedelta(hours=24)
#: Exit code of the worker after one of its followers has ended.
LOST_FOLLOWER = 70
#: Reason in the row then, whether gloo or the watching thread notices it first.
RANK_LOST = "the process of another GPU ended while this was measured"
#: Time for a follower to end before it is killed.
_LEAVES_S = 30.0
#: Exit code of a follower that could not report its failure. Its end ends the wait of the others.
FAILED_FOLLOWER = 71
#: Time for this process to report the same failure itself.
_OWN_REPORT_S = 5.0
#: Time that a launch waits for the other GPUs. Far below the time limit of a row.
_PEER_TIMEOUT_S = 5.0


class RankLost(GpuUnusable):
    """The process of another GPU ended."""

    def __init__(self) -> None:
        super().__init__(RANK_LOST)


class ProcessGroupReuseError(Exception):
    """A process has one gang in its life. Another number of ranks needs a new process."""


@dataclass(frozen=True)
class _NoValue:
    """Message of a rank that failed, instead of the value that the others wait for."""

    failure: Exception


@dataclass
class Ranks:
    """This process among those that measure together."""

    rank: int
    size: int
    #: Latest error that all ranks know.
    refusal: Exception | None = None
    _layouts: dict[GpuCounts, Layout] = field(default_factory=dict)

    def broadcast(self, value: T | None = None) -> T:
        """Return rank 0's value on all ranks."""
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=_control())
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks on all ranks.

        Raises:
            Exception: Error of the first rank that failed in `together`; `refusal` has it.
        """
        return self._gathered(value)

    def together(self, work: Callable[[], T], waits: bool = False) -> T:
        """Work on every rank and return the own result. A failure on one rank is raised on all.

        Args:
            waits: GPUs wait for each other in `work`. A rank whose GPU fails cannot report it and
                must end, see leanbench.measure.follower.

        Raises:
            UserError: First such error of a rank; `refusal` has it.
            MemoryError: A rank ran out of memory; `refusal` has it.
            GpuUnusable: Any other error of a rank.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            is_reported = isinstance(error, UserError) and not isinstance(error, GpuUnusable)
            if error is self.refusal or (waits and not is_reported):
                raise
            failure = self._for_all(error)
        self._gathered(_NoValue(failure) if failure is not None else None)
        return result  # pyright: ignore[reportReturnType]

    def _gathered(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=_control())
        for other in values:
            if isinstance(other, _NoValue):
                self.refusal = other.failure
                raise other.failure
        return values

    def _for_all(self, error: Exception) -> Exception:
        """Return the error in a form that other processes can raise."""
        if isinstance(error, UserError):
            return type(error)(*error.args)
        kind = MemoryError if is_out_of_memory(error) else GpuUnusable
        return kind(f"rank {self.rank}: {first_line(launch_error(error))}")

    def layout(self, counts: GpuCounts) -> Layout:
        """Return the heads and tokens of each rank, and the groups that exchange partials."""
        from leanbench.distributed.shards import Layout

        if counts not in self._layouts:
            self._layouts[counts] = Layout.make(*counts, timeout_s=_PEER_TIMEOUT_S)
        return self._layouts[counts]

    def barrier(self) -> None:
        """Wait until all ranks are here and their GPUs idle."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def is_rank_lost(error: Exception) -> bool:
    """Return True if gloo found that the process of another rank is gone."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and "Connection" in text


_control_group: list[Any] = []


def _control() -> Any:
    """Return the group of all ranks over gloo, which waits without a GPU."""
    return _control_group[0]


def join(rank: int, size: int, port: int, device_index: int | None) -> Ranks:
    """Meet the other processes at a port of this machine.

    Args:
        device_index: GPU of this rank; None in tests without GPUs.
    """
    import torch
    import torch.distributed as dist

    # Leave NVLink multicast off, see docs/distributed.md.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    store = _store(port, size, is_master=False)
    if device_index is None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        device = torch.device("cuda", device_index)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    _control_group[:] = [dist.new_group(backend="gloo", timeout=_IDLE)]
    return Ranks(rank, size)


def _store(port: int, size: int, is_master: bool) -> Any:
    """Return the store by which the processes connect. Port 0 of the master takes a free port."""
    from torch import distributed

    return distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1",
        port,
        size,
        is_master=is_master,
        timeout=timedelta(minutes=2),
        wait_for_workers=False,
    )


def leave() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    _control_group.clear()
    dist.destroy_process_group()


class Gang:
    """Followers of this worker, one for each further GPU of a problem.

    A worker starts them once. Torch's symmetric memory knows process groups by name for the life of
    a process, and torch reuses the names for the groups of a second gang.
    """

    def __init__(self) -> None:
        self._followers: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._is_at_work = self._is_broken = False
        self.ranks: Ranks | None = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """End this process if a follower ends inside the block. It would wait for it forever."""
        with self._lock:
            self._is_at_work = True
        try:
            yield
        finally:
            with self._lock:
                self._is_at_work = False

    def of(self, size: int, device_index: int, options: dict[str, Any]) -> Ranks:
        """Return rank 0 of `size` ranks. Start the others unless they run already.

        Raises:
            UserError: This machine has fewer GPUs.
            ProcessGroupReuseError: There was a gang of another size, or a follower has ended.
        """
        if self.ranks is not None and self.ranks.size == size and not self._is_broken:
            return self.ranks
        devices = devices_for(size, device_index, _device_count())
        if self._store is not None:
            raise ProcessGroupReuseError(
                f"{size} ranks need a new process: this one has had its gang"
            )
        port = self._open_store(size)
        for rank, device in enumerate(devices[1:], start=1):
            self._start(rank, size, port, device)
        self.ranks = join(0, size, port, device_index)
        self.ranks.broadcast(options)
        return self.ranks

    def close(self) -> None:
        """End the followers, if any."""
        if self.ranks is None:
            return
        self._leaving.set()
        if self._is_broken:
            # A rank is gone, so the others cannot leave together.
            for follower in self._followers:
                follower.kill()
        else:
            self.ranks.broadcast(None)
            leave()
        for follower in self._followers:
            try:
                follower.wait(_LEAVES_S)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
        self._followers.clear()
        self.ranks = None

    def _open_store(self, size: int) -> int:
        self._store = _store(0, size, is_master=True)
        return self._store.port

    def _start(self, rank: int, size: int, port: int, device: int) -> None:
        """Start a follower in this process's group, so that a signal ends both."""
        words = [str(number) for number in (rank, size, port, device)]
        follower = subprocess.Popen(
            [sys.executable, "-P", "-m", "leanbench.measure.follower", *words],
            stdin=subprocess.DEVNULL,
        )
        self._followers.append(follower)
        watch = threading.Thread(target=self._watch, args=(rank, follower), daemon=True)
        watch.start()

    def _watch(self, rank: int, follower: subprocess.Popen[bytes]) -> None:
        """End this process if the follower ends while this process waits for it."""
        code = follower.wait()
        if self._leaving.is_set():
            return
        print(f"rank {rank} ended with {code}", file=sys.stderr, flush=True)
        if code == FAILED_FOLLOWER:
            time.sleep(_OWN_REPORT_S)
        with self._lock:
            if self._is_at_work:
                os._exit(LOST_FOLLOWER)
            self._is_broken = True


def devices_for(size: int, first: int, count: int) -> list[int]:
    """Return the GPUs of `size` ranks out of `count`: `first`, then the others in order.

    Raises:
        UserError: There are fewer.
    """
    if size > count:
        raise UserError(
            f"this problem is for {size} GPUs and {count} can be used here: choose fewer, or check"
            " CUDA_VISIBLE_DEVICES"
        )
    others = [index for index in range(count) if index != first]
    return [first, *others[: size - 1]]


def environment_of_ranks(size: int, first: int) -> dict[str, Any]:
    """Return environment fields of `size` ranks, or of all GPUs if there are fewer; none for one.

    Args:
        first: GPU of rank 0.
    """
    count = _device_count()
    devices = devices_for(min(size, count), first, count)
    return environment_of_several(devices) if len(devices) > 1 else {}


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()
