"""Rows as OpenMetrics text: a gauge for every quantity that is a number, in base units, with the
time at which the row was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from leanbench.core.quantities import Kind, Quantity
from leanbench.records.row import QUANTITIES
from leanbench.report.command import axis_texts
from leanbench.report.frame import gpu_name

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Base units by units of quantities, and what a value is multiplied by.
BASE_UNITS = {
    "us": ("seconds", 1e-6),
    "s": ("seconds", 1.0),
    "tb_s": ("bytes_per_second", 1e12),
    "mj": ("joules", 1e-3),
    "mj_us": ("joule_seconds", 1e-9),
    "j": ("joules", 1.0),
    "w": ("watts", 1.0),
    "mhz": ("hertz", 1e6),
    "c": ("celsius", 1.0),
    "bytes": ("bytes", 1.0),
    "per_s": ("per_second", 1.0),
    "x": ("ratio", 1.0),
}
#: Metrics that would have another one's name.
_NAMES = {"sustained_s": "sustained_window_s"}
_RATIO: Kind = "share"
_WORDS: tuple[Kind, ...] = ("text", "outcome", "sentence", "command")


def openmetrics(runs: Sequence[Run]) -> str:
    """The text of all rows, metric by metric; a quantity that no row has is left out."""
    samples = [
        (row, _labels(row, problem, run), _seconds(row.time))
        for run in runs
        for row, problem in run.results
    ]
    # Those of the same labels stand together, the oldest first.
    samples.sort(key=lambda sample: sample[1:])
    lines: list[str] = []
    for quantity in QUANTITIES:
        if quantity.kind in _WORDS:
            continue
        name, unit, factor = metric_of(quantity)
        values = [
            f"{name}{labels} {value * factor:.10g} {seconds:.3f}"
            for row, labels, seconds in samples
            if (value := getattr(row, quantity.name)) is not None
        ]
        if values:
            lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else [])]
            lines += [f"# HELP {name} {_escaped(quantity.meaning)}"] if quantity.meaning else []
            lines += values
    return "\n".join([*lines, "# EOF", ""])


def metric_of(quantity: Quantity) -> tuple[str, str, float]:
    """Name, unit (empty: none) and factor of a quantity: leanbench_latency_seconds, seconds and
    1e-6.
    """
    unit, factor = BASE_UNITS.get(quantity.unit, ("", 1.0))
    name = _NAMES.get(quantity.name, quantity.name)
    if quantity.unit in BASE_UNITS:
        name = name.removesuffix(f"_{quantity.unit}")
    if quantity.kind == _RATIO:
        unit = "ratio"
    return f"leanbench_{name}{f'_{unit}' if unit else ''}", unit, factor


def _labels(row: Row, problem: AttentionProblem, run: Run) -> str:
    """What was measured, and on what; axes at their default have no label."""
    labels = {
        "run": run.name,
        "gpu": gpu_name(run.manifest, row.environment),
        "kernel": row.kernel,
        "source": row.source,
        "l2": row.cache,
        "status": row.status,
        **axis_texts(problem),
    }
    return _written(labels)


def _written(labels: Mapping[str, str]) -> str:
    own = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(own)}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _seconds(time: str) -> float:
    """Since 1970; a time that says no zone is UTC."""
    taken = datetime.fromisoformat(time)
    return (taken if taken.tzinfo else taken.replace(tzinfo=UTC)).timestamp()
