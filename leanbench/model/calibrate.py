"""Calibration from measured runs: the fit, and the errors before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from leanbench.core import __version__
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import Calibration, InUse, RunErrors, calibration_for
from leanbench.model.check import check
from leanbench.model.constants import Constants, LeanCudaConstants
from leanbench.model.fit import FEWEST_ROWS, LEAN_CUDA, fit, fit_lean_cuda, known, split
from leanbench.model.lean_cuda import refusal
from leanbench.model.measured import MeasuredCell, MeasuredRun, read_measured

#: Minimum number of rows of a run whose half is held out.
_FEWEST_TO_SPLIT = 40


@dataclass(frozen=True)
class Fitted:
    """A calibration, with errors on the rows of each run."""

    calibration: Calibration
    #: Errors of the previous calibration, and of this one.
    before: tuple[RunErrors, ...]
    after: tuple[RunErrors, ...]


@dataclass(frozen=True)
class CellError:
    """Error of the predicted latency of one cell."""

    cell: MeasuredCell
    run: str
    #: Predicted over measured, minus one.
    error: float


def read_runs(runs: Sequence[str], gpu: str | None) -> list[MeasuredRun]:
    """Return the usable rows of runs of one GPU: `gpu`, or else the first run's.

    Raises:
        UserError: As `read_measured`, or the GPU is not in the catalogue.
    """
    wanted = None if gpu is None else find(gpu).name
    measured: list[MeasuredRun] = []
    for run in runs:
        measured.append(read_measured(run, wanted))
        wanted = measured[0].spec.name
    find(measured[0].spec.name)
    return measured


def starting_constants(spec: GpuSpec, in_use: InUse) -> Constants:
    """Return the start of a fit: the calibration in use, its idle power scaled to this GPU."""
    return replace(
        constants_in_use(spec, in_use), lean_cuda=in_use.constants.lean_cuda or LeanCudaConstants()
    )


def constants_in_use(spec: GpuSpec, in_use: InUse) -> Constants:
    """Return the constants of predictions for this GPU. Those of another GPU have a scaled idle
    power.
    """
    scale = spec.power_limit_w / find(in_use.calibration.gpu).power_limit_w
    return replace(in_use.constants, idle_power_w=in_use.constants.idle_power_w * scale)


def calibrate(
    runs: Sequence[MeasuredRun],
    checks: Sequence[MeasuredRun],
    workers: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    only_lean_cuda: bool = False,
) -> Fitted:
    """Fit to half of the shapes of each run. Compute the errors on the other half and on `checks`.

    Args:
        only_lean_cuda: Fit the constants of lean_cuda to its rows, and keep the other constants and
            their errors.

    Raises:
        UserError: Too few rows, a run that is both fitted and checked, or no calibration of this
            GPU whose constants could stay.
    """
    spec = runs[0].spec
    for twice in {run.name for run in runs} & {run.name for run in checks}:
        raise UserError(f"{twice} is among the runs to fit to and to check with: name it once")
    in_use = calibration_for(spec)
    if only_lean_cuda:
        if in_use.is_scaled:
            raise UserError(
                f"{spec.name} has no calibration of its own: fit all kernels to its runs first"
            )
        runs, checks = _of_lean_cuda(runs), _of_lean_cuda(checks)
    parts: list[tuple[MeasuredRun, str, list[MeasuredCell]]] = []
    for run in runs:
        fitted, held_out = (
            split(run) if len(run.cells) >= _FEWEST_TO_SPLIT else (list(run.cells), [])
        )
        parts += [(run, "fitted", fitted), (run, "checked", held_out)]
    parts += [(run, "checked", list(run.cells)) for run in checks]
    before = starting_constants(spec, in_use)
    to_fit = [cell for _, role, cells in parts if role == "fitted" for cell in cells]
    fit_to = fit_lean_cuda if only_lean_cuda else fit
    constants = fit_to(to_fit, spec, before, workers, on_progress)
    fits_lean_cuda = sum(cell.kernel in LEAN_CUDA for cell in to_fit) >= FEWEST_ROWS
    if not fits_lean_cuda:
        # Its constants stay if they are this GPU's own.
        own_constants = None if in_use.is_scaled else in_use.constants.lean_cuda
        constants = replace(constants, lean_cuda=own_constants)
    stay = [] if in_use.is_scaled else _that_stay(in_use, fits_lean_cuda, only_lean_cuda)
    parts = [(run, role, known(cells, constants)) for run, role, cells in parts]
    on_progress(f"Checking with {sum(len(cells) for _, _, cells in parts)} rows")

    def errors(of: Constants) -> tuple[RunErrors, ...]:
        return tuple(
            figures
            for run, role, cells in parts
            for figures, _ in check(run, cells, of, role, workers)
        )

    created = datetime.now(UTC).isoformat(timespec="seconds")
    after = errors(constants)
    calibration = Calibration(spec.name, constants, (*stay, *after), __version__, created)
    return Fitted(calibration, errors(before), after)


def _that_stay(in_use: InUse, fits_lean_cuda: bool, only_lean_cuda: bool) -> list[RunErrors]:
    """Return the errors of kernels whose constants a fit does not change."""
    runs = in_use.calibration.runs
    if only_lean_cuda:
        return [run for run in runs if LEAN_CUDA.isdisjoint(run.by_kernel)]
    return [] if fits_lean_cuda else [run for run in runs if {*run.by_kernel} <= LEAN_CUDA]


def _of_lean_cuda(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    return [
        replace(run, cells=tuple(cell for cell in run.cells if cell.kernel in LEAN_CUDA))
        for run in runs
    ]


def check_runs(
    runs: Sequence[MeasuredRun], constants: Constants, workers: int | None = None
) -> tuple[list[RunErrors], list[CellError]]:
    """Return the errors of these constants on measured runs, and of every cell's latency, worst
    first.

    Rows of kernels that the constants do not know are left out.

    Raises:
        UserError: No row is left.
    """
    of_runs, cells = [], []
    for run in runs:
        compared = known(run.cells, constants)
        for figures, errors in check(run, compared, constants, "checked", workers):
            of_runs.append(figures)
            if figures.quantity == "latency":
                cells += [
                    CellError(cell, run.name, error)
                    for cell, error in zip(compared, errors, strict=True)
                ]
    if not of_runs:
        raise UserError(refusal(runs[0].spec, constants) or "there is nothing to compare")
    return of_runs, sorted(cells, key=lambda cell: -abs(cell.error))
