"""`leanbench check`: compare the kernels with the fp64 reference on this machine."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from leanbench.cli import output
from leanbench.cli.completion import kernel_names
from leanbench.cli.options import option, switch
from leanbench.core.errors import InvalidValue, OptionWithoutEffect, Reason, UserError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from leanbench.check.grid import CaseResult, CheckCase
    from leanbench.core.gpu_spec import GpuSpec
    from leanbench.gpu.local import Target

_DEFAULT_KERNELS = "lean,fa2,fixed_split"
#: Maximum size of a process pool on every system.
_MOST_JOBS = 1024


def check(
    kernels: Annotated[
        str,
        option(
            "--kernels",
            "LIST",
            "Kernels to check, separated by commas.",
            autocompletion=kernel_names,
        ),
    ] = _DEFAULT_KERNELS,
    jobs: Annotated[
        int,
        option(
            "--jobs",
            "N",
            "Processes; most of the time goes into compiling. 0: one per CPU, at most 12 (4"
            " in the interpreter).",
        ),
    ] = 0,
    fuzz: Annotated[
        int,
        option(
            "--fuzz",
            "N",
            "Check this many random problems instead of the grid; in the interpreter plain"
            " ones of up to 150 tokens.",
        ),
    ] = 0,
    seed: Annotated[
        int | None,
        option(
            "--seed",
            "N",
            "Seed of the random problems; inputs are drawn afresh whatever it is.",
            show_default="0",
        ),
    ] = None,
    limit: Annotated[int, option("--limit", "N", "Stop after this many problems; 0 runs all.")] = 0,
    interpreter: Annotated[
        bool, switch("--interpreter", "Use Triton's interpreter on the CPU even if there is a GPU.")
    ] = False,
) -> None:
    """Compare every kernel with the fp64 reference over a grid of problems: on the GPU, or in
    Triton's interpreter.

    Inputs are drawn afresh. Outputs are poisoned with NaN first, unused parts of the cache with
    NaN and infinities; lengths on the device may be below 0 or past the cache. Every problem runs
    twice: the bits must agree. Exits with 1 if anything is wrong, or a kernel supports none of the
    problems.
    """
    from leanbench.check.fuzz import MOST_CASES, fuzz_cases
    from leanbench.check.grid import gpu_cases, interpreter_cases
    from leanbench.check.interpreter import refuse_cuda, refuse_libraries, skipped_cuda
    from leanbench.configs.store import settings_hash
    from leanbench.core.registry import kernel
    from leanbench.core.syntax import check_seed, parse_names
    from leanbench.gpu.local import choose
    from leanbench.records.environment import kernels_hash

    names = parse_names("--kernels", kernels)
    for name in names:
        kernel(name)
    for flag, value, most, zero in (
        ("--limit", limit, None, "checks all problems"),
        ("--jobs", jobs, _MOST_JOBS, "uses the CPUs"),
        ("--fuzz", fuzz, MOST_CASES, "checks the grid"),
    ):
        if value < 0:
            raise InvalidValue(flag, value, Reason.BELOW_MINIMUM, f"0 {zero}", 0)
        if most is not None and value > most:
            raise InvalidValue(flag, value, Reason.ABOVE_MAXIMUM, "choose fewer", most)
    if seed is not None:
        check_seed("--seed", seed)
        if not fuzz:
            raise OptionWithoutEffect(f"--seed {seed}", "--fuzz", "the grid is fixed")
    output.say_kernel_warnings()
    target = choose(None, require_gpu=False)
    on_gpu = target.local_index is not None and not interpreter
    if fuzz:
        cases = fuzz_cases(fuzz, seed or 0, interpreted=not on_gpu)
    else:
        cases = gpu_cases() if on_gpu else interpreter_cases()
    if limit:
        cases = cases[:limit]
    if not on_gpu:
        refuse_cuda(names, *_why_no_gpu(target))
        # Triton reads it when a worker imports it.
        os.environ["TRITON_INTERPRET"] = "1"
        _check_interpreter()
    for name in names:
        if missing := kernel(name).unavailable_reason():
            raise UserError(missing)
    if not on_gpu:
        refuse_libraries(names, *_why_no_gpu(target))
    device = f"cuda:{target.local_index}" if on_gpu else "cpu"
    where = target.spec.product if on_gpu else "Triton's interpreter on the CPU"
    output.show(
        f"Checking {', '.join(names)} over {output.counted(len(cases), 'problem')} on {where},"
        f" kernels {kernels_hash()}, settings {settings_hash(target.spec)},"
        f" {datetime.now(UTC):%Y-%m-%d}"
    )
    if not on_gpu and (skipped := skipped_cuda(names)) is not None:
        output.show(skipped)
    jobs = jobs or max(1, min(12 if on_gpu else 4, os.cpu_count() or 1))
    results, checked, interrupt = _run(names, cases, target.spec, device, jobs)
    if interrupt is not None:
        if results:
            _print_summary(results, checked)
        output.say(f"{checked} of {output.counted(len(cases), 'problem')} checked.")
        raise interrupt
    ran = {result.kernel for result in results}
    unchecked = [name for name in names if name not in ran]
    if results:
        _print_summary(results, len(cases))
    more = "raise --limit" if limit else "raise --fuzz, or give another --seed" if fuzz else ""
    for name in unchecked:
        problems = "the only problem" if len(cases) == 1 else f"none of the {len(cases)} problems"
        cannot = "does not support" if len(cases) == 1 else "supports"
        output.show(
            f"{name} was not checked, it {cannot} {problems}: leave it out{more and f', or {more}'}"
        )
    if unchecked or any(result.failure for result in results):
        raise typer.Exit(1)


def _why_no_gpu(target: Target) -> tuple[str, str]:
    """Return why the interpreter runs, as a clause, and how to run on a GPU instead."""
    if target.local_index is None:
        return target.note or "there is none here", "use a machine with a GPU"
    return "--interpreter does without", "leave --interpreter out"


def _check_interpreter() -> None:
    """Reject Triton 3.6's interpreter with numpy 2.4: it relies on numbers from arrays."""
    from importlib.metadata import version

    def first_two(distribution: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version(distribution).split(".")[:2])

    if first_two("triton") < (3, 7) and first_two("numpy") >= (2, 4):
        raise UserError(
            f"Triton {version('triton')}'s interpreter does not work with numpy {version('numpy')}:"
            " install triton 3.7 or newer, or numpy below 2.4"
        )


def _run(
    names: tuple[str, ...], cases: list[CheckCase], gpu: GpuSpec, device: str, jobs: int
) -> tuple[list[CaseResult], int, KeyboardInterrupt | None]:
    """Return results, the number of checked cases, and the interrupt that ended the check.

    Raises:
        UserError: A process of the pool died.
    """
    import multiprocessing
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed

    from rich.progress import Progress

    from leanbench.check.grid import run_family
    from leanbench.compile.build import (
        begin_worker,
        ctrl_c_kept_from_children,
        kill_workers,
    )

    ordered = sorted(cases, key=lambda case: str(case.compiled_for))
    families = [
        list(group) for _, group in itertools.groupby(ordered, key=lambda case: case.compiled_for)
    ]
    console = output.console(stderr=True)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin_worker)
    running: dict[Future[list[CaseResult]], int] = {}
    interrupt = None
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("checking", total=len(cases))
            # This starts the processes.
            with ctrl_c_kept_from_children():
                for family in families:
                    future = pool.submit(run_family, names, family, gpu, device)
                    running[future] = len(family)
            for future in as_completed(running):
                future.result()
                progress.advance(task, running[future])
    except KeyboardInterrupt as error:
        # Print what is done.
        interrupt = error
    except BrokenExecutor:
        raise UserError(
            "a checking process died, perhaps for want of memory: repeat the command with fewer"
            " processes, as in --jobs 1"
        ) from None
    finally:
        done = {
            future: count
            for future, count in running.items()
            if future.done() and not future.cancelled() and future.exception() is None
        }
        if len(done) < len(running):
            kill_workers(others)
        pool.shutdown(cancel_futures=True)
    return [result for future in done for result in future.result()], sum(done.values()), interrupt


def _print_summary(results: list[CaseResult], problems: int) -> None:
    from leanbench.check.reference import RELATIVE_ERROR_LIMIT

    table = output.table(f"{output.counted(problems, 'problem')} against the fp64 reference")
    for column in ("kernel", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("problems", "worst relative error", "limit", "worst LSE error", "bit-identical"):
        table.add_column(column, justify="right")
    groups = sorted({(result.kernel, result.case.problem.dtype) for result in results})
    for name, dtype in groups:
        group = [
            result
            for result in results
            if (result.kernel, result.case.problem.dtype) == (name, dtype)
        ]
        lse_errors = [result.lse_error for result in group]
        table.add_row(
            name,
            dtype,
            str(len(group)),
            f"{max(result.relative_error for result in group):.2e}",
            f"{RELATIVE_ERROR_LIMIT[dtype]:.0e}",
            "-" if any(map(math.isnan, lse_errors)) else f"{max(lse_errors):.2e}",
            f"{sum(result.repeats for result in group)} of {len(group)}",
        )
    output.show_table(table)
    for name, ran in Counter(result.kernel for result in results).items():
        if ran < problems:
            output.show(f"{name} does not support {problems - ran} of the {problems} problems.")
    failures = [result for result in results if result.failure]
    for result in failures[:20]:
        output.show(f"FAILED {result.kernel} on {result.case.problem.label}: {result.failure}")
    passed = len(results) - len(failures)
    output.show(f"{passed} of {len(results)} passed" if failures else f"all {passed} passed")
