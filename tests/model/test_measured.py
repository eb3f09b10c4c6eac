"""The shipped calibration against the H200 runs under reports/: what it says of its errors, and
what was asked of it.

Held out are the shapes of mha-grid that it was not fitted to, and all runs but mha-grid, gqa and
paper-fig13.
"""

from pathlib import Path

import pytest

from leanbench.model import known_error
from leanbench.model.calibration import SHIPPED, Calibration, read_calibration
from leanbench.model.check import check
from leanbench.model.fit import split
from leanbench.model.measured import read_measured

RUNS = Path(__file__).parents[2] / "reports" / "h200"


@pytest.fixture(scope="module")
def shipped() -> Calibration:
    return read_calibration(SHIPPED / "h200.json")


CHECKED = "paper-fig7a smoke ragged occupancy paper-fig13-again serving-58213".split()


@pytest.mark.parametrize("run", [*(f"model/{name}" for name in CHECKED), "peers"])
def test_errors_it_states_are_those_it_makes(shipped, run):
    measured = read_measured(str(RUNS / run))
    stated = [figures for figures in shipped.runs if figures.run == measured.name]
    # A run that measured lean_cuda was compared with its predictions alone.
    cells = [cell for cell in measured.cells if cell.kernel in stated[0].by_kernel]
    computed = [
        figures for figures, _ in check(measured, cells, shipped.constants, "checked", workers=1)
    ]
    for before, now in zip(stated, computed, strict=True):
        assert before.quantity == now.quantity
        assert (before.all.rows, before.pairs) == (now.all.rows, now.pairs)
        assert before.pairs_right == now.pairs_right
        for name in ("median", "p90", "worst"):
            assert getattr(before.all, name) == pytest.approx(getattr(now.all, name), abs=1e-6)


@pytest.mark.deep
def test_held_out_cells_of_the_grid(shipped):
    """Every 12th of them, so that it takes seconds."""
    run = read_measured(str(RUNS / "model" / "mha-grid"))
    _, held_out = split(run)
    [stated] = [own for own in shipped.runs if (own.run, own.role) == ("mha-grid", "checked")]
    assert stated.all.rows == len(held_out) > 500
    some = held_out[::12]
    assert {cell.kernel for cell in some} == {"lean_triton", "fa2_triton", "fixed_split_triton"}
    [(errors, _)] = check(run, some, shipped.constants, "checked", workers=1)
    assert errors.all.median < 1.5 * stated.all.median
    assert errors.all.worst <= stated.all.worst + 1e-6


def test_errors_are_within_what_was_asked(shipped):
    """Median 10%, 90th percentile 25%; the order of kernels that differ by 5% right in 95%."""
    checked = [own for own in shipped.runs if own.role == "checked"]
    held_out = [own for own in checked if own.quantity == "latency"]
    runs = "mha-grid paper-fig7a smoke ragged occupancy"
    assert {own.run for own in held_out} >= {*runs.split()}
    for own in held_out:
        assert own.all.median < 0.10
        assert own.all.p90 < 0.25
    assert sum(own.pairs_right for own in held_out) > 0.95 * sum(own.pairs for own in held_out)
    energies = {own.run: own.all for own in checked if own.quantity == "energy"}
    assert energies["paper-fig13-again"].rows == 12
    assert energies["paper-fig13-cuda"].rows == 12
    assert max(figures.worst for figures in energies.values()) < 0.06


def test_lean_cuda_is_predicted_as_itself(shipped):
    """With the Triton kernel's constants, `groups` was 6% off in the median, 227% at p90."""
    serving = [
        own.by_kernel["lean_cuda"]
        for own in shipped.runs
        if (own.role, own.quantity) == ("checked", "latency") and own.run.startswith("serving-")
    ]
    assert sum(errors.rows for errors in serving) >= 40
    for errors in serving:
        assert errors.median < 0.06
        assert errors.p90 < 0.12
        assert errors.worst < 0.28


def test_the_sentence_names_the_held_out_rows(shipped):
    for name, run in (("lean_cuda", "serving-58213"), ("fa2_triton", "mha-grid")):
        [figures] = [
            own.by_kernel[name]
            for own in shipped.runs
            if (own.run, own.role, own.quantity) == (run, "checked", "latency")
        ]
        words = f"{name} {figures.median:.1%} in the median, {figures.p90:.1%} at the 90th"
        assert words in known_error("h200", [name])
