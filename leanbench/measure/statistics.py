"""Confidence intervals from the order of samples: no distribution is assumed, but that samples are
independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the samples that enclose the true median with at least this confidence.

    How many of n independent samples lie below the true median is binomial with probability 1/2, so
    the k-th smallest and the k-th largest enclose it with a probability that can be counted: 1 - 2
    x (C(n,0) + ... + C(n,k-1)) / 2^n. The largest such k is taken (Conover, Practical Nonparametric
    Statistics, chapter 3). Of fewer than six samples even the extremes enclose it less often than
    95%; they are returned all the same.

    Args:
        samples: at least one finite number, in any order.
        confidence: above 0 and below 1.

    Returns:
        (low, high), in the unit of the samples; the median of the samples lies between them.

    Raises:
        ValueError: no samples, or a confidence that is none.
    """
    _check(confidence)
    if not samples:
        raise ValueError("an interval of the median takes at least one sample")
    ordered = sorted(samples)
    count = len(ordered)
    # Integers up to the one division: 2^count exceeds a float's range from 1024 samples on.
    tail, ways, dropped = 1, 1, 0
    while 2 * tail / 2**count <= 1 - confidence:
        dropped += 1
        ways = ways * (count - dropped + 1) // dropped
        tail += ways
    outside = max(0, dropped - 1)
    return ordered[outside], ordered[count - 1 - outside]


#: Samples on each side below which `ratio_interval` does not reach 95%.
FEWEST_FOR_RATIO = 4


def ratio_interval(
    base: Sequence[float], new: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Bounds of the ratio of `new` to `base`, with at least about this confidence.

    Hodges and Lehmann's interval, the one that belongs to the rank-sum test of Mann, Whitney and
    Wilcoxon, on the scale of ratios: of all ratios of a new to a base sample, the k-th smallest and
    the k-th largest, with k from the normal approximation of the rank sum (Hollander, Wolfe,
    Chicken, Nonparametric Statistical Methods, section 4.3). Of the distributions nothing is
    assumed but that they differ by a factor. Widened to hold the ratio of the medians, should that
    lie outside.

    Args:
        base: at least one number above 0, in any order; new: likewise.
        confidence: above 0 and below 1.

    Raises:
        ValueError: no samples on a side, or a confidence that is none.
    """
    _check(confidence)
    if not base or not new:
        raise ValueError("an interval of a ratio takes at least one sample on each side")
    ratios = sorted(later / earlier for later in new for earlier in base)
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    spread = math.sqrt(len(ratios) * (len(base) + len(new) + 1) / 12)
    outside = max(1, math.floor(len(ratios) / 2 - z * spread)) - 1
    of_medians = statistics.median(new) / statistics.median(base)
    return min(ratios[outside], of_medians), max(ratios[len(ratios) - 1 - outside], of_medians)


def _check(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not above 0 and below 1")
