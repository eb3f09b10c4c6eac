"""Whole reports as Markdown. Review the snapshot: it holds the wording of every section."""

from __future__ import annotations

from typing import Any

import pytest
from example_runs import WriteRun, measured_rows, problem, row, rows_with_all_fields

from leanbench.records.reading import read_runs
from leanbench.report.facts import ENDING, facts
from leanbench.report.facts.results import Results
from leanbench.report.markdown import markdown_text


def claimed(kernel: str, context: int, us: float, **fields: Any) -> list[dict[str, Any]]:
    shape = problem(context * 1024)
    return [row(shape, "lean", 100.0, **fields), row(shape, kernel, us, **fields)]


#: Rows of each run of a report.
REPORTS: dict[str, list[list[dict[str, Any]]]] = {
    "latency": [measured_rows()],
    "all fields": [rows_with_all_fields()],
    "equal runs": [rows_with_all_fields(), rows_with_all_fields()],
    "claims": [claimed("fa2", 512, 200.0), claimed("fixed_split", 256, 218.0, warnings=["w"])],
    "one claim": [claimed("fa2", 512, 200.0, sm_busy_share=0.4, quantisation_efficiency=0.9)],
}


def results_of(write_run: WriteRun, name: str) -> Results:
    runs = [
        write_run(rows, folder=f"run{number}", name=f"run{number}")
        for number, rows in enumerate(REPORTS[name])
    ]
    return Results(read_runs(runs))


@pytest.mark.parametrize("name", REPORTS)
def test_report(write_run: WriteRun, snapshot, name: str) -> None:
    assert markdown_text(facts(results_of(write_run, name))) == snapshot


def test_ending_of_a_sweep(write_run: WriteRun, snapshot) -> None:
    assert markdown_text(facts(results_of(write_run, "all fields"), ENDING)) == snapshot
