"""What the rows of a run can hold is declared once."""

import re
from typing import Any

import pytest
from example_rows import row
from pydantic import BaseModel, ValidationError

from leanbench.core.quantities import GROUPS, RAN, UNITS, Quantity, quantities, quantity
from leanbench.records.outcome import Outcome
from leanbench.records.row import QUANTITIES, Row


class Example(BaseModel):
    late: int | None = quantity("late", group="origin", kind="count")
    plan_us: float | None = quantity(
        "plan", "us", group="samples", kind="figure", meaning="what it takes", compared=True
    )


def test_a_declaration_says_all_that_a_table_shows():
    plan, late = quantities(Example)
    plan, late = quantities(Example)
    shown = {"heading": "plan", "meaning": "what it takes", "unit": "us", "shown": "page"}
    kind = {"group": "samples", "kind": "figure", "statuses": RAN, "compared": True}
    assert plan == Quantity(name="plan_us", **shown, **kind)
    assert (plan.unit_text, plan.stem, late.unit_text, late.stem) == ("µs", "plan", "", "late")
    places = ("paper", "markdown", "page", "data")
    assert [plan.is_in(place) for place in places] == [False, False, True, True]


def test_every_field_of_a_row_but_the_problem_is_a_quantity():
    assert {quantity.name for quantity in QUANTITIES} == {*Row.model_fields} - {"problem"}
    groups = [GROUPS.index(quantity.group) for quantity in QUANTITIES]
    assert groups == sorted(groups)


def test_a_name_ends_with_its_unit():
    others = ("x", "per thread", "per sample", "registers", "samples", "KB per CTA")
    for own in QUANTITIES:
        endings = [unit for unit in UNITS if own.name.endswith(f"_{unit}")]
        assert max(endings, key=len, default="") == own.unit or own.unit in others


def row_with(**fields: Any) -> Row:
    return Row.model_validate({**row("one").model_dump(), **fields})


def test_a_misspelt_figure_is_no_field_of_a_row():
    with pytest.raises(ValidationError, match="latncy_us\n  Extra inputs are not permitted"):
        row_with(latncy_us=1.0)


@pytest.mark.parametrize("status", ["unsupported", "out_of_memory", "timeout", "crashed"])
def test_a_row_that_did_not_run_carries_no_figures(status):
    fields = {"status": status, "reason": "it does not fit", "latency_us": None}
    assert row_with(**fields).latency_us is None
    for name, value in (("latency_us", 1.5), ("energy_mj", 2.0), ("warnings", [])):
        with pytest.raises(ValidationError, match=f"a row that is {status} carries no {name}"):
            row_with(**{**fields, name: value})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("latency_us", 0.0, "1e-09"),
        ("energy_mj", -1.0, "1e-09"),
        ("bandwidth_tb_s", -1.0, "0"),
        ("read_floor_share", 1e308, "0"),
        ("kv_bytes", -1, "0"),
        ("wall_s", -0.5, "0"),
        ("exchange_us", -1e300, "-1e+18"),
    ],
)
def test_figures_have_a_range(name, value, least):
    words = f"{name}: {value:g} is not between {least} and 1e+18"
    with pytest.raises(ValidationError, match=re.escape(words)):
        row("one", **{name: value})


def test_differences_can_be_negative_and_counters_stand_still():
    figures = row("one", exchange_us=-0.5, energy_above_idle_mj=-2.0, energy_mj=0.0, samples=0)
    assert (figures.exchange_us, figures.energy_mj, figures.samples) == (-0.5, 0, 0)


def test_a_row_that_was_timed_has_a_latency_and_one_that_is_ok_gives_no_reason():
    for status in ("ok", "noisy"):
        with pytest.raises(ValidationError, match=f"a row that is {status} needs a latency_us"):
            row_with(status=status, latency_us=None)
    with pytest.raises(ValidationError, match="a row that is ok carries no reason"):
        row_with(reason="none")


def test_an_interval_is_not_reversed():
    with pytest.raises(ValidationError, match="reversed: 3 to 2"):
        row("one", latency_ci_low_us=3.0, latency_ci_high_us=2.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_figure_that_is_not_finite_was_not_measured(value):
    assert row_with(relative_error=value).relative_error is None


def test_outcomes_add_up_and_a_misspelt_figure_is_refused():
    whole = Outcome(latency_us=2.0, reason=None) | Outcome(latency_us=3.0, status="ok")
    assert whole.fields() == {"latency_us": 3.0, "reason": None, "status": "ok"}
    with pytest.raises(ValidationError, match="latncy_us\n  Extra inputs are not permitted"):
        Outcome(latncy_us=1.0)  # pyright: ignore[reportCallIssue]
