"""Tests of a default run and of a deep run."""

from __future__ import annotations

import re
from pathlib import Path

from depth import diagonal

TESTS = Path(__file__).parent


def test_a_diagonal_keeps_every_value_of_each_axis():
    cases = diagonal("abc", range(7), keep=3)
    kept = [case.values for case in cases if not case.marks]
    assert len(cases) == 21
    assert len(kept) == 7
    assert {letter for letter, _ in kept} == {*"abc"}
    assert {number for _, number in kept} == {*range(7)}
    assert len({case.values for case in cases}) == 21


def test_no_test_asserts_on_a_clock():
    """Such a test fails on a busy machine without a fault."""
    clocks = re.compile(
        r"assert .*(monotonic|perf_counter|process_time|thread_time|time\.time)(_ns)?\(\)"
    )
    lines = [
        f"{path.relative_to(TESTS)}: {line.strip()}"
        for path in TESTS.rglob("test_*.py")
        for line in path.read_text().splitlines()
        if clocks.search(line) and "re.compile" not in line
    ]
    assert lines == []
