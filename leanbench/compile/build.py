"""Builds of kernels for a GPU that need not be here, many at once, and what a CTA of each takes.

Triton compiles without a GPU once a target is set, and puts the result into its cache: what is
compiled here for the GPU of this machine is found there by the first launch. So does
leanbench.compile.nvrtc with CUDA C++.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.kernel import LaunchResources
from leanbench.core.parent import STARTED_BY
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

#: Pools that are open: processes and semaphores that somebody must end.
open_pools: list[ProcessPoolExecutor] = []
#: Modules that a compiling process imports; tensors without memory take torch._dynamo along.
_COMPILING = ("torch", "torch._dynamo", "triton", "cuda.core.utils", "leanbench.compile.build")


@dataclass(frozen=True)
class Job:
    """One kernel with one config, compiled for the shapes and dtypes of one problem."""

    kernel: str
    problem: AttentionProblem
    config: TileConfig


@dataclass(frozen=True)
class Build:
    """What came of a job."""

    job: Job
    #: One per GPU kernel of the call, in the order of the launches; empty if it failed.
    resources: tuple[LaunchResources, ...] = ()
    #: The compiler's first sentence, where it failed.
    failure: str | None = None


@contextlib.contextmanager
def process_pool(
    workers: int | None = None, preload: Sequence[str] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that compile and compute, one per core by default.

    At the end, jobs that did not start are dropped. An exception also kills the running ones.

    Args:
        preload: Modules that jobs import, besides those of the compilers.
    """
    # Not fork: this process may hold a CUDA context. The server imports modules once, for all
    # workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leanbench.core.parent", *_COMPILING, *preload])
    with _environment_of_server(), ctrl_c_kept_from_children():
        forkserver.ensure_running()
    others = set(multiprocessing.active_children())
    pool = None
    try:
        with signals_held():
            pool = _Pool(workers or len(os.sched_getaffinity(0)), context)
            open_pools.append(pool)
        yield pool
        pool.shutdown(cancel_futures=True)
    except BaseException:
        kill_workers(others)
        if pool is not None:
            # Its thread is waited for: Python's own end, should it find the thread closing its
            # pipe, writes to that pipe and prints a traceback.
            pool.shutdown(cancel_futures=True)
        raise
    finally:
        if pool in open_pools:
            open_pools.remove(pool)


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """Start the server in this block: it learns which process started it."""
    # Triton's interpreter, where this process uses it, compiles nothing.
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[STARTED_BY]
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


class _Pool(ProcessPoolExecutor):
    """Pool that has all of its processes or none, whenever a signal comes. A half-started pool
    would have no owner.
    """

    def __init__(self, workers: int, context: ForkServerContext) -> None:
        super().__init__(workers, context, initializer=begin_worker)
        self._context = context
        self._is_served = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a job. The first call waits until the server has loaded its modules."""
        if not self._is_served:
            # For seconds, in which a signal is heeded: what it leaves behind is a process of which
            # no pool is a part, or no process.
            wait_for_server(self._context)
            self._is_served = True
        # This starts a process.
        with signals_held():
            return super().submit(fn, *args, **kwargs)


def wait_for_server(context: ForkServerContext) -> None:
    """Wait until the forkserver has loaded its modules and forks processes.

    Raises:
        BrokenExecutor: The server died.
    """
    # What it answers only then is a request for a process.
    process = context.Process(target=_nothing)
    try:
        process.start()
    except (EOFError, ConnectionError):
        raise BrokenExecutor("the server of the pool's processes died") from None
    process.join()


def _nothing() -> None:
    """Do nothing. The start of this process shows that the server works."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, as far as Python handles them.

    Handlers run in the main thread; other threads have nothing to wait for. A signal mask would not
    help: the system would give the signal to another thread, and the main thread would run the
    handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    try:
        with _held(signal.SIGINT, arrived), _held(signal.SIGTERM, arrived):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


@contextlib.contextmanager
def _held(number: int, arrived: list[int]) -> Iterator[None]:
    """Note the signal until the end of the block."""
    before = signal.getsignal(number)
    # None: a handler that Python does not know, and could not put back.
    if before in (None, signal.SIG_IGN):
        yield
        return
    try:
        signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        signal.signal(number, before)


def kill_workers(others: set[BaseProcess]) -> None:
    """Kill the children of this process except `others`.

    A pool that is shut down finishes every job that it handed out, one more than it has processes.
    """
    for child in set(multiprocessing.active_children()) - others:
        child.kill()


@contextlib.contextmanager
def ctrl_c_kept_from_children() -> Iterator[None]:
    """Hide Ctrl-C from processes started in this block, even while they load modules. This process
    gets it at the end.
    """
    # Starting the tracker ends with SIGINT let through: it has to be there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """End this process as soon as the owner of the pool is gone.

    A worker cannot notice otherwise: it holds both ends of the pool's pipes. The forkserver and the
    resource tracker end with the last worker.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def build_all(
    jobs: Sequence[Job],
    capability: tuple[int, int],
    pool: Executor,
    on_build: Callable[[Build], None] = lambda build: None,
) -> list[Build]:
    """Build all jobs for a compute capability. Return the builds in the jobs' order.

    Args:
        on_build: Called with each build as it finishes.

    Raises:
        UserError: A process of the pool died.
    """
    done: dict[int, Build] = {}
    try:
        futures = {pool.submit(build, job, capability): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            on_build(done[futures[future]])
    except BrokenExecutor:
        raise UserError(
            "a compiling process died, perhaps for want of memory: repeat the command, what was"
            " compiled is kept"
        ) from None
    return [done[index] for index in range(len(jobs))]


def build(job: Job, capability: tuple[int, int]) -> Build:
    """Compile one job in this process. A failure is in the result."""
    try:
        return Build(job, kernel(job.kernel).compile(job.problem, job.config, capability))
    except Exception as error:
        # Whatever the compiler stumbles over: the candidate is out, and its row says why.
        sentence = str(error).strip().partition("\n")[0]
        name = type(error).__name__
        return Build(job, failure=f"{name}: {sentence}" if sentence else name)
