"""Runs for the GitHub action github-action-benchmark."""

import json

import pytest
from example_runs import WriteRun, measured_rows, problem, row, two_runs

from leanbench.core.errors import UserError
from leanbench.report import write_report


def test_the_github_action_gets_a_list_of_latencies(write_run: WriteRun):
    rows = [
        *measured_rows(),
        row(problem(128), "lean", 3.0, source="predicted"),
        row(problem(256), "lean", 4.0, cache="warm"),
    ]
    directory = write_run(rows)
    [path] = write_report(directory, directory, ["github-benchmark"])
    benchmarks = json.loads(path.read_text(encoding="utf-8"))
    assert [(own["name"], own["value"]) for own in benchmarks[-4:]] == [
        ("fixed_split · b1 h56 n65536 d64 fp16 HND", 100.0),
        ("lean · b2 h56 n512+4096 d64 fp16 HND", 12.5),
        ("lean · b1 h56 n128 d64 fp16 HND · predicted", 3.0),
        ("lean · b1 h56 n256 d64 fp16 HND · warm L2", 4.0),
    ]
    assert len(benchmarks) == 9
    # What the action's tool customSmallerIsBetter reads.
    assert {tuple(own) for own in benchmarks} == {("name", "unit", "value", "range", "extra")}
    assert benchmarks[0]["unit"] == "us"
    assert benchmarks[0]["range"] == "± 0.1"
    gpu, floor, command = benchmarks[0]["extra"].splitlines()
    assert (gpu, floor) == ("NVIDIA H200", "57% of the read floor")
    assert command.startswith("leanbench sweep --heads 56 --context 1024 ")


def test_names_of_several_runs_differ_and_no_latency_is_refused(write_run: WriteRun, tmp_path):
    first, second = two_runs(write_run)
    [path] = write_report(first, tmp_path, ["github-benchmark"], [second])
    benchmarks = json.loads(path.read_text(encoding="utf-8"))
    names = [own["name"] for own in benchmarks]
    assert len(set(names)) == len(names)
    crashed = write_run([row(problem(), "lean", status="crashed", reason="x")], folder="none")
    with pytest.raises(UserError, match="no row of this run has a latency"):
        write_report(crashed, tmp_path, ["github-benchmark"])
