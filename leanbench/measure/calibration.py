"""Calibration cell: one problem that is measured on every board before their rows are compared."""

from __future__ import annotations

from dataclasses import replace

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.measure.instruments import Instruments
from leanbench.measure.one_gpu import OneGpu
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem

#: 268 MB of K and V: bound by memory alone, and fast to allocate and check.
PROBLEM = AttentionProblem(8, 32, 8, 8192, 128)
KERNEL = "lean"


def calibrate(instruments: Instruments) -> float:
    """Measure the calibration cell with the heuristic's settings. Return microseconds.

    Raises:
        UserError: It could not be measured.
    """
    plain = replace(instruments, options=MeasureOptions())
    row = measure_problem(OneGpu(plain, PROBLEM), [kernel(KERNEL)], "heuristic")[KERNEL]
    if row["status"] not in ("ok", "noisy"):
        raise UserError(
            f"the calibration cell, {KERNEL} on {PROBLEM.label}, is {row['status']}"
            f" ({row.get('reason')}): run `leanbench check` on this machine"
        )
    return row["latency_us"]
