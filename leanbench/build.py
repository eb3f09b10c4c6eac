"""Compiles kernels for a GPU that need not be here, many at once, and says what a CTA of each takes.

Triton compiles without a GPU once it is told what to compile for, and keeps the result in its cache: what is compiled
here for the GPU of this machine is found there by the first launch. So does leanbench.nvrtc with CUDA C++.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from leanbench.cubin import cubin_resources
from leanbench.errors import UserError
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig, LaunchResources, kernel


@dataclass(frozen=True)
class Job:
    """One kernel with one config, compiled for the shapes and dtypes of one problem."""

    kernel: str
    problem: AttentionProblem
    config: KernelConfig


@dataclass(frozen=True)
class Build:
    """What came of a job."""

    job: Job
    #: One per GPU kernel of the call, in the order of the launches; empty if it failed.
    resources: tuple[LaunchResources, ...] = ()
    #: The compiler's first sentence, where it failed.
    failure: str | None = None


@contextlib.contextmanager
def process_pool(workers: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes that compile and compute, one for each core unless `workers` says otherwise; jobs that did not start
    are dropped at the end.
    """
    # Not fork: this process may hold a CUDA context. The server imports torch and triton once, for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "leanbench.build"])
    # Triton's interpreter, where this process uses it, compiles nothing.
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        forkserver.ensure_running()
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
    pool = ProcessPoolExecutor(workers or len(os.sched_getaffinity(0)), context, initializer=_leave_interrupts)
    wait = True
    try:
        yield pool
    except KeyboardInterrupt:
        # A kernel that compiles may take seconds more; the processes end by themselves.
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; this one's parent decides what becomes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def build_all(
    jobs: Sequence[Job],
    capability: tuple[int, int],
    pool: Executor,
    told: Callable[[Build], None] = lambda build: None,
) -> list[Build]:
    """Compiles all jobs for a compute capability; the results in the jobs' order.

    Args:
        told: called with each build as it is finished.

    Raises:
        UserError: a process of the pool died.
    """
    done: dict[int, Build] = {}
    try:
        futures = {pool.submit(build, job, capability): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            told(done[futures[future]])
    except BrokenExecutor:
        raise UserError(
            "a compiling process died, perhaps for want of memory: repeat the command, what was compiled is kept"
        ) from None
    return [done[index] for index in range(len(jobs))]


def build(job: Job, capability: tuple[int, int]) -> Build:
    """Compiles one job in this process."""
    try:
        if job.config.implementation == "cuda":
            return Build(job, (_cuda_resources(job, capability),))
        with _target(capability):
            launches = _launches(job)
            return Build(job, tuple(_resources(launch) for launch in launches))
    except Exception as error:
        # Whatever the compiler stumbles over: the candidate is out, and its row says why.
        said = str(error).strip().partition("\n")[0]
        return Build(job, failure=f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _launches(job: Job) -> tuple[Any, ...]:
    from leanbench.kernels.launch import TritonKernel  # pyright: ignore[reportMissingImports]

    found: Any = kernel(job.kernel).implementation_of(job.config)
    if not isinstance(found, TritonKernel):
        raise TypeError(f"{job.kernel} is not compiled by Triton")
    return found.launches(shape_only(job.problem), job.config)


def _cuda_resources(job: Job, capability: tuple[int, int]) -> LaunchResources:
    from leanbench.nvrtc import compile_cuda

    found: Any = kernel(job.kernel).implementation_of(job.config)
    if not hasattr(found, "cuda_source"):
        raise TypeError(f"{job.kernel} has no CUDA C++")
    binary = compile_cuda(found.cuda_source(job.problem, job.config, capability))
    return found.cuda_resources(job.problem, job.config, binary)


def shape_only(problem: AttentionProblem) -> Any:
    """Inputs of a problem without memory behind them: shapes, strides and dtypes are what a compiler asks for."""
    import torch

    from leanbench.inputs import cache_shape, deal_pages, inputs_over, query_shape, torch_dtype

    shapes = query_shape(problem), cache_shape(problem), cache_shape(problem)
    q, k_cache, v_cache = (torch.empty(shape, dtype=torch_dtype(problem.dtype), device="meta") for shape in shapes)
    return inputs_over(problem, q, k_cache, v_cache, deal_pages(problem, "meta"))


def _resources(launch: Any) -> LaunchResources:
    compiled = launch.function.warmup(*launch.arguments, grid=(launch.grid,), **launch.options)
    if compiled is None:
        raise RuntimeError("TRITON_INTERPRET=1 is set, so nothing is compiled: unset it")
    taken = cubin_resources(compiled.asm["cubin"], compiled.metadata.name)
    return LaunchResources(
        launch=launch.function.__name__,
        ctas=launch.grid,
        num_warps=compiled.metadata.num_warps,
        registers_per_thread=taken.registers_per_thread,
        shared_bytes=compiled.metadata.shared,
        spilled_registers=taken.spilled_registers,
    )


@contextlib.contextmanager
def _target(capability: tuple[int, int]) -> Iterator[None]:
    """Triton compiles for this compute capability, whatever GPU is here or not."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # None: not looked for yet, and where there is no GPU there is none to find.
    before: Any = driver._active
    pretended: Any = _Pretended(GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    driver.set_active(pretended)
    try:
        yield
    finally:
        driver.set_active(before)


class _Pretended:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device: one of its own for each architecture, none that exists.
        return -int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0
