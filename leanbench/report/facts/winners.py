"""Which kernel is the fastest where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.compare.ratios import MEASURED, Margin
from leanbench.report.frame import kernel_order, latencies_by_kernel, where
from leanbench.report.series import narrower_words

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Winner:
    """Where one kernel is the fastest."""

    kernel: str
    #: Problems on which it is the fastest, or within the margin of it.
    near: int
    #: Those of them on which no other kernel is within the margin.
    alone: int
    #: Where those lie, as far as that says something: ``context 1k to 4k``.
    at: str


@dataclass(frozen=True)
class Winners:
    """The fastest kernels over the problems that several kernels ran."""

    problems: int
    #: Problems on which several kernels are the fastest within the margin.
    ties: int
    #: Most `near` first; all kernels that ran one of the problems.
    kernels: tuple[Winner, ...]


def winners(rows: DataFrame, margin: Margin = MEASURED) -> Winners | None:
    """Counts over the timed rows of one source, GPU and state of the L2; None where no problem has
    two kernels.
    """
    table = latencies_by_kernel(rows)
    table = where(table, table.notna().sum(axis=1) > 1).dropna(axis="columns", how="all")
    if table.empty:
        return None
    near = table.le(table.min(axis=1) * (1 + margin.share), axis=0)
    alone = where(near, near.sum(axis=1) == 1)
    compared = where(rows, rows["problem"].isin(_problems(table)))
    counted = []
    for kernel in kernel_order(rows):
        if kernel in table:
            labels = _problems(where(alone, alone[kernel]))
            at = narrower_words(where(compared, compared["problem"].isin(labels)), compared)
            counted.append(Winner(kernel, near[kernel].tolist().count(True), len(labels), at))
    counted.sort(key=lambda winner: (-winner.near, -winner.alone))
    return Winners(len(table), len(table) - len(alone), tuple(counted))


def _problems(table: DataFrame) -> list[str]:
    """The labels in the index of `latencies_by_kernel`."""
    return list(table.index.get_level_values("problem"))
