"""Errors of constants on measured cells, predicted on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from leanbench.core.gpu_spec import GpuSpec
from leanbench.model.calibration import RunErrors
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
    results = [(_run_errors(run, role, "latency", cells, errors, order), errors)]
    measured, errors = [], []
    for us, cell in zip(predicted, cells, strict=True):
        if cell.energy_mj:
            read, sms = cell.problem.kv_bytes, cell.running_sms(run.spec)
            energy = energy_mj(us, read, sms, run.spec, constants, run.spec.power_limit_w)
            measured.append(cell)
            errors.append(energy / cell.energy_mj - 1)
    if measured:
        results.append((_run_errors(run, role, "energy", measured, errors, (0, 0)), errors))
    return results


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
    figures = {kernel: errors_of(values) for kernel, values in sorted(by_kernel.items())}
    seen = sorted({feature for cell in cells for feature in features(cell.problem)})
    total, environment = errors_of(errors), run.environment
    return RunErrors(run.name, role, quantity, total, figures, *order, environment, tuple(seen))


#: Task of a worker process.
_cells: list[MeasuredCell] = []
_spec: list[GpuSpec] = []


def _take(cells: Sequence[MeasuredCell], spec: GpuSpec) -> None:
    _cells[:], _spec[:] = cells, [spec]


def _predict_some(task: tuple[Constants, int, int]) -> list[float]:
    constants, first, step = task
    return [_predict(cell, _spec[0], constants) for cell in _cells[first::step]]


def _predict(cell: MeasuredCell, spec: GpuSpec, constants: Constants) -> float:
    return latency_us(cell.schedule(spec), cell.problem, cell.config, spec, constants=constants)


@contextmanager
def predictor(
    cells: Sequence[MeasuredCell], spec: GpuSpec, workers: int | None
) -> Iterator[Callable[[Constants], list[float]]]:
    """Return a function that predicts all cells, on several cores if there are many cells."""
    workers = (os.cpu_count() or 1) if workers is None else workers
    if workers < 2 or len(cells) < 40:
        yield lambda constants: [_predict(cell, spec, constants) for cell in cells]
        return
    with ProcessPoolExecutor(workers, initializer=_take, initargs=(tuple(cells), spec)) as pool:

        def predict(constants: Constants) -> list[float]:
            predicted = [0.0] * len(cells)
            # More tasks than workers, so that slow ones are balanced.
            step = 4 * workers
            tasks = [(constants, first, step) for first in range(step)]
            for (_, first, _), part in zip(tasks, pool.map(_predict_some, tasks), strict=True):
                predicted[first::step] = part
            return predicted

        yield predict
