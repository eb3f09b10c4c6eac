"""Parts of the latency of the baseline's rows, for a picture."""

from __future__ import annotations

from dataclasses import astuple
from itertools import accumulate
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.quantities import TIMED, Quantity
from leanbench.core.registry import kernels
from leanbench.model.parts import predict_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pandas import DataFrame

    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row


def _end(name: str) -> Quantity:
    return Quantity(f"{name}_end", name, "latency", "share", shown="data")


#: Ends of the parts of `leanbench.model.parts.Parts`, over the latency.
PARTS = tuple(map(_end, ("launch", "ramp", "read", "tail", "merge")))


def add_part_columns(frame: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """Add the columns `PARTS`; null for other rows than the baseline's, and where the model knows
    no parts.

    Args:
        frame: Rows of these runs, in order, with their baselines.
    """
    rows = [(run, *result) for run in runs for result in run.results]
    ends = [
        _ends(run, row, problem) if row.kernel == baseline else None
        for (run, row, problem), baseline in zip(rows, frame["baseline"], strict=True)
    ]
    columns = {
        quantity.name: [None if each is None else each[at] for each in ends]
        for at, quantity in enumerate(PARTS)
    }
    return frame.assign(**columns).astype(dict.fromkeys(columns, "float64"))


def _ends(run: Run, row: Row, problem: AttentionProblem) -> tuple[float, ...] | None:
    kernel, spec = kernels().get(row.kernel), gpu_of(run)
    if kernel is None or spec is None or row.config is None:
        return None
    if row.status not in TIMED or row.cache != "cold":
        return None
    try:
        parts = predict_parts(problem, kernel, kernel.read_config(row.config), spec)
    except UserError:  # settings of another version
        return None
    return None if parts is None else (*accumulate(astuple(parts.scaled(1.0))),)


def gpu_of(run: Run) -> GpuSpec | None:
    """Return the GPU of a run; None if its manifest has no whole one."""
    try:
        return GpuSpec.from_dict(run.manifest["gpu"])
    except (KeyError, TypeError, AttributeError, UserError):
        return None
