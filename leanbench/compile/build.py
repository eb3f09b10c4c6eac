"""Parallel builds of kernels for any GPU, and the resources of a CTA of each.

Triton compiles without a GPU once a target is set. Builds for the GPU of this machine go to
Triton's cache, from which the first launch takes them. leanbench.compile.nvrtc does the same for
CUDA C++.
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
    ProcessPoolExecutor,
    as_completed,
)
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.kernel import LaunchResources
from leanbench.core.parent import STARTED_BY
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

#: Modules of a compiling process. Tensors without memory import torch._dynamo.
_COMPILING = ("torch", "torch._dynamo", "triton", "cuda.core.utils", "leanbench.compile.build")


@dataclass(frozen=True)
class Job:
    """One kernel with one config, compiled for the shapes and dtypes of one problem."""

    kernel: str
    problem: AttentionProblem
    config: KernelConfig


@dataclass(frozen=True)
class Build:
    """Result of a job."""

    job: Job
    #: Resources of each GPU kernel of the call, in launch order; empty if it failed.
    resources: tuple[LaunchResources, ...] = ()
    #: First sentence of the compiler if it failed.
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
    # Not fork: this process can hold a CUDA context. The server imports modules once for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leanbench.core.parent", *_COMPILING, *preload])
    with _environment_of_server(), ctrl_c_kept_from_children():
        forkserver.ensure_running()
    others = set(multiprocessing.active_children())
    workers = workers or len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(workers, context, begin_worker)
    try:
        yield pool
    except BaseException:
        kill_workers(others)
        raise
    finally:
        # Waits for its thread, which Python's exit would interrupt with a traceback.
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """Start the server in this block: it learns which process started it."""
    # Triton's interpreter, which this process can use, compiles nothing.
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[STARTED_BY]
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


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
    # The start of the tracker unblocks SIGINT: start it first.
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Build]:
    """Build all jobs for a compute capability. Return the builds in the jobs' order.

    Args:
        progress: Called with the finished builds and all, at the start and after each.

    Raises:
        UserError: A process of the pool died.
    """
    done: dict[int, Build] = {}
    progress(0, len(jobs))
    try:
        futures = {pool.submit(build, job, capability): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            progress(len(done), len(jobs))
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
