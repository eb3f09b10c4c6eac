"""Ahead, level and behind: by intervals, by the spread between processes, and at their borders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.records.standing import (
    SPREAD,
    Latency,
    Ratio,
    measured_spread,
    spread_of_processes,
    standing,
    standings,
)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        # Exactly equal, and a difference within the spread, with narrow intervals.
        ((100, 99.9, 100.1), (100, 99.9, 100.1), "level"),
        ((100, 99.9, 100.1), (100.9, 100.8, 101.0), "level"),
        ((100, 99.9, 100.1), (101.2, 101.1, 101.3), "ahead"),
        ((101.2, 101.1, 101.3), (100, 99.9, 100.1), "behind"),
        # A larger difference, but the intervals overlap or touch.
        ((100, 98, 103), (104, 103, 105), "level"),
        ((100, 98, 102.9), (104, 103, 105), "ahead"),
    ],
)
def test_standing(own, other, expected):
    assert standing(Latency(*other).over(Latency(*own))) == expected


@given(
    st.floats(0.01, 100), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.3), st.floats(0, 0.3)
)
def test_one_sides_lead_is_the_others_loss(other, own_share, other_share, spread, more):
    sides = [
        Latency(us, us * (1 - share), us * (1 + share))
        for us, share in ((1.0, own_share), (other, other_share))
    ]
    there = standing(sides[1].over(sides[0]), spread)
    back = standing(sides[0].over(sides[1]), spread)
    flipped = {"ahead": "behind", "behind": "ahead", "level": "level"}
    # At the border itself, rounding decides.
    if abs(max(other, 1 / other) - 1 - spread) > 1e-9:
        assert back == flipped[there]
    if there == "level":
        assert standing(sides[1].over(sides[0]), spread + more) == "level"


def test_counts_and_spreads():
    ratios = [Ratio.exactly(value) for value in (1.2, 1.005, 0.8, 1.0)]
    assert standings(ratios) == {"ahead": 1, "level": 2, "behind": 1}
    assert standings([]) == {"ahead": 0, "level": 0, "behind": 0}
    assert measured_spread([None]) == SPREAD
    assert measured_spread([], 0.004) == 0.004
    assert measured_spread([None, 0.02, 0.01, 0.03], 0.004) == 0.02
    assert spread_of_processes([10.0, 11.0, 10.4]) == pytest.approx(0.5 / 10.4)
