"""Measured rows to fit a model to or check it with, and errors of predictions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernels
from leanbench.model.calibration import Errors
from leanbench.model.predict import AXES
from leanbench.records.reading import find_run, read_run
from leanbench.records.row import Row

#: Kernels that differ by less have no order worth predicting.
ORDER_MARGIN = 0.05
#: Axes in a cell's shape, or without effect on the work of a kernel.
_IN_SHAPE = ("lengths", "q_len", "dtype", "kv_layout")


@dataclass(frozen=True)
class MeasuredCell:
    """One measured row, with the config that ran."""

    #: Implementation that ran: `lean_cuda`, not `lean`.
    kernel: str
    problem: AttentionProblem
    config: TileConfig
    latency_us: float
    read_floor_us: float | None
    energy_mj: float | None
    idle_power_w: float | None
    sustained_power_w: float | None

    def schedule(self, spec: GpuSpec) -> Schedule:
        """Return the schedule. Only kernels with a schedule become cells."""
        schedule = kernels()[self.kernel].schedule(self.problem, self.config, spec)
        assert schedule is not None
        return schedule

    @property
    def shape(self) -> tuple[object, ...]:
        """Key of cells in which every kernel does the same work: batch and KV heads count by their
        product.
        """
        problem = self.problem
        contexts = problem.contexts if problem.is_ragged else problem.context
        tiles = problem.kv_heads if problem.is_ragged else problem.batch * problem.kv_heads
        # Defaults are left out: the shape splits the cells of older runs in halves.
        more = [problem.special[name] for name in problem.special if name not in _IN_SHAPE]
        return tiles, contexts, problem.head_dim, problem.group_size, problem.q_len, *more

    def running_sms(self, spec: GpuSpec) -> int:
        """Return the number of SMs that run a CTA of this cell."""
        return self.schedule(spec).running_sms(spec.sms)


@dataclass(frozen=True)
class MeasuredRun:
    """Usable rows of one run: status ok, cold cache, a kernel with a schedule."""

    name: str
    spec: GpuSpec
    cells: tuple[MeasuredCell, ...]
    environment: dict[str, str]


def read_measured(run: str, gpu: str | None = None) -> MeasuredRun:
    """Return the usable rows of a run (a path, or a name under `runs/`).

    Args:
        gpu: Required GPU (catalogue name).

    Raises:
        UserError: The run was predicted, is of another GPU, or has no usable row.
    """
    directory = find_run(run)
    content = read_run(directory)
    name = directory.resolve().name
    if content.manifest.get("source") == "predicted" or any(
        row.source == "predicted" for row, _ in content.results
    ):
        raise UserError(
            f"{run} was predicted by the model itself: name a run that was measured on a GPU"
        )
    try:
        spec = GpuSpec.from_dict(content.manifest["gpu"])
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f"{directory}/manifest.json does not say which GPU was measured: name another run"
        ) from None
    if gpu is not None and spec.name != gpu:
        raise UserError(
            f"{run} was measured on {spec.name}, not on {gpu}: a model holds for one GPU, leave"
            " this run out"
        )
    cells = tuple(
        cell for row, problem in content.results if (cell := _cell(row, problem, spec)) is not None
    )
    if not cells:
        raise UserError(
            f"{run} has no row to compare with: none is ok, cold and of a kernel whose schedule is"
            f" known ({len(content.results)} rows)"
        )
    return MeasuredRun(name, spec, cells, _environment(content.manifest))


def _cell(row: object, problem: AttentionProblem, spec: GpuSpec) -> MeasuredCell | None:
    assert isinstance(row, Row)
    if row.status != "ok" or row.cache != "cold" or row.config is None or not row.latency_us:
        return None
    kernel = kernels().get(row.kernel)
    if kernel is None or problem.special.keys() - AXES:
        return None
    try:
        config = kernel.read_config(row.config)
    except UserError:  # a setting of another version
        return None
    if not isinstance(config, TileConfig) or kernel.schedule(problem, config, spec) is None:
        return None
    return MeasuredCell(
        kernel=kernel.implementation_of(config).name,
        problem=problem,
        config=config,
        latency_us=row.latency_us,
        read_floor_us=row.read_floor_us,
        energy_mj=row.energy_mj,
        idle_power_w=row.idle_power_w,
        sustained_power_w=row.sustained_power_w,
    )


def _environment(manifest: dict[str, object]) -> dict[str, str]:
    environments = manifest.get("environments")
    known = (
        [values for values in environments.values() if isinstance(values, dict)]
        if isinstance(environments, dict)
        else []
    )
    fields = {
        "gpu": "gpu_uuid",
        "torch": "torch",
        "triton": "triton",
        "driver": "driver",
        "leanbench": "leanbench",
    }
    return {
        key: ", ".join(sorted({str(values[name]) for values in known if name in values}))
        for key, name in fields.items()
    }


def errors_of(errors: Iterable[float]) -> Errors:
    """Return statistics of signed relative errors."""
    sizes = sorted(abs(error) for error in errors)
    if len(sizes) < 2:
        return Errors(len(sizes), *(sizes * 3 or [0.0, 0.0, 0.0]))
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
    return Errors(len(sizes), statistics.median(sizes), p90, sizes[-1])


def orders(cells: Sequence[MeasuredCell], predicted_us: Sequence[float]) -> tuple[int, int]:
    """Return the number of kernel pairs of a problem that differ by more than `ORDER_MARGIN`, and
    how many are predicted in order.
    """
    by_problem: dict[AttentionProblem, list[tuple[float, float]]] = {}
    for cell, us in zip(cells, predicted_us, strict=True):
        by_problem.setdefault(cell.problem, []).append((cell.latency_us, us))
    pairs = right = 0
    for figures in by_problem.values():
        for (first_us, first), (second_us, second) in combinations(figures, 2):
            if max(first_us, second_us) > (1 + ORDER_MARGIN) * min(first_us, second_us):
                pairs += 1
                right += (first < second) == (first_us < second_us)
    return pairs, right
