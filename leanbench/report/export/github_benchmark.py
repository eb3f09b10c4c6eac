"""Latencies for the GitHub action `benchmark-action/github-action-benchmark`, its tool
`customSmallerIsBetter`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.quantities import TIMED
from leanbench.report.command import sweep_command
from leanbench.report.frame import gpu_name

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row


def github_benchmark(runs: Sequence[Run]) -> str:
    """A list of one object a row, in the rows' order.

    Raises:
        UserError: no row has a latency; the action fails on an empty list.
    """
    benchmarks = [
        _benchmark(row, problem, run, several=len(runs) > 1)
        for run in runs
        for row, problem in run.results
        if row.status in TIMED
    ]
    if not benchmarks:
        raise UserError(
            "no row of this run has a latency, so there is nothing for the GitHub action: choose"
            " another run"
        )
    return json.dumps(benchmarks, indent=2, ensure_ascii=False) + "\n"


def _benchmark(row: Row, problem: AttentionProblem, run: Run, several: bool) -> dict[str, Any]:
    """Latency in us; the name is what later results are compared by."""
    low, high = row.latency_ci_low_us, row.latency_ci_high_us
    interval = {} if low is None or high is None else {"range": f"± {(high - low) / 2:.3g}"}
    kinds = [row.source if row.source != "measured" else "", "warm L2" * (row.cache == "warm")]
    name = " · ".join([row.kernel, problem.label, *filter(None, kinds)])
    floor = row.read_floor_share
    extra = [
        gpu_name(run.manifest, row.environment),
        "" if floor is None else f"{floor:.0%} of the read floor",
        row.reason or "",
        sweep_command(row, problem, run.manifest),
    ]
    return {
        "name": f"{run.name}: {name}" if several else name,
        "unit": "us",
        "value": row.latency_us,
        **interval,
        "extra": "\n".join(filter(None, extra)),
    }
