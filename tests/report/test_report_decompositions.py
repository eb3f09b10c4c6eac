"""What a decomposition gives and what an implementation gives, with latencies known by hand."""

from collections import Counter
from typing import Any

import pytest
from example_runs import WriteRun, problem, row

from leanbench.core.problem import AttentionProblem
from leanbench.records.reading import read_run
from leanbench.report.facts import facts
from leanbench.report.facts.decompositions import PLACES, effects_of, schedules_of
from leanbench.report.facts.results import Results
from leanbench.report.facts.side_by_side import sides_of
from leanbench.report.markdown import markdown_text

UNEVEN, CROSSING, EQUAL = problem((1024, 16)), problem(65_536), problem(1024)


def timed(of: AttentionProblem, kernel: str, us: float, schedule: str | None) -> dict[str, Any]:
    implementation = "triton" if kernel.endswith("_triton") else "cuda"
    config = {"implementation": implementation, "tile_tokens": 128}
    return row(of, kernel, us, schedule=schedule, config=config)


ROWS = [
    timed(UNEVEN, "lean_cuda", 10.0, "stream-K"),
    timed(UNEVEN, "fixed_split_cuda", 40.0, "equal splits"),
    timed(CROSSING, "lean_cuda", 100.0, "stream-K"),
    timed(CROSSING, "fixed_split_cuda", 110.0, "equal splits"),
    timed(CROSSING, "fixed_split_triton", 121.0, "equal splits"),
    # The bare name counts for the implementation that its config says; the faster one does.
    timed(EQUAL, "lean", 8.0, "one cluster a tile"),
    timed(EQUAL, "lean_cuda", 8.5, "one cluster a tile"),
    timed(EQUAL, "fixed_split", 8.0, "one cluster a tile"),
    # Nothing is known of its schedule.
    timed(EQUAL, "lean_triton", 9.0, None),
    row(EQUAL, "cudnn", 7.0, config=None),
]


def test_both_questions_by_where_stream_k_differs(write_run: WriteRun) -> None:
    (rows,) = sides_of([read_run(write_run(ROWS))]).values()
    decomposition, implementation = effects_of(rows)
    named = decomposition.question, decomposition.of, decomposition.over
    assert named == ("decomposition", "lean_cuda", "fixed_split_cuda")
    assert decomposition.every.geomean == pytest.approx((4.0 * 1.1 * 1.0) ** (1 / 3))
    assert {place: ratios.geomean for place, ratios in decomposition.by_place.items()} == (
        pytest.approx(dict(zip(PLACES, (4.0, 1.1, 1.0), strict=True)))
    )
    assert implementation.question == "implementation"
    assert (implementation.of, implementation.over) == ("fixed_split_cuda", "fixed_split_triton")
    assert (implementation.every.problems, implementation.every.geomean) == (1, pytest.approx(1.1))
    assert schedules_of(rows)["lean_cuda"] == Counter({"stream-K": 2, "one cluster a tile": 1})


def test_the_report_has_both_tables(write_run: WriteRun) -> None:
    document = facts(Results([read_run(write_run(ROWS))]), ["decompositions"])
    text = markdown_text(document).replace(chr(92), "")
    places = "uneven lengths | equal lengths, stream-K | equal lengths, other schedules"
    assert f"| effect of the | kernel | over | all schedules | {places} |" in text
    ratios = "**1.64× (1.00× to 4.00×, 3)**"
    assert f"| decomposition | lean_cuda | fixed_split_cuda | {ratios} |" in text
    assert "| lean_cuda | 2 | 1 |" in text


def test_a_run_of_one_kernel_has_no_such_tables(write_run: WriteRun) -> None:
    of_one = [fields for fields in ROWS if fields["kernel"] == "lean_cuda"]
    results = Results([read_run(write_run(of_one))])
    assert facts(results, ["decompositions"]).sections == ()
