import json
from dataclasses import replace
from pathlib import Path

import pytest

from leanbench.gpu.catalogue import find
from leanbench.model.constants import Constants
from leanbench.model.fit import fit_energy
from leanbench.model.predict import energy_mj

H200 = find("h200")
COSTS = Constants(idle_power_w=120, sm_power_w=2, byte_pj=100, power_cap_share=0.99)


def test_by_hand():
    """1 ms of 120 W idle and 50 SMs of 2 W, and 2 GB of 100 pJ a byte."""
    assert energy_mj(1000, 2 * 10**9, 50, H200, COSTS, 700) == pytest.approx(120 + 100 + 200)
    # All SMs and 4.5 GB in a millisecond would be 834 W: held at 99% of 700.
    assert energy_mj(1000, 4_500_000_000, 132, H200, COSTS, 700) == pytest.approx(693)
    # A board with half the limit idles at half the power.
    half = replace(H200, power_limit_w=350)
    assert energy_mj(1000, 0, 50, half, COSTS, 700) == pytest.approx(60 + 100)


def test_fit_finds_what_made_the_rows_and_moves_nothing_without_rows():
    # Two numbers of SMs, so that an SM's power and a byte's energy can be told apart.
    rows = [
        (us, read, sms, energy_mj(us, read, sms, H200, COSTS, 700), 120.0, power)
        for us, read, sms, power in [
            (1000.0, 2 * 10**9, 50, 420.0),
            (1000.0, 10**9, 120, 400.0),
            (500.0, 2 * 10**8, 20, 200.0),
            (1000.0, 4_500_000_000, 132, 693.0),
        ]
    ]
    fitted = fit_energy(rows, H200, Constants())
    assert fitted.idle_power_w == 120
    assert fitted.power_cap_share == pytest.approx(0.99)
    assert (fitted.sm_power_w, fitted.byte_pj) == pytest.approx((2, 100), rel=0.01)
    assert fitted.tile_us == Constants().tile_us
    assert fit_energy([], H200, COSTS) == COSTS


def test_at_the_limit_on_the_h200():
    """Find the cap in the runs: kernels that use all SMs were held at 696 to 699 W of 700."""
    rows = Path(__file__).parents[2] / "reports/h200/model/paper-fig13-again/results.jsonl"
    power = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        power.setdefault(row["kernel"], []).append(row["sustained_power_w"])
    assert min(power["lean"] + power["fixed_split"]) > 0.99 * H200.power_limit_w
    assert max(power["lean"] + power["fixed_split"]) < 700
    assert max(power["fa2"]) < 520
