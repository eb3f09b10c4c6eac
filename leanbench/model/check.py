"""Errors of constants on measured cells, predicted on several cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from leanbench.core.gpu_spec import GpuSpec
from leanbench.model.calibration import Errors, RunErrors
from leanbench.model.constants import Constants
from leanbench.model.error import features
from leanbench.model.measured import MeasuredCell, MeasuredRun, errors_of, orders
from leanbench.model.predict import energy_mj
from leanbench.model.simulate import latency_us


def check(
    run: MeasuredRun,
    cells: Sequence[MeasuredCell],
    constants: Constants,
    role: str,
    workers: int | None = None,
) -> list[tuple[RunErrors, list[float]]]:
    """Return the errors on cells of a run, of latency and, if measured, energy, and every cell's
    signed error.
    """
    if not cells:
        return []
    with predictor(cells, run.spec, workers) as predict:
        predicted = predict(constants)
    errors = [us / cell.latency_us - 1 for us, cell in zip(predicted, cells, strict=True)]
    order = orders(cells, predicted)
    of_quantities = [(_run_errors(run, role, "latency", cells, errors, order), errors)]
    drawn = [(us, cell) for us, cell in zip(predicted, cells, strict=True) if cell.energy_mj]
    if drawn:
        limit_w = run.spec.power_limit_w
        energies = [
            energy_mj(
                us, cell.problem.kv_bytes, cell.running_sms(run.spec), run.spec, constants, limit_w
            )
            / (cell.energy_mj or math.nan)
            - 1
            for us, cell in drawn
        ]
        of_quantities.append(
            (
                _run_errors(run, role, "energy", [cell for _, cell in drawn], energies, (0, 0)),
                energies,
            )
        )
    return of_quantities


def _run_errors(
    run: MeasuredRun,
    role: Any,
    quantity: Any,
    cells: Sequence[MeasuredCell],
    errors: Sequence[float],
    order: tuple[int, int],
) -> RunErrors:
    by_kernel: dict[str, list[float]] = {}
    for cell, error in zip(cells, errors, strict=True):
        by_kernel.setdefault(cell.kernel, []).append(error)
    figures: dict[str, Errors] = {
        kernel: errors_of(own) for kernel, own in sorted(by_kernel.items())
    }
    seen = {feature for cell in cells for feature in features(cell.problem)}
    return RunErrors(
        run.name,
        role,
        quantity,
        errors_of(errors),
        figures,
        *order,
        run.environment,
        tuple(sorted(seen)),
    )


#: Task of a worker process.
_cells: list[MeasuredCell] = []
_spec: list[GpuSpec] = []


def _take(cells: Sequence[MeasuredCell], spec: GpuSpec) -> None:
    _cells[:], _spec[:] = cells, [spec]


def _predict_some(task: tuple[Constants, int, int]) -> list[float]:
    constants, first, step = task
    return [
        latency_us(
            cell.schedule(_spec[0]), cell.problem, cell.config, _spec[0], constants=constants
        )
        for cell in _cells[first::step]
    ]


@contextmanager
def predictor(
    cells: Sequence[MeasuredCell], spec: GpuSpec, workers: int | None
) -> Iterator[Callable[[Constants], list[float]]]:
    """Return a function that predicts all cells, on several cores if there are many cells."""
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers < 2 or len(cells) < 40:
        yield lambda constants: [
            latency_us(cell.schedule(spec), cell.problem, cell.config, spec, constants=constants)
            for cell in cells
        ]
        return
    with ProcessPoolExecutor(workers, initializer=_take, initargs=(tuple(cells), spec)) as pool:

        def predict(constants: Constants) -> list[float]:
            predicted = [0.0] * len(cells)
            # More tasks than workers, so that slow ones are balanced.
            step = 4 * workers
            tasks = [(constants, first, step) for first in range(step)]
            for (_, first, _), own in zip(tasks, pool.map(_predict_some, tasks), strict=True):
                predicted[first::step] = own
            return predicted

        yield predict
