"""When a claim of the paper holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leanbench.core.problem import AttentionProblem
from leanbench.paper.claim import BASELINES, OWN, Claim, Figure, Statistic

PROBLEM = AttentionProblem(1, 8, 8, 1024, 64)
#: LA is 1.06x as fast as FD: all from 1.055 to 1.065 rounds to it.
FASTER = Claim("7c", "LA over FD", "latency", "FD", "LA", "mean", (PROBLEM,), 1.06)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "is_met"),
    [
        # A flat 15% of the ratio let it hold at 0.91.
        (0.905, 0.915, "reversed", False),
        (0.97, 1.05, "less", False),
        (1.02, 1.05, "less", False),
        (1.04, 1.056, "holds", True),
        (1.064, 1.08, "holds", True),
        (0.99, 1.08, "not resolved", False),
        (1.07, 1.08, "more", True),
    ],
)
def test_a_speedup_is_judged_by_direction_and_interval_of_its_gain(low, high, verdict, is_met):
    figure = Figure((low + high) / 2, low, high)
    assert FASTER.verdict(figure) == verdict
    assert FASTER.is_met(figure) == is_met


@pytest.mark.parametrize(
    ("relation", "paper", "low", "high", "verdict"),
    [
        ("at least", 2.0, 2.0, 2.1, "holds"),
        ("at least", 2.0, 1.9, 2.1, "not resolved"),
        ("at least", 2.0, 1.7, 1.9, "less"),
        ("at least", 2.0, 0.7, 0.9, "reversed"),
        ("at most", 1.0, 0.9, 1.0, "holds"),
        ("at most", 1.0, 0.9, 1.01, "not resolved"),
        ("at most", 1.0, 1.01, 1.02, "reversed"),
        ("about", 0.99, 0.986, 0.991, "holds"),
        ("about", 0.99, 1.3, 1.4, "reversed"),
    ],
)
def test_bounds_and_losses(relation, paper, low, high, verdict):
    claim = replace(FASTER, relation=relation, paper=paper)
    assert claim.verdict(Figure((low + high) / 2, low, high)) == verdict


def test_a_share_has_no_direction():
    share = replace(FASTER, quantity="occupancy", over=None, relation="at most", paper=0.6)
    assert share.verdict(Figure(0.3, 0.29, 0.31)) == "holds"
    assert share.verdict(Figure(0.7, 0.69, 0.71)) == "more"
    assert not share.is_met(Figure(0.7, 0.69, 0.71))
    assert share.words_of(Figure(0.3, 0.29, 0.31)) == "30% (29 to 31)"
    # And an arithmetic mean.
    assert share.value([Figure(0.2, 0.2, 0.2), Figure(0.4, 0.4, 0.4)]).value == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("mean", Figure(2, 1.8, 2.25)),
        ("lowest", Figure(1, 0.9, 1.25)),
        ("highest", Figure(4, 3.6, 4.05)),
        ("last over first", Figure(4, 3.6 / 1.25, 4.05 / 0.9)),
        ("highest over lowest", Figure(4, 3.6 / 1.25, 4.05 / 0.9)),
    ],
)
def test_intervals_of_statistics(statistic: Statistic, expected: Figure):
    figures = [Figure(1, 0.9, 1.25), Figure(4, 3.6, 4.05)]
    known = replace(FASTER, statistic=statistic).value(figures)
    assert (known.value, known.low, known.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


def test_a_ratio_is_as_uncertain_as_both_its_sides():
    ratio = Figure(20, 18, 22).over(Figure(10, 9, 11))
    assert ratio == Figure(2, 18 / 11, 22 / 9)
    assert Figure.within(2.0, 0.25) == Figure(2, 1.6, 2.5)


def test_words_have_digits_enough_to_tell_an_interval_from_1():
    assert FASTER.words_of(Figure(1.0, 0.9981, 1.0041)) == "1.000x (0.998 to 1.004)"
    assert FASTER.words_of(Figure(1.02, 1.01, 1.03)) == "1.02x (1.01 to 1.03)"


def test_baselines_are_the_librarys_and_this_projects():
    assert [baselines.kernels(FASTER) for baselines in BASELINES] == [
        ("flash_decoding", "lean"),
        ("torch_flash", "lean"),
        (),
        ("fixed_split", "lean"),
    ]
    over_flashinfer = replace(FASTER, of="FI")
    assert [baselines.kernels(over_flashinfer) for baselines in BASELINES] == [
        (),
        (),
        ("flashinfer_best", "lean"),
        (),
    ]
    assert OWN.others(FASTER) == ("fixed_split",)
    assert OWN.others(replace(FASTER, of="LA", over=None)) == ()
