from typing import Any

from example_runs import (
    as_rows,
    measured_rows,
    problem,
    row,
    row_with_all_fields,
    rows_with_all_fields,
)

from leanbench.report.facts.trust import facts, percent

SHORT, LONG = problem(1024).label, problem(65536).label


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {fact.name: str(fact.words) for fact in facts(as_rows(rows))}


def test_a_run_of_before_has_the_stopping_rule_alone() -> None:
    sentences = texts(measured_rows())
    assert list(sentences) == ["stopping rule"]
    assert sentences["stopping rule"].startswith("6 of 7 timed rows met the stopping rule")


def test_the_interval_that_reaches_farther_counts() -> None:
    rows = [row(problem(), "lean", 100.0, latency_ci_low_us=97.0, latency_ci_high_us=100.5)]
    assert "median: 3.00% in the median row, 3.00% in the worst" in texts(rows)["stopping rule"]


def test_nothing_is_known_of_predictions_and_failures() -> None:
    predicted = [dict(row, source="predicted") for row in rows_with_all_fields()]
    crashed = row(problem(), "lean", status="crashed", reason="lost")
    assert facts(as_rows([*predicted, crashed])) == []


def test_noisy_and_suspect_rows_enter_no_agreement() -> None:
    wrong: dict[str, Any] = {"crosscheck_us": 900.0, "energy_by_power_mj": 1e6}
    wrong |= {"instrumentation_cost": 9.0, "throttle_reasons": ["x"]}
    rows = [row_with_all_fields(problem(), "lean", 100.0)]
    rows += [
        row_with_all_fields(problem(), "fa2", 100.0, status=s, reason="r", **wrong)
        for s in ("noisy", "suspect")
    ]
    sentences = texts(rows)
    assert "by 1.00% in the worst" in sentences["cross-check"]
    assert "by 2.00% in the worst" in sentences["energy"]
    assert "1.020x in the worst" in sentences["instrumentation"]
    assert "lowered clocks" not in sentences


def test_sustained_below_the_burst_is_told() -> None:
    def sustained(us: float, kernel: str = "lean", **fields: Any) -> dict[str, Any]:
        return row_with_all_fields(problem(), kernel, 100.0, sustained_us=us, **fields)

    noisy = sustained(10.0, status="noisy", reason="wide")
    assert "sustained" not in texts([sustained(120.0), sustained(99.2), noisy])
    rows = [sustained(120.0), sustained(98.0), sustained(92.5, "fa2"), noisy]
    assert texts(rows)["sustained"] == (
        "Sustained latency is below the burst's by more than 1% in 2 of 3 rows, by 7.50% in the"
        f" worst (fa2 · {SHORT}); the cause is not known."
    )


def test_no_throttling_is_a_fact_and_unknown_throttling_is_none() -> None:
    known = texts([row_with_all_fields(problem(), "lean", 9.0)])
    assert known["throttling"] == "No sample was thrown away for lowered clocks."
    assert "throttling" not in texts([row(problem(), "lean", 9.0)])


def test_a_cross_check_below_20_us_is_told_in_microseconds_alone() -> None:
    rows = [row_with_all_fields(problem(), "lean", 20.0, crosscheck_us=19.25)]
    assert texts(rows)["cross-check"] == (
        "The cross-check differs from the latency by 0.75 µs in the worst of 1 row below 20 µs"
        f" (lean · {SHORT})."
    )


def test_percent_has_three_figures() -> None:
    shares = (0.0012, 0.0302, 0.099999, 0.1234)
    assert [percent(share) for share in shares] == "0.12% 3.02% 10.0% 12.3%".split()
