"""Whole reports as Markdown. Review the snapshot: it holds the wording of every section."""

from collections.abc import Sequence
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


#: Rows of each run of a report, and its sections: None for those of a whole report.
REPORTS: dict[str, tuple[list[list[dict[str, Any]]], Sequence[str] | None]] = {
    "latency": ([measured_rows()], None),
    "all fields": ([rows_with_all_fields()], None),
    "ending of a sweep": ([rows_with_all_fields()], ENDING),
    "equal runs": ([rows_with_all_fields()] * 2, None),
    "claims": (
        [claimed("fa2", 512, 200.0), claimed("fixed_split", 256, 218.0, warnings=["w"])],
        ["head", "summary", "claims"],
    ),
    "one claim": (
        [claimed("fa2", 512, 200.0, sm_busy_share=0.4, quantisation_efficiency=0.9)],
        ["claims"],
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(write_run: WriteRun, snapshot, name: str) -> None:
    runs, sections = REPORTS[name]
    paths = [write_run(rows, folder=f"run{n}", name=f"run{n}") for n, rows in enumerate(runs)]
    assert markdown_text(facts(Results(read_runs(paths)), sections)) == snapshot
