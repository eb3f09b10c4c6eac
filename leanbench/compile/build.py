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
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

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
    context.set_forkserver_preload([*_COMPILING, *preload])
    # Triton's interpreter, where this process uses it, compiles nothing.
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ctrl_c_kept_from_children():
            forkserver.ensure_running()
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers or len(os.sched_getaffinity(0)), context, initializer=begin_worker
    )
    try:
        yield pool
        pool.shutdown(cancel_futures=True)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        kill_workers(others)
        raise


def kill_workers(others: set[BaseProcess]) -> None:
    """Kills this process' children but `others`. A pool that is shut down goes on with each job
    that it has handed out, one more than it has processes, and Python's own end waits for them.
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
