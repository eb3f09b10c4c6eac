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

from leanbench.compile.server import STARTED_BY
from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.kernel import LaunchResources
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

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
    """Processes that compile and compute, one for each core unless `workers` says otherwise; jobs
    that did not start are dropped at the end, and those that run are where an exception ends it.

    Args:
        preload: modules that jobs import, besides those that compiling does.
    """
    # Not fork: this process may hold a CUDA context. The server imports modules once, for all
    # workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leanbench.compile.server", *_COMPILING, *preload])
    with _environment_of_server(), ctrl_c_kept_from_children():
        forkserver.ensure_running()
    others = set(multiprocessing.active_children())
    pool = None
    try:
        with signals_held():
            pool = _Pool(workers or len(os.sched_getaffinity(0)), context)
        yield pool
        pool.shutdown(cancel_futures=True)
    except BaseException:
        kill_workers(others)
        if pool is not None:
            # Its thread is waited for: Python's own end, should it find the thread closing its
            # pipe, writes to that pipe and prints a traceback.
            pool.shutdown(cancel_futures=True)
        raise


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """A block in which the server is started: it knows who started it."""
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
    """A pool whose processes are there or were not asked for, whenever a signal comes: of one
    that was half started nobody would know.
    """

    def __init__(self, workers: int, context: ForkServerContext) -> None:
        super().__init__(workers, context, initializer=begin_worker)
        self._context = context
        self._is_served = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ever; the first one returns when the server has loaded its modules."""
        if not self._is_served:
            # For seconds, in which a signal is heeded: what it leaves behind is a process of which
            # no pool is a part, or no process.
            wait_for_server(self._context)
            self._is_served = True
        # This starts a process.
        with signals_held():
            return super().submit(fn, *args, **kwargs)


def wait_for_server(context: ForkServerContext) -> None:
    """Waits until the forkserver has loaded its modules and forks processes.

    Raises:
        BrokenExecutor: it died.
    """
    # What it answers only then is a request for a process.
    process = context.Process(target=_nothing)
    try:
        process.start()
    except (EOFError, ConnectionError):
        raise BrokenExecutor("the server of the pool's processes died") from None
    process.join()


def _nothing() -> None:
    """What a process does that is only asked for to see when it comes."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """A block in which Ctrl-C and SIGTERM wait for its end, as far as Python answers them: handlers
    run in the main thread, so that nothing waits in another.

    Not a mask: with another thread there the system gives it the signal, and the main thread runs
    the handler.
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
    """A block in which the signal is noted."""
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
    """Kills this process' children but `others`. A pool that is shut down goes on with each job
    that it has handed out, one more than it has processes, and waits for them.
    """
    for child in set(multiprocessing.active_children()) - others:
        child.kill()


@contextlib.contextmanager
def ctrl_c_kept_from_children() -> Iterator[None]:
    """A block whose new processes never see Ctrl-C, also while they load the modules that their
    initializer needs; this process sees it at the block's end.
    """
    # Starting the tracker ends with SIGINT let through: it has to be there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """Ctrl-C reaches every process of a terminal; this one's parent decides what becomes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """The end of this process, once the one that made the pool is gone, however it ended.

    Nothing else tells a worker: it holds both ends of the pool's pipes itself. The forkserver and
    the resource tracker end when no worker is left.
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
    """The builds of all jobs for a compute capability, in the jobs' order.

    Args:
        on_build: called with each build as it is finished.

    Raises:
        UserError: a process of the pool died.
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
    """The build of one job, compiled in this process; a failure is in the result."""
    try:
        return Build(job, kernel(job.kernel).compile(job.problem, job.config, capability))
    except Exception as error:
        # Whatever the compiler stumbles over: the candidate is out, and its row says why.
        sentence = str(error).strip().partition("\n")[0]
        name = type(error).__name__
        return Build(job, failure=f"{name}: {sentence}" if sentence else name)
