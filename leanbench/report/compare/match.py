"""Rows of two sides that belong together, and the fastest rows of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from leanbench.core.quantities import TIMED
from leanbench.report.compare.pair import Pair, make_pair

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row

#: The problem, then whatever else two rows of a pair share.
Key = TypeVar("Key", bound="tuple[AttentionProblem, *tuple[str, ...]]")
#: Raw samples in microseconds, by cell.
SamplesUs = Mapping[str, Sequence[float]]


def match(
    base: Mapping[Key, Row],
    new: Mapping[Key, Row],
    margin: float,
    samples: tuple[SamplesUs, SamplesUs] = ({}, {}),
) -> dict[Key, Pair]:
    """The pairs of the keys that both sides have, in base's order.

    Args:
        margin: relative difference that counts as none, 0.01 for 1%.
        samples: of base and new; without them each row's own interval stands in.
    """
    pairs = {}
    for key, row in base.items():
        if key in new:
            rows = row, new[key]
            of_rows = samples[0].get(row.cell, ()), samples[1].get(new[key].cell, ())
            pairs[key] = make_pair(key[0], rows, of_rows, margin)
    return pairs


def fastest(
    results: Iterable[tuple[Row, AttentionProblem]],
) -> dict[tuple[AttentionProblem, str], Row]:
    """The fastest timed row of each problem and kernel: a kernel that ran with several configs
    counts once.
    """
    rows: dict[tuple[AttentionProblem, str], Row] = {}
    for row, problem in results:
        if row.status in TIMED and row.latency_us is not None and row.latency_us > 0:
            best = rows.get((problem, row.kernel))
            if best is None or row.latency_us < (best.latency_us or 0):
                rows[problem, row.kernel] = row
    return rows
