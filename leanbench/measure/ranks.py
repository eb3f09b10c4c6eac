"""Processes of one GPU each that measure a problem together: the worker, which is rank 0 and
decides, and those that it starts.
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
from leanbench.measure.torch_errors import first_line, is_out_of_memory, what_broke
from leanbench.records.environment import environment_of_several

if TYPE_CHECKING:
    from leanbench.distributed.shards import Layout

T = TypeVar("T")

#: A follower waits for the worker's next request; its end ends the follower.
_IDLE = timedelta(hours=24)
#: Of the worker, where one of its followers has ended.
LOST_FOLLOWER = 70
#: Of the row in which that happened, whoever notices it first: gloo, or who waits for the process.
RANK_LOST = "the process of another GPU ended while this was measured"
#: A follower that has not ended so long after it was told to is killed.
_LEAVES_S = 30.0
#: Of a follower that failed where the others cannot hear of it: its end is what ends their wait.
FAILED_FOLLOWER = 71
#: For this process's own report, where what broke a follower broke it too.
_OWN_REPORT_S = 5.0
#: That a launch waits for the other GPUs: a row says so long before its own limit.
_PEER_TIMEOUT_S = 5.0


class RankLost(GpuUnusable):
    """The process of another GPU ended."""

    def __init__(self) -> None:
        super().__init__(RANK_LOST)


class SecondGang(Exception):
    """A process has one gang in its life: a problem for another needs a new process."""


@dataclass(frozen=True)
class _NoValue:
    """What a rank sends that failed, wherever the others are waiting for its value."""

    failure: Exception


@dataclass
class Ranks:
    """This process among those that measure together."""

    rank: int
    size: int
    #: The latest error that all ranks know of.
    refusal: Exception | None = None
    _layouts: dict[GpuCounts, Layout] = field(default_factory=dict)

    def from_first(self, value: T | None = None) -> T:
        """Rank 0's value, on all ranks."""
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=_control())
        return box[0]

    def of_all(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks.

        Raises:
            Exception: that of the first rank that failed in `together`; `refusal` is it then.
        """
        return self._gathered(value)

    def together(self, work: Callable[[], T], waits: bool = False) -> T:
        """What `work` returns, done on every rank; where it fails on one, it fails on all.

        Args:
            waits: ranks wait for one another's GPUs in `work`: a rank whose GPU fails tells nobody,
                and has to end, see leanbench.measure.follower.

        Raises:
            UserError: that of the first rank with one; `refusal` is it then.
            MemoryError: a rank had no memory left; `refusal` is it then.
            GpuUnusable: another error, of any rank.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            is_told = isinstance(error, UserError) and not isinstance(error, GpuUnusable)
            if error is self.refusal or (waits and not is_told):
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
        """The error as other processes take it."""
        if isinstance(error, UserError):
            return type(error)(*error.args)
        kind = MemoryError if is_out_of_memory(error) else GpuUnusable
        return kind(f"rank {self.rank}: {first_line(what_broke(error))}")

    def layout(self, counts: GpuCounts) -> Layout:
        """Who has which heads and tokens, with the groups that exchange partials."""
        from leanbench.distributed.shards import Layout

        if counts not in self._layouts:
            self._layouts[counts] = Layout.make(*counts, timeout_s=_PEER_TIMEOUT_S)
        return self._layouts[counts]

    def barrier(self) -> None:
        """Until all ranks are here, and their GPUs idle."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()


def is_rank_lost(error: Exception) -> bool:
    """Whether gloo found that the process of another rank is gone."""
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and "Connection" in text


_control_group: list[Any] = []


def _control() -> Any:
    """The processes, through gloo: it waits without a GPU."""
    return _control_group[0]


def join(rank: int, size: int, port: int, device_index: int | None) -> Ranks:
    """Meets the other processes at a port of this machine.

    Args:
        device_index: of this rank's GPU; None: it has none, as in tests.
    """
    import torch
    import torch.distributed as dist

    # Multicast is not used on the machines that this runs on: see docs/distributed.md.
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
    """What processes find one another by; of the master with port 0, at a free one."""
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
    """Parts from the other processes."""
    import torch.distributed as dist

    _control_group.clear()
    dist.destroy_process_group()


class Gang:
    """The followers of this worker: processes for the other GPUs of a problem. A worker has them
    once: torch's symmetric memory knows process groups by their names for the life of a process,
    and torch gives the names of an earlier gang's to those of the next one.
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
        """A block in which this process waits for its followers, and ends where one does."""
        with self._lock:
            self._is_at_work = True
        try:
            yield
        finally:
            with self._lock:
                self._is_at_work = False

    def of(self, size: int, device_index: int, options: dict[str, Any]) -> Ranks:
        """This process's part among `size` ranks; the others are started where they are not there.

        Raises:
            UserError: this machine has fewer GPUs.
            SecondGang: others were started for another number of ranks, or one has ended.
        """
        if self.ranks is not None and self.ranks.size == size and not self._is_broken:
            return self.ranks
        devices = devices_for(size, device_index, _device_count())
        if self._store is not None:
            raise SecondGang(f"{size} ranks need a new process: this one has had its gang")
        port = self._open_store(size)
        for rank, device in enumerate(devices[1:], start=1):
            self._start(rank, size, port, device)
        self.ranks = join(0, size, port, device_index)
        self.ranks.from_first(options)
        return self.ranks

    def close(self) -> None:
        """Ends the followers, if there are any."""
        if self.ranks is None:
            return
        self._leaving.set()
        if self._is_broken:
            # Nobody waits for one that is gone.
            for follower in self._followers:
                follower.kill()
        else:
            self.ranks.from_first(None)
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
        """A follower in this process's group, so that what ends one ends the other."""
        words = [str(number) for number in (rank, size, port, device)]
        follower = subprocess.Popen(
            [sys.executable, "-P", "-m", "leanbench.measure.follower", *words],
            stdin=subprocess.DEVNULL,
        )
        self._followers.append(follower)
        watch = threading.Thread(target=self._watch, args=(rank, follower), daemon=True)
        watch.start()

    def _watch(self, rank: int, follower: subprocess.Popen[bytes]) -> None:
        """Ends this process where a follower ends while it is at work: it would wait for it for
        ever.
        """
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
    """The GPUs of `size` ranks, of `count` that there are: `first`, then the others in order.

    Raises:
        UserError: there are fewer.
    """
    if size > count:
        raise UserError(
            f"this problem is for {size} GPUs and {count} can be used here: choose fewer, or check"
            " CUDA_VISIBLE_DEVICES"
        )
    others = [index for index in range(count) if index != first]
    return [first, *others[: size - 1]]


def environment_of_ranks(size: int, first: int) -> dict[str, Any]:
    """Fields of the environment in which `size` ranks measure, or as many as there are GPUs;
    nothing of one.

    Args:
        first: the GPU of rank 0.
    """
    count = _device_count()
    devices = devices_for(min(size, count), first, count)
    return environment_of_several(devices) if len(devices) > 1 else {}


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()
