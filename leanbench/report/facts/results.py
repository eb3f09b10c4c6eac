"""Subject of a report: runs, their rows as a table, and the parts that figures never span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError, nearest
from leanbench.report.compare.ratios import MEASURED, Margin
from leanbench.report.facts.summary import Summary, rows_of, summaries
from leanbench.report.frame import gpu_name, results_frame
from leanbench.report.series import VaryingAxis, add_series_columns, short_labels, varying_axes

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.records.reading import Run


@dataclass(frozen=True)
class Part:
    """The rows of one run, source, GPU and state of the L2."""

    summary: Summary
    rows: DataFrame
    #: Of their problems, by label: only what distinguishes it.
    short: Mapping[str, str]
    #: What the run lacks, see `leanbench.records.reading.Run.unfinished`.
    unfinished: str = ""


@dataclass(frozen=True)
class Results:
    """Runs and what they hold."""

    runs: Sequence[Run]
    #: The kernel that the others are compared with; None for that of each part, see
    #: `leanbench.report.frame.baselines`.
    baseline: str | None = None

    def __post_init__(self) -> None:
        kernels = {row.kernel for run in self.runs for row, _ in run.results}
        if self.baseline is not None and kernels and self.baseline not in kernels:
            raise UserError(
                f"--baseline {self.baseline} is no kernel of these runs,"
                f" {nearest(self.baseline, kernels)}"
            )

    @cached_property
    def frame(self) -> DataFrame:
        """As `results_frame`, with the columns that tell series apart."""
        frame = results_frame(*self.runs, baseline=self.baseline)
        return add_series_columns(
            frame.assign(read_floor_tb_s=frame["kv_bytes"] / frame["read_floor_us"] * 1e-6)
        )

    @cached_property
    def axes(self) -> list[VaryingAxis]:
        """The axes that vary."""
        return varying_axes(self.frame)

    @cached_property
    def short(self) -> Mapping[str, str]:
        """Of all problems, by label: only what distinguishes it."""
        return short_labels(self.frame, self.axes)

    @cached_property
    def parts(self) -> list[Part]:
        """In the order of the rows."""
        parts = []
        unfinished = {run.name: run.unfinished for run in self.runs}
        for summary in summaries(self.frame):
            rows = rows_of(self.frame, summary)
            parts.append(
                Part(summary, rows, short_labels(rows, varying_axes(rows)), unfinished[summary.run])
            )
        return parts

    @property
    def margin(self) -> Margin:
        """The widest of the parts'."""
        margins = [part.summary.margin for part in self.parts]
        return max(margins, key=lambda margin: margin.share, default=MEASURED)

    @property
    def are_several(self) -> bool:
        """More runs than one."""
        return len(self.runs) > 1

    @cached_property
    def sources(self) -> list[str]:
        """`measured`, `predicted` or both; of runs without rows what the first is to hold."""
        return list(dict.fromkeys(self.frame["source"])) or [
            str(run.manifest.get("source", "measured")) for run in self.runs[:1]
        ]

    @cached_property
    def gpus(self) -> list[str]:
        """Products, each once."""
        return list(dict.fromkeys(self.frame["gpu"])) or [gpu_name(self.runs[0].manifest)]

    @cached_property
    def l2(self) -> str:
        """``warm L2``; empty for runs with a cold L2 alone, as in serving: they say nothing of
        it.
        """
        caches = sorted(set(self.frame["cache"]))
        return f"{' and '.join(caches)} L2" if "warm" in caches else ""
