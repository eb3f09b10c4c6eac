"""Fits the model's constants to measured rows; leanbench.model.check computes errors on others.

Rows are split by shape: all kernels of a shape, and all batches and head counts with the same
output tiles, are on one side. Half of the shapes are fitted to, one row for each kernel and config,
chosen by a hash and so the same every time. The read floor's constants come from the floors, the
others from the latencies (lean_cuda's from its rows, the others from all other rows), by least
squares of the logarithm of predicted over measured (a soft L1 loss, so that outliers weigh little).
A weak pull to the start keeps constants that the rows do not determine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.model.check import predictor
from leanbench.model.constants import Constants, LeanCudaConstants, names
from leanbench.model.measured import MeasuredCell, MeasuredRun
from leanbench.model.predict import energy_mj
from leanbench.model.rates import floor_us
from leanbench.model.simulate import latency_us

if TYPE_CHECKING:
    from collections.abc import Iterator

_Fitted = TypeVar("_Fitted", Constants, LeanCudaConstants)

#: Kernels of lean.cu, which has constants of its own.
LEAN_CUDA = frozenset({"lean_cuda", "fa2_cuda", "fixed_split_cuda"})
#: Maximum and minimum number of rows of a fit.
MOST_ROWS, FEWEST_ROWS = 300, 12
#: Schedules with more segments are too slow to evaluate.
_MOST_SEGMENTS = 2500
#: Errors beyond this weigh less than by their square.
_SOFT_ERROR = 0.03
#: Penalty for a change of a constant by a factor of e, as an error of every row in units of
#: `_SOFT_ERROR`. The floors determine their three constants well.
_PULL, _FLOOR_PULL = 0.1, 0.005
_MOST_EVALUATIONS = 12


def split(run: MeasuredRun) -> tuple[list[MeasuredCell], list[MeasuredCell]]:
    """Split cells into those to fit to and those to check with; deterministic, see the module."""
    fitted: dict[tuple[object, ...], MeasuredCell] = {}
    checked = []
    for cell in run.cells:
        if _hash(cell.shape) % 2:
            checked.append(cell)
        else:
            fitted.setdefault((cell.kernel, cell.config, *cell.shape), cell)
    return list(fitted.values()), checked


def sample(
    cells: Sequence[MeasuredCell], spec: GpuSpec, most: int = MOST_ROWS
) -> list[MeasuredCell]:
    """Return at most `most` quick cells, evenly by kernel, spread over the sizes."""
    quick = [cell for cell in cells if len(cell.schedule(spec).segments) <= _MOST_SEGMENTS]
    if len(quick) <= most:
        return quick
    by_kernel: dict[str, list[MeasuredCell]] = {}
    for cell in sorted(quick, key=lambda cell: (cell.problem.kv_bytes, _hash(cell.shape))):
        by_kernel.setdefault(cell.kernel, []).append(cell)
    per_kernel = most // len(by_kernel)
    chosen = []
    for group in by_kernel.values():
        count = min(per_kernel, len(group))
        chosen += [group[index * len(group) // count] for index in range(count)]
    return chosen


def fit(
    cells: Sequence[MeasuredCell],
    spec: GpuSpec,
    start: Constants,
    workers: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Constants:
    """Fit constants to these cells of one GPU, energy included if measured.

    Constants of kernels with too few cells stay as in `start`.

    Args:
        workers: Processes; one per core by default.
        on_progress: Called with a line about the progress.

    Raises:
        UserError: Too few cells.
    """
    of_lean_cuda = [cell for cell in cells if cell.kernel in LEAN_CUDA]
    rest = [cell for cell in cells if cell.kernel not in LEAN_CUDA]
    if max(len(of_lean_cuda), len(rest)) < FEWEST_ROWS:
        raise _too_few(len(cells))
    constants = _fit_floor(cells, spec, start)
    if len(rest) >= FEWEST_ROWS:
        constants = _fit_latency(rest, spec, constants, workers, on_progress)
    if len(of_lean_cuda) >= FEWEST_ROWS:
        constants = _fit_lean_cuda(of_lean_cuda, spec, constants, workers, on_progress)
    return _fit_energy(known(cells, constants), spec, constants)


def fit_lean_cuda(
    cells: Sequence[MeasuredCell],
    spec: GpuSpec,
    start: Constants,
    workers: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Constants:
    """Fit the constants of lean_cuda to its cells among these, the others stay as in `start`.

    Raises:
        UserError: Too few of them.
    """
    cells = [cell for cell in cells if cell.kernel in LEAN_CUDA]
    if len(cells) < FEWEST_ROWS:
        raise _too_few(len(cells))
    return _fit_lean_cuda(cells, spec, start, workers, on_progress)


def known(cells: Sequence[MeasuredCell], constants: Constants) -> list[MeasuredCell]:
    """Return the cells of kernels that these constants cover."""
    return [
        cell for cell in cells if cell.kernel not in LEAN_CUDA or constants.lean_cuda is not None
    ]


def _too_few(rows: int) -> UserError:
    return UserError(
        f"{rows} rows are too few to fit the model to, it needs {FEWEST_ROWS} of different shapes:"
        " name another run as well, for example of `leanbench sweep smoke`"
    )


def _fit_floor(cells: Sequence[MeasuredCell], spec: GpuSpec, start: Constants) -> Constants:
    floors = [(cell.problem.kv_bytes, cell.read_floor_us) for cell in cells if cell.read_floor_us]
    free = names(Constants, "floor")
    if len({read for read, _ in floors}) < len(free):
        return start

    def residuals(constants: Constants) -> list[float]:
        return [math.log(floor_us(read, spec, constants) / us) for read, us in floors]

    return _least_squares(residuals, free, start, _FLOOR_PULL * math.sqrt(len(floors)), most=200)


def _fit_latency(
    cells: Sequence[MeasuredCell],
    spec: GpuSpec,
    start: Constants,
    workers: int | None,
    on_progress: Callable[[str], None],
) -> Constants:
    chosen = sample(cells, spec)
    free = names(Constants, "latency")
    on_progress(f"Fitting {len(free)} constants to {len(chosen)} rows")
    with _log_errors(chosen, spec, workers) as residuals:
        return _least_squares(residuals, free, start, _PULL * math.sqrt(len(chosen)))


def _fit_lean_cuda(
    cells: Sequence[MeasuredCell],
    spec: GpuSpec,
    constants: Constants,
    workers: int | None,
    on_progress: Callable[[str], None],
) -> Constants:
    chosen = sample(cells, spec)
    free = names(LeanCudaConstants, "latency")
    on_progress(f"Fitting {len(free)} constants of lean_cuda to {len(chosen)} rows")
    start = constants.lean_cuda or LeanCudaConstants()
    with _log_errors(chosen, spec, workers) as errors:

        def residuals(candidate: LeanCudaConstants) -> list[float]:
            return errors(replace(constants, lean_cuda=candidate))

        candidate = _least_squares(residuals, free, start, _PULL * math.sqrt(len(chosen)))
    return replace(constants, lean_cuda=candidate)


@contextmanager
def _log_errors(
    cells: Sequence[MeasuredCell], spec: GpuSpec, workers: int | None
) -> Iterator[Callable[[Constants], list[float]]]:
    """Return a function that computes the logarithm of predicted over measured of every cell."""
    with predictor(cells, spec, workers) as predict:
        yield lambda constants: [
            math.log(us / cell.latency_us)
            for us, cell in zip(predict(constants), cells, strict=True)
        ]


def _least_squares(
    residuals: Callable[[_Fitted], list[float]],
    free: Sequence[str],
    start: _Fitted,
    pull: float,
    most: int | None = None,
) -> _Fitted:
    """Fit a factor to each free constant: none changes its sign, small and large ones move as
    easily.
    """
    import numpy as np
    from scipy.optimize import least_squares

    def at(steps: Any) -> _Fitted:
        # A factor beyond e^4 means nothing any more.
        factors = np.exp(np.clip(steps, -4, 4))
        moved = {
            name: float(getattr(start, name) * factor)
            for name, factor in zip(free, factors, strict=True)
        }
        return replace(start, **moved)

    solution = least_squares(
        lambda steps: np.concatenate([residuals(at(steps)), pull * _SOFT_ERROR * steps]),
        np.zeros(len(free)),
        loss="soft_l1",
        f_scale=_SOFT_ERROR,
        # Events change places with small steps: the play is smooth on this scale only.
        diff_step=1e-2,
        max_nfev=most or _MOST_EVALUATIONS,
    )
    return at(solution.x)


def _fit_energy(cells: Sequence[MeasuredCell], spec: GpuSpec, constants: Constants) -> Constants:
    figures = [
        (
            latency_us(cell.schedule(spec), cell.problem, cell.config, spec, constants=constants),
            cell.problem.kv_bytes,
            cell.running_sms(spec),
            cell.energy_mj,
            cell.idle_power_w,
            cell.sustained_power_w,
        )
        for cell in cells
        if cell.energy_mj and cell.idle_power_w and cell.sustained_power_w
    ]
    return fit_energy(figures, spec, constants)


def fit_energy(
    figures: Sequence[tuple[float, int, int, float, float, float]], spec: GpuSpec, start: Constants
) -> Constants:
    """Fit the constants of energy to rows of (latency_us, kv_bytes, running SMs, energy_mj, idle
    power, sustained power).

    The idle power is the rows' own. The cap is the highest power near the limit. An SM's power and
    a byte's energy follow by least squares with a pull to the start: runs in which all uncapped
    kernels use equally many SMs cannot separate them.
    """
    import numpy as np
    from scipy.optimize import least_squares

    if not figures:
        return start
    idle_w = float(np.median([idle for *_, idle, _ in figures]))
    capped_w = [power for *_, power in figures if power > 0.97 * spec.power_limit_w]
    cap = float(np.median(capped_w)) / spec.power_limit_w if capped_w else 1.0
    base = replace(start, idle_power_w=idle_w, power_cap_share=cap)

    def constants(steps: Sequence[float]) -> Constants:
        sm_w, byte_pj = start.sm_power_w * np.exp(steps[0]), start.byte_pj * np.exp(steps[1])
        return replace(base, sm_power_w=float(sm_w), byte_pj=float(byte_pj))

    def residuals(steps: Sequence[float]) -> list[float]:
        now = constants(steps)
        errors = [
            np.log(energy_mj(us, read, sms, spec, now, spec.power_limit_w) / measured)
            for us, read, sms, measured, _, _ in figures
        ]
        return [*errors, *(1e-3 * step for step in steps)]

    return constants(least_squares(residuals, [0.0, 0.0]).x)


def _hash(shape: tuple[object, ...]) -> int:
    """Hash a shape, equal in every process unlike `hash`."""
    return int.from_bytes(hashlib.sha256(repr(shape).encode()).digest()[:8], "big")
