"""A pair of rows of the same cell, and the verdict on their medians.

The interval of new over base is Hodges and Lehmann's over the raw samples
(`leanbench.measure.timing`). A margin is added: between two processes a GPU's medians differ by
tenths of a percent, due to the addresses of buffers and the GPU's clock. Without samples, the rows'
own 95% intervals of the medians replace it: new low over base high to new high over base low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import TIMED, Quantity
from leanbench.measure.timing import FEWEST_FOR_RATIO, ratio_interval
from leanbench.records.row import QUANTITIES, Row
from leanbench.records.standing import Ratio, Standing, standing

#: Key of two rows of a pair: the problem, then whatever else they share.
Key = TypeVar("Key", bound="tuple[AttentionProblem, *tuple[str, ...]]")
#: Raw samples in microseconds, by cell.
SamplesUs = Mapping[str, Sequence[float]]
#: Quantities compared in addition to the latency.
COMPARED = tuple(quantity for quantity in QUANTITIES if quantity.compared)

#: `same`: the interval of the ratio lies within the margin. `slower`, `faster`: it lies beyond it.
#: Else `ambiguous`.
Verdict = Literal["slower", "ambiguous", "faster", "same"]
#: Verdicts on new, by the standing of base.
_VERDICTS: Mapping[Standing, Verdict] = {"ahead": "slower", "level": "same", "behind": "faster"}

#: Statuses with a meaningful latency.
_HAS_FIGURES = ("ok", "noisy", "suspect")


@dataclass(frozen=True)
class Pair:
    """One cell in both runs. Ratios are new over base: above 1 the new one is slower."""

    problem: AttentionProblem
    base: Row
    new: Row
    #: Ratio of the median latencies; None unless both rows have figures.
    ratio: float | None = None
    #: Its interval; None for predictions, and if a row has none.
    ratio_low: float | None = None
    ratio_high: float | None = None
    #: None unless both rows have figures.
    verdict: Verdict | None = None
    #: Reason why there is no verdict but `ambiguous`.
    reason: str | None = None
    #: False if samples are missing and the rows' own 95% intervals were used.
    from_samples: bool = False

    @property
    def kernels(self) -> str:
        """One name, or ``lean → fixed_split``."""
        same = self.base.kernel == self.new.kernel
        return self.base.kernel if same else f"{self.base.kernel} → {self.new.kernel}"

    @property
    def problem_label(self) -> str:
        """Label of the problem, with ``warm`` for a warm L2."""
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
        """True for a suspicious figure, for example if latency and cross-check disagree."""
        return any(row.warnings for row in (self.base, self.new))

    @property
    def broken(self) -> bool:
        """True if the cell no longer works."""
        return self.base.status in TIMED and self.new.status not in TIMED

    @property
    def mended(self) -> bool:
        """True if the cell works only in new."""
        return self.base.status not in TIMED and self.new.status in TIMED

    @property
    def both_ok(self) -> bool:
        """True if the pair may enter a statistic."""
        return self.ratio is not None and self.base.status == self.new.status == "ok"

    @property
    def latencies_us(self) -> tuple[float | None, float | None]:
        """Latencies of (base, new); None for a row without meaningful figures."""
        return _figure(self.base), _figure(self.new)

    def ratio_of(self, quantity: Quantity) -> float | None:
        """Divide a quantity, new over base; None unless both rows have it.

        Each is a single reading, so the ratio has no interval.
        """
        base, new = getattr(self.base, quantity.name), getattr(self.new, quantity.name)
        return new / base if self.ratio is not None and base and new else None


def match(
    base: Mapping[Key, Row],
    new: Mapping[Key, Row],
    margin: float,
    samples: tuple[SamplesUs, SamplesUs] = ({}, {}),
) -> dict[Key, Pair]:
    """Pair the rows of the keys that both sides have, in base's order; see `make_pair`."""
    pairs = {}
    for key, row in base.items():
        if key in new:
            samples_us = samples[0].get(row.cell, ()), samples[1].get(new[key].cell, ())
            pairs[key] = make_pair(key[0], (row, new[key]), samples_us, margin)
    return pairs


def make_pair(
    problem: AttentionProblem,
    rows: tuple[Row, Row],
    samples_us: tuple[Sequence[float], Sequence[float]],
    margin: float,
) -> Pair:
    """Pair (base, new) with a verdict.

    Args:
        samples_us: raw samples in microseconds of (base, new); empty if the run has none.
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
    # The samples are those of one process.
    from_samples = all(map(bool, samples_us)) and not base.processes and not new.processes
    interval = ratio_interval(*samples_us) if from_samples else _from_rows(base, new)
    if interval is None:
        reasons.append("a row has no interval, neither from samples nor of its own")
        return Pair(problem, base, new, ratio, verdict="ambiguous", reason="; ".join(reasons))
    reasons += _too_few(samples_us) if from_samples else []
    verdict = "ambiguous" if reasons else judge(*interval, margin)
    return Pair(
        problem, base, new, ratio, *interval, verdict, "; ".join(reasons) or None, from_samples
    )


def judge(ratio_low: float, ratio_high: float, margin: float) -> Verdict:
    """Return the verdict on an interval of new over base."""
    ends = map(Ratio.exactly, (ratio_low, ratio_high))
    at_ends: set[Standing] = {standing(end, margin) for end in ends}
    return _VERDICTS[at_ends.pop()] if len(at_ends) == 1 else "ambiguous"


def _figure(row: Row) -> float | None:
    return row.latency_us if row.status in _HAS_FIGURES else None


def _not_ok(rows: tuple[Row, Row]) -> list[str]:
    """List the statuses that are not ok, with their reasons."""
    endings = [f"({row.status}): {row.reason}" if row.reason else f"({row.status})" for row in rows]
    if rows[0].status != "ok" and endings[0] == endings[1]:
        return [f"both {endings[0]}"]
    return [
        f"{side} {text}"
        for side, row, text in zip(("base", "new"), rows, endings, strict=True)
        if row.status != "ok"
    ]


def _from_rows(base: Row, new: Row) -> tuple[float, float] | None:
    """Return the interval of new over base from the rows' own intervals of the medians."""
    base_low, base_high = base.latency_ci_low_us, base.latency_ci_high_us
    new_low, new_high = new.latency_ci_low_us, new.latency_ci_high_us
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
