"""Intervals of the median and of a ratio: exact coverage, and properties for any samples."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.measure.timing import FEWEST_FOR_RATIO, median_interval, ratio_interval

#: Minimum number of samples with extremes that enclose the median at this confidence: the first n
#: with 2 / 2^n at most 1 - confidence.
FEWEST = {0.5: 2, 0.9: 5, 0.95: 6, 0.975: 7, 0.99: 8}
SAMPLES = st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=80)
CONFIDENCES = st.floats(min_value=0.01, max_value=0.999)


def exact_coverage(count: int, confidence: float) -> float:
    """Return the probability that 1 + low to high samples are below the true median."""
    low, high = median_interval(range(count), confidence)
    return sum(math.comb(count, below) for below in range(int(low) + 1, int(high) + 1)) / 2**count


@pytest.mark.parametrize(
    ("count", "confidence", "expected"),
    [
        (1, 0.95, (1, 1)),
        (3, 0.95, (1, 3)),
        (10, 0.975, (2, 9)),
        (60, 0.975, (21, 40)),
        (4, 0.3, (2, 3)),
    ],
)
def test_the_interval_is_two_of_the_samples(count, confidence, expected):
    shuffled = random.Random(count).sample(range(1, count + 1), count)
    assert median_interval(shuffled, confidence) == expected


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.975, 0.99])
def test_coverage_is_at_least_nominal_and_no_wider_than_needed(confidence):
    for count in range(FEWEST[confidence], 80):
        assert exact_coverage(count, confidence) >= confidence
        low, high = median_interval(range(count), confidence)
        if high - low >= 2:
            narrower = (
                sum(math.comb(count, below) for below in range(int(low) + 2, int(high))) / 2**count
            )
            assert narrower < confidence


@given(SAMPLES, CONFIDENCES)
def test_contains_the_median(samples, confidence):
    low, high = median_interval(samples, confidence)
    assert low <= statistics.median(samples) <= high
    assert {low, high} <= set(samples)


@given(SAMPLES, CONFIDENCES, CONFIDENCES)
def test_more_confidence_is_never_narrower(samples, first, second):
    less, more = sorted((first, second))
    low, high = median_interval(samples, less)
    wider_low, wider_high = median_interval(samples, more)
    assert wider_low <= low <= high <= wider_high


def test_thousands_of_samples():
    # 4000 / 2 -+ 1.96 sqrt(4000) / 2 = 1938 and 2062.
    low, high = median_interval(range(4000))
    assert (low, high) == (pytest.approx(1937, abs=1), pytest.approx(2062, abs=1))


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, -0.5, math.nan])
def test_a_confidence_that_is_none(confidence):
    with pytest.raises(ValueError, match=r"is not above 0 and below 1"):
        median_interval([1.0], confidence)
    with pytest.raises(ValueError, match=r"is not above 0 and below 1"):
        ratio_interval([1.0], [1.0], confidence)


def test_a_ratio_interval_by_hand():
    # 16 ratios; 8 - 1.96 sqrt(16 x 9 / 12) = 1.2: the extremes.
    assert ratio_interval([1.0, 2.0, 4.0, 8.0], [16.0, 16.0, 16.0, 16.0]) == (2.0, 16.0)
    # 100 ratios; 50 - 1.96 sqrt(100 x 21 / 12) = 24.07: the 24th from either end.
    base_us, new_us = [100.0 + i for i in range(10)], [200.0 + 2 * i for i in range(10)]
    ratios = sorted(later / earlier for later in new_us for earlier in base_us)
    assert ratio_interval(base_us, new_us) == (ratios[23], ratios[76])
    # Few samples give the extreme ratios.
    fewest = FEWEST_FOR_RATIO - 1
    assert ratio_interval([1.0] * fewest, [2.0, 3.0, 5.0]) == (2.0, 5.0)
    with pytest.raises(ValueError, match="at least one sample on each side"):
        ratio_interval([], [1.0])
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


@given(
    st.lists(st.floats(min_value=0.1, max_value=1e4), min_size=1, max_size=20),
    st.lists(st.floats(min_value=0.1, max_value=1e4), min_size=1, max_size=20),
)
def test_the_ratio_interval_holds_the_ratio_of_the_medians(base_us, new_us):
    low, high = ratio_interval(base_us, new_us)
    assert low <= statistics.median(new_us) / statistics.median(base_us) <= high
