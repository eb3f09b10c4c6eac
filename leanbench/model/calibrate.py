"""From measured runs to a calibration: fit, and the errors before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.version import __version__
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import Calibration, InUse, RunErrors, calibration_for
from leanbench.model.constants import Constants
from leanbench.model.fit import check, fit, split
from leanbench.model.measured import MeasuredCell, MeasuredRun, read_measured

#: A run with fewer rows is fitted to as a whole: half of it would say little.
_FEWEST_TO_SPLIT = 40


@dataclass(frozen=True)
class Fitted:
    """A calibration, and the errors that the one in use before makes on the same rows."""

    calibration: Calibration
    before: tuple[RunErrors, ...]


@dataclass(frozen=True)
class CellError:
    """How far a prediction of one cell is from its measured latency."""

    cell: MeasuredCell
    run: str
    #: Predicted over measured, minus one.
    error: float


def read_runs(runs: Sequence[str], gpu: str | None) -> list[MeasuredRun]:
    """The usable rows of runs of one GPU: of `gpu`, or else of the first run's.

    Raises:
        UserError: see read_measured; the GPU is not in the catalogue.
    """
    wanted = None if gpu is None else find(gpu).name
    found: list[MeasuredRun] = []
    for run in runs:
        found.append(read_measured(run, wanted))
        wanted = found[0].spec.name
    find(found[0].spec.name)
    return found


def starting_constants(spec: GpuSpec, in_use: InUse) -> Constants:
    """Where a fit for this GPU starts: the calibration in use, its idle power scaled where it is
    another GPU's.
    """
    scale = spec.power_limit_w / find(in_use.calibration.gpu).power_limit_w
    return replace(in_use.constants, idle_power_w=in_use.constants.idle_power_w * scale)


def calibrate(
    runs: Sequence[MeasuredRun],
    checks: Sequence[MeasuredRun],
    workers: int | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Fits to half of the shapes of each run, and says how wrong that is on the other half and on
    `checks`.

    Raises:
        UserError: too few rows to fit to, or a run among the checks that is fitted to.
    """
    spec = runs[0].spec
    for twice in {run.name for run in runs} & {run.name for run in checks}:
        raise UserError(f"{twice} is among the runs to fit to and to check with: name it once")
    parts: list[tuple[MeasuredRun, str, list[MeasuredCell]]] = []
    for run in runs:
        fitted, held_out = (
            split(run) if len(run.cells) >= _FEWEST_TO_SPLIT else (list(run.cells), [])
        )
        parts += [(run, "fitted", fitted), (run, "checked", held_out)]
    parts += [(run, "checked", list(run.cells)) for run in checks]
    before = starting_constants(spec, calibration_for(spec))
    own = [cell for _, role, cells in parts if role == "fitted" for cell in cells]
    constants = fit(own, spec, before, workers, told)
    told(f"Checking with {sum(len(cells) for _, _, cells in parts)} rows")

    def errors(of: Constants) -> tuple[RunErrors, ...]:
        return tuple(
            figures
            for run, role, cells in parts
            for figures, _ in check(run, cells, of, role, workers)
        )

    created = datetime.now(UTC).isoformat(timespec="seconds")
    calibration = Calibration(spec.name, constants, errors(constants), __version__, created)
    return Fitted(calibration, errors(before))


def check_runs(
    runs: Sequence[MeasuredRun], constants: Constants, workers: int | None = None
) -> tuple[list[RunErrors], list[CellError]]:
    """Errors of these constants on measured runs, and those of every cell's latency, the worst
    first.
    """
    found, cells = [], []
    for run in runs:
        for figures, errors in check(run, run.cells, constants, "checked", workers):
            found.append(figures)
            if figures.quantity == "latency":
                cells += [
                    CellError(cell, run.name, error)
                    for cell, error in zip(run.cells, errors, strict=True)
                ]
    return found, sorted(cells, key=lambda one: -abs(one.error))
