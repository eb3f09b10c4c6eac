"""A pair of rows of the same cell, and whether their medians differ.

The interval of new over base is Hodges and Lehmann's over the raw samples
(`leanbench.measure.timing`). A margin is added to it, because between two processes a GPU's
medians differ by tenths of a percent for reasons that no sample within a process shows: where
buffers lie in memory, which clock the GPU settled on. Where a run has no samples, each row's own
95% interval of the median stands in, new low over base high to new high over base low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import TIMED, Quantity
from leanbench.measure.timing import FEWEST_FOR_RATIO, ratio_interval
from leanbench.records.row import QUANTITIES, Row

#: Compared as the latency is.
COMPARED = tuple(quantity for quantity in QUANTITIES if quantity.compared)

#: `same`: the interval of the ratio lies within the margin. `slower`, `faster`: it lies beyond it.
#: Else `ambiguous`.
Verdict = Literal["slower", "ambiguous", "faster", "same"]

#: The latency of any other row is none, or one of a wrong result.
_HAS_FIGURES = ("ok", "noisy", "suspect")
#: The kernel ran, was right, and its figures break no limit.
_WORKED = TIMED


@dataclass(frozen=True)
class Pair:
    """One cell in both runs. Ratios are new over base: above 1 the new one is slower."""

    problem: AttentionProblem
    base: Row
    new: Row
    #: Of the median latencies; null unless both rows have figures.
    ratio: float | None = None
    #: Its interval; null for predictions, and where a row has none.
    ratio_low: float | None = None
    ratio_high: float | None = None
    #: Null without figures on both sides.
    verdict: Verdict | None = None
    #: Why there is no verdict, or none but `ambiguous`.
    reason: str | None = None
    #: False: at least one row's own 95% interval stood in for samples that are missing.
    from_samples: bool = False

    @property
    def kernels(self) -> str:
        """One name, or ``lean → fixed_split``."""
        same = self.base.kernel == self.new.kernel
        return self.base.kernel if same else f"{self.base.kernel} → {self.new.kernel}"

    @property
    def problem_label(self) -> str:
        """The problem, and ``warm`` where the L2 was."""
        return self.problem.label + (" warm" if self.base.cache == "warm" else "")

    @property
    def label(self) -> str:
        return f"{self.kernels} · {self.problem_label}"

    @property
    def statuses(self) -> str:
        """``ok``, or ``ok → crashed``."""
        same = self.base.status == self.new.status
        return self.base.status if same else f"{self.base.status} → {self.new.status}"

    @property
    def has_warning(self) -> bool:
        """A row has one, such as that latency and cross-check disagree: the verdict stands beside
        a figure that may be wrong.
        """
        return any(row.warnings for row in (self.base, self.new))

    @property
    def broken(self) -> bool:
        """The cell worked and does so no longer."""
        return self.base.status in _WORKED and self.new.status not in _WORKED

    @property
    def mended(self) -> bool:
        """The cell did not work and does now."""
        return self.base.status not in _WORKED and self.new.status in _WORKED

    @property
    def both_ok(self) -> bool:
        """Whether the pair may enter a statistic."""
        return self.ratio is not None and self.base.status == self.new.status == "ok"

    @property
    def latencies_us(self) -> tuple[float | None, float | None]:
        """(base, new); null for a row whose figures mean nothing, as those of a wrong result."""
        return _figure(self.base), _figure(self.new)

    def ratio_of(self, quantity: Quantity) -> float | None:
        """Another quantity than the latency, new over base: a single reading each, so there is no
        interval; null unless both rows have one.
        """
        base, new = getattr(self.base, quantity.name), getattr(self.new, quantity.name)
        return new / base if self.ratio is not None and base and new else None


def make_pair(
    problem: AttentionProblem,
    rows: tuple[Row, Row],
    samples_us: tuple[Sequence[float], Sequence[float]],
    margin: float,
) -> Pair:
    """The pair of (base, new) with its verdict.

    Args:
        samples_us: raw samples in microseconds of (base, new); empty where the run has none.
        margin: relative difference that counts as none, 0.01 for 1%.
    """
    base, new = rows
    reasons = _not_ok(rows)
    reason = "; ".join(reasons) or None
    base_us, new_us = map(_figure, rows)
    if not base_us or not new_us:
        return Pair(problem, base, new, reason=reason or "a latency is missing")
    ratio = new_us / base_us
    if base.source == "predicted":
        return Pair(problem, base, new, ratio, verdict=judge(ratio, ratio, margin), reason=reason)
    from_samples = all(map(bool, samples_us))
    interval = ratio_interval(*samples_us) if from_samples else _from_rows(base, new)
    if interval is None:
        reasons.append("a row has no interval, neither from samples nor of its own")
        return Pair(problem, base, new, ratio, verdict="ambiguous", reason="; ".join(reasons))
    reasons += _too_few(samples_us)
    verdict = "ambiguous" if reasons else judge(*interval, margin)
    return Pair(
        problem, base, new, ratio, *interval, verdict, "; ".join(reasons) or None, from_samples
    )


def judge(ratio_low: float, ratio_high: float, margin: float) -> Verdict:
    """The verdict that an interval of new over base allows."""
    if ratio_low > 1 + margin:
        return "slower"
    if ratio_high < 1 - margin:
        return "faster"
    return "same" if 1 - margin <= ratio_low and ratio_high <= 1 + margin else "ambiguous"


def _figure(row: Row) -> float | None:
    return row.latency_us if row.status in _HAS_FIGURES else None


def _not_ok(rows: tuple[Row, Row]) -> list[str]:
    """Statuses of the rows that are not ok, with their reasons."""
    endings = [f"({row.status}): {row.reason}" if row.reason else f"({row.status})" for row in rows]
    if rows[0].status != "ok" and endings[0] == endings[1]:
        return [f"both {endings[0]}"]
    return [
        f"{side} {text}"
        for side, row, text in zip(("base", "new"), rows, endings, strict=True)
        if row.status != "ok"
    ]


def _from_rows(base: Row, new: Row) -> tuple[float, float] | None:
    """Of new over base, from the rows' own intervals of the medians."""
    ends = (
        base.latency_ci_low_us,
        base.latency_ci_high_us,
        new.latency_ci_low_us,
        new.latency_ci_high_us,
    )
    base_low, base_high, new_low, new_high = ends
    if not base_low or not base_high or not new_low or not new_high:
        return None
    ordered = 0 < base_low <= base_high and 0 < new_low <= new_high
    return (new_low / base_high, new_high / base_low) if ordered else None


def _too_few(samples_us: tuple[Sequence[float], Sequence[float]]) -> list[str]:
    return [
        f"{side} has {len(samples)} samples and an interval takes {FEWEST_FOR_RATIO}"
        for side, samples in zip(("base", "new"), samples_us, strict=True)
        if 0 < len(samples) < FEWEST_FOR_RATIO
    ]
