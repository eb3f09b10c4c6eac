"""The calibration cell: one problem, measured alike on every board before its rows stand beside
another board's.
"""

from __future__ import annotations

from dataclasses import replace

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.measure.instruments import Instruments
from leanbench.measure.options import MeasureOptions
from leanbench.measure.protocol import measure_problem

#: 268 MB of K and V: bound by memory alone, and fast to allocate and check.
PROBLEM = AttentionProblem(8, 32, 8, 8192, 128)
KERNEL = "lean"


def calibrate(instruments: Instruments) -> float:
    """Latency of the calibration cell in microseconds, with the heuristic's settings.

    Raises:
        UserError: it could not be measured; the sentence says why.
    """
    plain = replace(instruments, options=MeasureOptions())
    row = measure_problem(plain, PROBLEM, [kernel(KERNEL)], "heuristic")[KERNEL]
    if row["status"] not in ("ok", "noisy"):
        raise UserError(
            f"the calibration cell, {KERNEL} on {PROBLEM.label}, is {row['status']}"
            f" ({row.get('reason')}): run `leanbench check` on this machine"
        )
    return row["latency_us"]
