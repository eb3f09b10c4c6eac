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


def sustained(us: float, kernel: str = "lean", **fields: Any) -> dict[str, Any]:
    return row_with_all_fields(problem(), kernel, 100.0, sustained_us=us, **fields)


WRONG: dict[str, Any] = {"crosscheck_us": 900.0, "energy_by_power_mj": 1e6}
WRONG |= {"instrumentation_cost": 9.0, "throttle_reasons": ["x"], "reason": "r"}
NOISY = sustained(10.0, status="noisy", reason="wide")
#: The snapshot has the facts of each.
RUNS: dict[str, list[dict[str, Any]]] = {
    "a run of before has the stopping rule alone": measured_rows(),
    "the interval that reaches farther counts, unknown throttling is no fact": [
        row(problem(), "lean", 100.0, latency_ci_low_us=97.0, latency_ci_high_us=100.5)
    ],
    "nothing is known of predictions and failures": [
        *(dict(row, source="predicted") for row in rows_with_all_fields()),
        row(problem(), "lean", status="crashed", reason="lost"),
    ],
    "noisy and suspect rows enter no agreement": [
        row_with_all_fields(problem(), "lean", 100.0),
        *(
            row_with_all_fields(problem(), "fa2", 100.0, status=status, **WRONG)
            for status in ("noisy", "suspect")
        ),
    ],
    "sustained not below the burst": [sustained(120.0), sustained(99.2), NOISY],
    "sustained below the burst": [
        *(sustained(120.0), sustained(98.0), sustained(92.5, "fa2"), NOISY)
    ],
    "a cross-check below 20 us is in microseconds alone": [
        row_with_all_fields(problem(), "lean", 20.0, crosscheck_us=19.25)
    ],
}


def test_facts(snapshot):
    lines = []
    for name, rows in RUNS.items():
        found = [f"{fact.name}: {fact.words}" for fact in facts(as_rows(rows))]
        lines += [f"# {name}", *found]
    assert "\n".join(lines) == snapshot


def test_percent_has_three_figures() -> None:
    shares = (0.0012, 0.0302, 0.099999, 0.1234)
    assert [percent(share) for share in shares] == "0.12% 3.02% 10.0% 12.3%".split()
