"""Conclusion of a comparison: statistics over its pairs, and the sentences that every format
shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leanbench.report.compare.core import counts
from leanbench.report.compare.ratios import geomean
from leanbench.report.warned import warned

if TYPE_CHECKING:
    from leanbench.core.quantities import Quantity
    from leanbench.report.compare.core import Comparison
    from leanbench.report.compare.pair import Pair

METHOD = (
    "Hodges and Lehmann's 95% interval of new over base from the raw samples, the one that belongs"
    " to the rank-sum test; no distribution is assumed"
)
#: Behind the verdict of a cell one of whose rows has a warning.
WARNED = "!"
#: Of the column of that quantity.
HOST = (
    "host: of lean its whole public call, of a library its own entry in Python, of kernels without"
    " a function for users, such as fa2 and fixed_split, a bare launch, which does less."
)
#: Labels of cells without a partner that are named.
NAMED = 3

_COUNTED = {"broken": "no longer ok", "mended": "ok again", "no verdict": "without a verdict"}


@dataclass(frozen=True)
class Statistics:
    """Over the pairs of one cache state in which both rows are `ok`. Ratios are new over base."""

    cache: Literal["cold", "warm"]
    pairs: int
    geomean: float
    #: Pairs whose verdict is not `same`; the mean is null without any.
    changed: int
    changed_geomean: float | None
    #: Median of |ratio - 1|.
    median_difference: float


def summarise(pairs: Sequence[Pair]) -> list[Statistics]:
    """Statistics for each cache state that has pairs: a warm cache's figures are never mixed with a
    cold one's.
    """
    by_cache = []
    for cache in ("cold", "warm"):
        ok = [pair for pair in pairs if pair.both_ok and pair.base.cache == cache]
        ratios = _ratios(ok)
        if not ratios:
            continue
        changed = _ratios([pair for pair in ok if pair.verdict != "same"])
        difference = statistics.median(abs(ratio - 1) for ratio in ratios)
        mean = geomean(changed) if changed else None
        by_cache.append(
            Statistics(cache, len(ratios), geomean(ratios), len(changed), mean, difference)
        )
    return by_cache


def worst_regression(pairs: Sequence[Pair]) -> Pair | None:
    """The pair with verdict `slower` and the highest ratio."""
    return max(
        (pair for pair in pairs if pair.verdict == "slower"),
        key=lambda pair: pair.ratio or 0.0,
        default=None,
    )


def best_gain(pairs: Sequence[Pair]) -> Pair | None:
    """The pair with verdict `faster` and the lowest ratio."""
    return min(
        (pair for pair in pairs if pair.verdict == "faster"),
        key=lambda pair: pair.ratio or 0.0,
        default=None,
    )


def counted(pairs: Sequence[Pair]) -> str:
    """``12 cells: 2 slower, 10 same``."""
    parts = ", ".join(
        f"{count} {_COUNTED.get(name, name)}" for name, count in counts(pairs).items()
    )
    return f"{_many(len(pairs), 'cell')}: {parts}"


def sentences(comparison: Comparison) -> list[str]:
    """Statistics, the slowest and the fastest cell against base, cells without a partner, what
    verdicts rest on.
    """
    pairs = comparison.pairs
    by_cache = summarise(pairs)
    lines = [
        line for statistics in by_cache for line in _statistics_lines(statistics, len(by_cache) > 1)
    ]
    # Of two kernels neither came after the other.
    kernels = comparison.of_two_kernels
    headings = (
        ("Slowest against base", "Fastest against base")
        if kernels
        else ("Worst regression", "Best gain")
    )
    for heading, pair in zip(headings, (worst_regression(pairs), best_gain(pairs)), strict=True):
        if pair is not None:
            lines.append(f"{heading}: {pair.label}, {change(pair)}.")
    for side, labels in (
        (comparison.base, comparison.only_in_base),
        (comparison.new, comparison.only_in_new),
    ):
        if labels:
            more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
            lines.append(
                f"Only in {side.name}: {_many(len(labels), 'cell')},"
                f" {'; '.join(labels[:NAMED])}{more}."
            )
    if comparison.other_settings:
        lines.append(
            f"Launch settings differ in {comparison.other_settings} of {_many(len(pairs), 'cell')}."
        )
    return [*lines, *_basis(comparison)]


def change(pair: Pair) -> str:
    """``10.00 → 12.00 µs, +20.00% (95% interval +19.10% to +20.80%)``."""
    confidence = "95%" if pair.from_samples else "90%"
    within = f" ({confidence} interval {interval(pair)})" if pair.ratio_low is not None else ""
    base_us, new_us = map(microseconds, pair.latencies_us)
    warning = "; a row has a warning" if pair.has_warning else ""
    return f"{base_us} → {new_us} µs, {difference(pair)}{within}{warning}"


def outcome(pair: Pair) -> str:
    """The verdict, or ``ok → crashed``; with the statuses where they limit the verdict, and
    `WARNED`.
    """
    words = pair.statuses
    if pair.verdict is not None:
        words = pair.verdict if pair.statuses == "ok" else f"{pair.verdict} ({pair.statuses})"
    return f"{words} {WARNED}" if pair.has_warning else words


def warnings_words(pairs: Sequence[Pair]) -> str:
    """What `WARNED` means in a table of these pairs; empty where none has it."""
    marked = [pair for pair in pairs if pair.has_warning]
    rows = [row for pair in marked for row in (pair.base, pair.new) if row.warnings]
    told = "; ".join(
        f"{of.kernel} ({_many(of.count, 'row')}): {'at worst, ' * of.varies}{of.sentence}"
        for of in warned([row.model_dump() for row in rows])
    )
    cells = _many(len(marked), "cell")
    return f"{WARNED} a row has a warning, in {cells}. {told}." if marked else ""


def microseconds(value: float | None) -> str:
    """Four digits, more for what is long: an exponent says nothing in a table."""
    if value is None:
        return "-"
    return f"{value:.{max(0, 4 - len(str(int(value))))}f}"


def difference(pair: Pair) -> str:
    """New over base as a signed percentage."""
    return "-" if pair.ratio is None else _percent(pair.ratio)


def difference_of(pair: Pair, quantity: Quantity) -> str:
    """Another quantity, new over base, as a signed percentage; empty where not measured."""
    ratio = pair.ratio_of(quantity)
    # z: no minus before what rounds to zero.
    return "" if ratio is None else f"{ratio - 1:+z.1%}"


def interval(pair: Pair) -> str:
    """``+0.10% to +0.35%``; empty without one."""
    if pair.ratio_low is None or pair.ratio_high is None:
        return ""
    return f"{_percent(pair.ratio_low)} to {_percent(pair.ratio_high)}"


def _percent(ratio: float) -> str:
    # z: no minus before what rounds to zero.
    return f"{ratio - 1:+z.2%}"


def _statistics_lines(over: Statistics, several: bool) -> list[str]:
    """A line over all pairs; a second one where some are the same and some are not."""
    cache = f" with a {over.cache} cache" if several else ""
    lines = [
        f"New over base: geometric mean {over.geomean:.4f}x over"
        f" {_many(over.pairs, 'cell')}{cache} ok on both sides; median |difference|"
        f" {over.median_difference:.2%}."
    ]
    if over.changed_geomean is not None and over.changed < over.pairs:
        lines.append(
            f"Not the same{cache}: {_many(over.changed, 'cell')}, geometric mean"
            f" {over.changed_geomean:.4f}x."
        )
    return lines


def _basis(comparison: Comparison) -> list[str]:
    margin = comparison.margin.words
    if comparison.source == "predicted":
        return [
            f"Predicted: medians alone are compared, within {margin} is the same; nothing was"
            " measured."
        ]
    lines = [
        f"Same: the interval of new over base lies within ±{margin}; slower, faster: wholly"
        " beyond it."
    ]
    lines.append(f"Method: {METHOD}.")
    if comparison.without_samples:
        lines.append(
            f"No raw samples for {comparison.without_samples} of"
            f" {_many(len(comparison.pairs), 'cell')}: the rows' own 95% intervals stand in, so"
            " that the ratio's holds with 90%."
        )
    return lines


def _ratios(pairs: Sequence[Pair]) -> list[float]:
    return [pair.ratio for pair in pairs if pair.ratio is not None]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
