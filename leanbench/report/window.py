"""Clocks and power over the seconds in which energy was measured, for pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.core.files import UnreadableFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pandas import DataFrame

    from leanbench.records.reading import Run

#: Maximum number of readings of a row that a page holds.
_MOST = 200


def add_window(frame: DataFrame, runs: Sequence[Run]) -> DataFrame:
    """Add the column `window`: (seconds, SM clock in MHz, power in W) of each reading; null without
    samples.

    Args:
        frame: Rows of these runs, in order.
    """
    from pandas import Series, concat

    windows = []
    for run in runs:
        by_cell = _windows(run)
        windows += [by_cell.get(row.cell) for row, _ in run.results]
    return concat([frame, Series(windows, frame.index, dtype=object, name="window")], axis=1)


def _windows(run: Run) -> dict[str, tuple[Any, ...]]:
    from leanbench.records.samples import read_samples

    if all(row.sustained_power_w is None for row, _ in run.results):
        return {}
    try:
        samples = read_samples(run.directory)
    except (ValueError, UnreadableFile):  # The page does without.
        return {}
    return {
        cell: tuple(each.window[:: -(-len(each.window) // _MOST)])
        for cell, each in samples.items()
        if each.window
    }
