"""Builds of a sweep's cells, compiled on all cores before the first cell is measured."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

from leanbench.compile.build import Job, build_all, process_pool
from leanbench.configs.lookup import resolve
from leanbench.configs.signature import kind_of
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.parallel import NONE
from leanbench.core.registry import kernel as kernel_named
from leanbench.run.cells import Cell

#: Fewest builds for which processes that compile are started, which takes some seconds.
_LEAST_BUILDS = 8


def compile_cells(
    cells: Sequence[Cell],
    spec: GpuSpec,
    progress: Callable[[int, int], None],
    budget_s: float | None = None,
) -> None:
    """Compile the builds of many cells into the caches, for up to half of the sweep's budget.

    Failures are left to the cells.

    Args:
        progress: As in `leanbench.compile.build.build_all`.
    """
    jobs = jobs_of(cells, spec)
    if len(jobs) < _LEAST_BUILDS:
        return
    ends_at = math.inf if budget_s is None else time.monotonic() + budget_s / 2

    def go_on(done: int, total: int) -> None:
        progress(done, total)
        if done > 0 and time.monotonic() > ends_at:
            raise TimeoutError

    # A sweep goes on where a compiling process died.
    with contextlib.suppress(TimeoutError, UserError), process_pool() as pool:
        build_all(jobs, spec.compute_capability, pool, go_on)


def jobs_of(cells: Sequence[Cell], spec: GpuSpec) -> list[Job]:
    """Return a job for each build whose settings are known before anything is measured."""
    jobs: dict[tuple[object, ...], Job] = {}
    for cell in cells:
        kernel, problem = kernel_named(cell.kernel), cell.problem
        request = cell.override or kernel.config_choice or cell.configs
        if (
            request == "best"
            or problem.parallel != NONE
            or problem.whole_model is not None
            or kernel.unsupported_reason(problem) is not None
        ):
            continue
        try:
            config = resolve(kernel, problem, spec, request).config
        except UserError:
            continue
        build_key = getattr(config, "build_key", None)
        if config is not None and build_key is not None:
            key = kernel.name, kind_of(problem), build_key
            jobs.setdefault(key, Job(kernel.name, problem, config))
    return list(jobs.values())
