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

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row


def github_benchmark(runs: Sequence[Run]) -> str:
    """Render one object per row, in the rows' order.

    Raises:
        UserError: no row has a latency. The action fails on an empty list.
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
    """Describe a row's latency. The action compares results of the same name."""
    low, high = row.latency_ci_low_us, row.latency_ci_high_us
    interval = {} if low is None or high is None else {"range": f"± {(high - low) / 2:.3g}"}
    words = [row.kernel, problem.label]
    words += [row.source] if row.source != "measured" else []
    words += ["warm L2"] if row.cache == "warm" else []
    name = " · ".join(words)
    floor = row.read_floor_share
    extra = [
        run.gpu_name(row.environment),
        "" if floor is None else f"{floor:.0%} of the read floor",
        row.reason or "",
        sweep_command(row, problem, run),
    ]
    return {
        "name": f"{run.name}: {name}" if several else name,
        "unit": "us",
        "value": row.latency_us,
        **interval,
        "extra": "\n".join(filter(None, extra)),
    }
