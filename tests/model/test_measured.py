"""The shipped calibration against the H200 runs under reports/: what it says of its errors, and
what was asked of it.

Held out are the shapes of mha-grid that it was not fitted to, and all runs but mha-grid, gqa and
paper-fig13.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from leanbench.model import known_error
from leanbench.model.calibration import SHIPPED, Calibration, read_calibration
from leanbench.model.fit import check, split
from leanbench.model.measured import read_measured

RUNS = Path(__file__).parents[2] / "reports" / "h200"


@pytest.fixture(scope="module")
def shipped() -> Calibration:
    return read_calibration(SHIPPED / "h200.json")


@pytest.mark.parametrize(
    "run", ["paper-fig7a", "smoke", "ragged", "occupancy", "paper-fig13-again"]
)
def test_errors_it_states_are_those_it_makes(shipped: Calibration, run: str) -> None:
    measured = read_measured(str(RUNS / run))
    found = [
        figures
        for figures, _ in check(measured, measured.cells, shipped.constants, "checked", workers=1)
    ]
    stated = [figures for figures in shipped.runs if figures.run == run]
    assert [figures.quantity for figures in stated] == [figures.quantity for figures in found]
    for one, other in zip(stated, found, strict=True):
        assert (one.all.rows, one.pairs, one.pairs_right) == (
            other.all.rows,
            other.pairs,
            other.pairs_right,
        )
        for name in ("median", "p90", "worst"):
            assert getattr(one.all, name) == pytest.approx(getattr(other.all, name), abs=1e-6)


def test_held_out_cells_of_the_grid(shipped: Calibration) -> None:
    """Every 12th of them, so that it takes seconds."""
    run = read_measured(str(RUNS / "mha-grid"))
    _, held_out = split(run)
    [stated] = [
        figures
        for figures in shipped.runs
        if (figures.run, figures.role) == ("mha-grid", "checked")
    ]
    assert stated.all.rows == len(held_out) > 500
    some = held_out[::12]
    assert {cell.kernel for cell in some} == {"lean", "fa2", "fixed_split"}
    [(found, _)] = check(run, some, shipped.constants, "checked", workers=1)
    assert found.all.median < 1.5 * stated.all.median
    assert found.all.worst <= stated.all.worst + 1e-6


def test_errors_are_within_what_was_asked(shipped: Calibration) -> None:
    """Median 10%, 90th percentile 25%; the order of kernels that differ by 5% right in 95% of the
    cells.
    """
    held_out = [
        figures
        for figures in shipped.runs
        if figures.role == "checked" and figures.quantity == "latency"
    ]
    assert {figures.run for figures in held_out} >= {
        "mha-grid",
        "paper-fig7a",
        "smoke",
        "ragged",
        "occupancy",
    }
    for figures in held_out:
        assert figures.all.median < 0.10
        assert figures.all.p90 < 0.25
    assert sum(figures.pairs_right for figures in held_out) > 0.95 * sum(
        figures.pairs for figures in held_out
    )
    [energy] = [
        figures
        for figures in shipped.runs
        if figures.role == "checked" and figures.quantity == "energy"
    ]
    assert (energy.run, energy.all.rows) == ("paper-fig13-again", 12)
    assert energy.all.worst < 0.06


def test_the_sentence_names_the_held_out_rows(shipped: Calibration) -> None:
    held_out = [
        figures
        for figures in shipped.runs
        if figures.role == "checked" and figures.quantity == "latency"
    ]
    rows = sum(figures.all.rows for figures in held_out)
    assert f"{rows} rows that it was not fitted to" in known_error("h200")
