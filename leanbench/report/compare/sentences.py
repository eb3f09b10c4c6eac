"""Statistics over the pairs of a comparison, and the sentences that every format shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leanbench.records.standing import Ratio
from leanbench.report.compare.core import counts
from leanbench.report.compare.flips import flips_of
from leanbench.report.compare.ratios import Ratios, ratios_of
from leanbench.report.warned import warned

if TYPE_CHECKING:
    from leanbench.core.quantities import Quantity
    from leanbench.report.compare.core import Comparison
    from leanbench.report.compare.pair import Pair

METHOD = (
    "Hodges and Lehmann's 95% interval of new over base from the raw samples, the one that belongs"
    " to the rank-sum test; no distribution is assumed"
)
#: Mark after the verdict of a cell with a warning.
WARNED = "!"
#: Explanation of the column `host_us`.
HOST = (
    "host: of lean its whole public call, of a library its own entry in Python, of kernels without"
    " a function for users, such as fa2 and fixed_split, a bare launch, which does less."
)
#: Maximum number of labels of cells without a partner.
NAMED = 3

_COUNTED = {"broken": "no longer ok", "mended": "ok again", "no verdict": "without a verdict"}


@dataclass(frozen=True)
class Statistics:
    """Ratios, new over base, of the pairs of one cache state that are `ok` on both sides."""

    cache: Literal["cold", "warm"]
    every: Ratios
    #: Pairs that are not `same`; None without any.
    changed: Ratios | None
    #: Median of |ratio - 1|.
    median_difference: float


def summarise(pairs: Sequence[Pair]) -> list[Statistics]:
    """Summarise the pairs of each cache state."""
    by_cache = []
    for cache in ("cold", "warm"):
        ok = [pair for pair in pairs if pair.both_ok and pair.base.cache == cache]
        if every := _ratios(ok):
            changed = _ratios([pair for pair in ok if pair.verdict != "same"])
            difference = statistics.median(abs(pair.ratio - 1) for pair in ok if pair.ratio)
            by_cache.append(Statistics(cache, every, changed, difference))
    return by_cache


def _ratios(pairs: Sequence[Pair]) -> Ratios | None:
    ratios = [Ratio.exactly(pair.ratio) for pair in pairs if pair.ratio]
    return ratios_of([pair.label for pair in pairs], ratios)


def worst_regression(pairs: Sequence[Pair]) -> Pair | None:
    """Return the pair with verdict `slower` and the highest ratio."""
    slower = [pair for pair in pairs if pair.verdict == "slower"]
    return max(slower, key=lambda pair: pair.ratio or 0.0, default=None)


def best_gain(pairs: Sequence[Pair]) -> Pair | None:
    """Return the pair with verdict `faster` and the lowest ratio."""
    faster = [pair for pair in pairs if pair.verdict == "faster"]
    return min(faster, key=lambda pair: pair.ratio or 0.0, default=None)


def counted(pairs: Sequence[Pair]) -> str:
    """Count the verdicts: ``12 cells: 2 slower, 10 same``."""
    parts = ", ".join(
        f"{count} {_COUNTED.get(name, name)}" for name, count in counts(pairs).items()
    )
    return f"{_many(len(pairs), 'cell')}: {parts}"


def sentences(comparison: Comparison) -> list[str]:
    """Describe statistics, extremes, cells without a partner, and the method."""
    return [
        *_statistics_lines(comparison),
        *_winner_lines(comparison),
        *_extreme_lines(comparison),
        *_unpaired_lines(comparison),
        *_method_lines(comparison),
    ]


def _statistics_lines(comparison: Comparison) -> Iterator[str]:
    by_cache = summarise(comparison.pairs)
    for of_cache in by_cache:
        cache = f" with a {of_cache.cache} cache" if len(by_cache) > 1 else ""
        every, changed = of_cache.every, of_cache.changed
        yield (
            f"New over base: geometric mean {every.geomean:.4f}x, median {_middle(every)}, over"
            f" {_many(every.problems, 'cell')}{cache} ok on both sides; median |difference|"
            f" {of_cache.median_difference:.2%}."
        )
        if changed is not None and changed.problems < every.problems:
            yield (
                f"Not the same{cache}: {_many(changed.problems, 'cell')}, geometric mean"
                f" {changed.geomean:.4f}x."
            )


def _winner_lines(comparison: Comparison) -> Iterator[str]:
    flips = flips_of(comparison)
    if flips is None:
        return
    own = " or ".join(flips.baseline)
    rival = "library" if flips.are_libraries else "other kernel"
    base, new = (
        ", ".join(f"{count} {name}" for name, count in of.items()) for of in (flips.base, flips.new)
    )
    yield (
        f"{own} against the fastest {rival}, {_many(flips.problems, 'problem')}:"
        f" {base} in base; {new} in new. From ahead to behind or back: {flips.by_standing}; by the"
        f" medians alone the winner changes on {flips.by_median}."
    )


def _middle(ratios: Ratios) -> str:
    """Format the median, with its interval over the cells if there is one."""
    if ratios.interval is None:
        return f"{ratios.median:.4f}x"
    low, high = ratios.interval
    return f"{ratios.median:.4f}x (95% interval {low:.4f} to {high:.4f})"


def _extreme_lines(comparison: Comparison) -> Iterator[str]:
    headings = ("Worst regression", "Best gain")
    if comparison.of_two_kernels:
        headings = ("Slowest against base", "Fastest against base")
    extremes = worst_regression(comparison.pairs), best_gain(comparison.pairs)
    for heading, pair in zip(headings, extremes, strict=True):
        if pair is not None:
            yield f"{heading}: {pair.label}, {change(pair)}."


def _unpaired_lines(comparison: Comparison) -> Iterator[str]:
    for side, labels in (
        (comparison.base, comparison.only_in_base),
        (comparison.new, comparison.only_in_new),
    ):
        if labels:
            more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
            yield (
                f"Only in {side.name}: {_many(len(labels), 'cell')},"
                f" {'; '.join(labels[:NAMED])}{more}."
            )


def _method_lines(comparison: Comparison) -> Iterator[str]:
    cells = _many(len(comparison.pairs), "cell")
    if comparison.other_settings:
        yield f"Launch settings differ in {comparison.other_settings} of {cells}."
    margin = comparison.margin.words
    if comparison.source == "predicted":
        yield (
            f"Predicted: medians alone are compared, within {margin} is the same; nothing was"
            " measured."
        )
        return
    yield (
        f"Same: the interval of new over base lies within ±{margin}; slower, faster: wholly"
        " beyond it."
    )
    yield f"Method: {METHOD}."
    if comparison.without_samples:
        yield (
            f"No raw samples for {comparison.without_samples} of {cells}: the rows' own 95%"
            " intervals stand in, so that the ratio's holds with 90%."
        )


def change(pair: Pair) -> str:
    """Describe a pair: ``10.00 → 12.00 µs, +20.00% (95% interval +19.10% to +20.80%)``."""
    confidence = "95%" if pair.from_samples else "90%"
    within = f" ({confidence} interval {interval(pair)})" if pair.ratio_low is not None else ""
    base_us, new_us = map(microseconds, pair.latencies_us)
    warning = "; a row has a warning" if pair.has_warning else ""
    return f"{base_us} → {new_us} µs, {difference(pair)}{within}{warning}"


def outcome(pair: Pair) -> str:
    """Return the verdict with the statuses that limit it, or ``ok → crashed``, and `WARNED`."""
    words = pair.statuses
    if pair.verdict is not None:
        words = pair.verdict if pair.statuses == "ok" else f"{pair.verdict} ({pair.statuses})"
    return f"{words} {WARNED}" if pair.has_warning else words


def warnings_words(pairs: Sequence[Pair]) -> str:
    """Explain `WARNED` in a table of these pairs; empty without warnings."""
    marked = [pair for pair in pairs if pair.has_warning]
    rows = [(row, "") for pair in marked for row in (pair.base, pair.new) if row.warnings]
    warnings = "; ".join(
        f"{of.kernel} ({_many(of.count, 'row')}): {'at worst, ' * of.varies}{of.sentence}"
        for of in warned(rows)
    )
    cells = _many(len(marked), "cell")
    return f"{WARNED} a row has a warning, in {cells}. {warnings}." if marked else ""


def microseconds(value: float | None) -> str:
    """Format with four digits, or all digits of a longer integer part."""
    if value is None:
        return "-"
    return f"{value:.{max(0, 4 - len(str(int(value))))}f}"


def difference(pair: Pair) -> str:
    """Format new over base as a signed percentage."""
    return "-" if pair.ratio is None else _percent(pair.ratio)


def difference_of(pair: Pair, quantity: Quantity) -> str:
    """Format a quantity, new over base, as a signed percentage; empty if not measured."""
    ratio = pair.ratio_of(quantity)
    return "" if ratio is None else f"{ratio - 1:+z.1%}"


def interval(pair: Pair) -> str:
    """Format the interval: ``+0.10% to +0.35%``; empty without one."""
    if pair.ratio_low is None or pair.ratio_high is None:
        return ""
    return f"{_percent(pair.ratio_low)} to {_percent(pair.ratio_high)}"


def _percent(ratio: float) -> str:
    # z: no minus before what rounds to zero.
    return f"{ratio - 1:+z.2%}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
