from typing import Any

import pytest
from example_runs import as_rows, problem, row
from hypothesis import given
from hypothesis import strategies as st

from leanbench.report import warned as grouping
from leanbench.report.facts.trust import warnings_table
from leanbench.report.warned import NAMED, Warned


def warning(context: int, *sentences: str, kernel: str = "lean") -> dict[str, Any]:
    return row(problem(context), kernel, 10.0, warnings=list(sentences))


def warned(rows: list[dict[str, Any]]) -> list[Warned]:
    return grouping.warned([(row, "") for row in as_rows(rows)])


def flagged(rows: list[dict[str, Any]]) -> list[Warned]:
    return grouping.flagged([(row, "") for row in as_rows(rows)])


def labels(*contexts: int) -> tuple[str, ...]:
    return tuple(problem(context).label for context in contexts)


def test_sentences_that_differ_in_numbers_are_one_with_its_worst() -> None:
    rows = [
        warning(1024, "off by 2.5% after 900 samples"),
        warning(2048, "off by 11.0% after 10 samples"),
        warning(4096, "off by 9.1% after 1,000 samples"),
    ]
    [entry] = warned(rows)
    # The percentage counts, not the larger number, and not the order of the letters.
    assert entry.sentence == "off by 11.0% after 10 samples"
    assert (entry.kernel, entry.kind, entry.count, entry.varies) == ("lean", "warning", 3, True)
    assert entry.problems == labels(2048, 1024, 4096)


@pytest.mark.parametrize(
    ("first", "second", "worst"),
    [
        ("took 900 µs", "took 1,200 µs", "took 1,200 µs"),
        ("off by 9.5e-03", "off by 1.2e-02", "off by 1.2e-02"),
        ("written by 2.11.0", "written by 2.9.1", "written by 2.11.0"),
    ],
)
def test_worst_without_percentages(first: str, second: str, worst: str) -> None:
    [entry] = warned([warning(1024, first), warning(2048, second)])
    assert entry.sentence == worst


@pytest.mark.parametrize(
    ("status", "latency_us", "shown"),
    [("unsupported", None, "for example, has cp:8"), ("noisy", 1.0, "at worst, has cp:8")],
)
def test_a_refusal_is_an_example_where_a_measured_row_is_the_worst(status, latency_us, shown):
    rows = [
        row(problem(1024), "fa2", latency_us, status=status, reason=f"has cp:{gpus}")
        for gpus in (2, 8)
    ]
    [[_, _, reason, *_]] = warnings_table(flagged(rows)).rows
    assert reason == shown


def test_kernels_and_sentences_are_kept_apart() -> None:
    rows = [
        warning(1024, "a is 1", "b is 2"),
        warning(1024, "a is 3", kernel="fa2"),
        warning(2048),
        row(problem(), "lean", 1.0),
    ]
    listed = [(entry.kernel, entry.sentence, entry.count) for entry in warned(rows)]
    assert listed == [("lean", "a is 1", 1), ("lean", "b is 2", 1), ("fa2", "a is 3", 1)]
    spills = [warning(context, "spills 4 registers") for context in (1024, 2048)]
    [entry] = warned(spills)
    assert (entry.count, entry.varies) == (2, False)


def test_a_row_counts_once_with_its_worst() -> None:
    rows = [
        warning(1024, "launch 1 spills 4%", "launch 2 spills 9%"),
        warning(2048, "launch 1 spills 5%"),
    ]
    [entry] = warned(rows)
    assert (entry.count, entry.sentence) == (2, "launch 2 spills 9%")


def test_flagged_rows_by_status_whatever_they_warn_of() -> None:
    rows = [
        row(problem(1024), "fa2", status="timeout", reason="no result within 60 s"),
        row(problem(2048), "fa2", status="timeout", reason="no result within 120 s"),
        row(problem(2048), "fa2", status="crashed"),
        row(problem(), "fa2", 1.0, warnings=["fine otherwise"]),
    ]
    listed = [(entry.kind, entry.sentence, entry.count) for entry in flagged(rows)]
    assert listed == [("timeout", "no result within 120 s", 2), ("crashed", "no reason given", 1)]


@given(st.lists(st.tuples(st.sampled_from(["lean", "fa2"]), st.floats(0, 1e6)), max_size=60))
def test_every_row_is_in_one_entry(drawn: list[tuple[str, float]]) -> None:
    rows = [
        warning(1 + i, f"off by {value:.2f}%", kernel=kernel)
        for i, (kernel, value) in enumerate(drawn)
    ]
    entries = warned(rows)
    counts = {entry.kernel: entry.count for entry in entries}
    assert len(counts) == len(entries)
    for kernel in counts:
        values = [value for name, value in drawn if name == kernel]
        [entry] = [entry for entry in entries if entry.kernel == kernel]
        assert counts[kernel] == len(values)
        assert len(entry.problems) == min(NAMED, len(values))
        assert entry.sentence == f"off by {max(values):.2f}%"
    assert sum(counts.values()) == len(drawn)
