"""One result from the results of several processes of the same cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leanbench.core.quantities import TIMED
from leanbench.measure.timing import median_interval
from leanbench.records.standing import spread_of_processes
from leanbench.run.problem_runner import CellResult


def of_processes(results: Sequence[CellResult]) -> CellResult:
    """Return the result of the process with the median latency (of two, the lower one).

    Its interval becomes one over processes, which includes its own. A result without a latency is
    the cell's: the kernel failed.
    """
    failed = next((each for each in results if each.row.status not in TIMED), None)
    if failed is not None:
        return failed
    latencies_us = [each.row.latency_us for each in results if each.row.latency_us is not None]
    ordered = sorted(results, key=lambda each: each.row.latency_us or 0.0)
    median = ordered[(len(ordered) - 1) // 2]
    row = median.row
    low, high = median_interval(latencies_us)
    noisy = next((each.row for each in [median, *results] if each.row.status == "noisy"), row)
    warnings = [warning for each in results for warning in each.row.warnings or ()]
    changed = {
        "latency_ci_low_us": min(low, row.latency_ci_low_us or low),
        "latency_ci_high_us": max(high, row.latency_ci_high_us or high),
        "processes": len(results),
        "process_spread": spread_of_processes(latencies_us),
        "status": noisy.status,
        "reason": noisy.reason,
        "warnings": list(dict.fromkeys(warnings)),
        "wall_s": round(sum(each.row.wall_s for each in results), 3),
    }
    samples = median.samples
    if samples is not None:
        samples = samples.model_copy(update={"processes_us": latencies_us})
    return replace(median, row=row.model_copy(update=changed), samples=samples)
