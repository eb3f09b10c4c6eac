import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from example_runs import WriteRun, measured_rows, problem, row, two_runs
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.core.errors import UserError
from leanbench.records.reading import read_run, read_runs
from leanbench.report import write_report
from leanbench.report.facts.results import Results
from leanbench.report.facts.side_by_side import SideBySide, side_by_side, sides_of
from leanbench.report.html import page_data


def side_by_side_of(directories: Iterable[Path]) -> list[SideBySide]:
    return side_by_side(read_runs([*directories]), ["lean", "fa2"])


def test_kernels_are_compared_where_both_runs_timed_them(write_run: WriteRun) -> None:
    lean, fa2 = side_by_side_of(two_runs(write_run))
    assert (lean.kernel, lean.base.run, lean.side.run) == ("lean", "here", "there")
    assert lean.latency.problems == 2
    assert lean.latency.geomean == pytest.approx((0.5 * 0.25) ** 0.5)
    assert (lean.latency.lowest, lean.latency.lowest_at) == (0.25, problem(4096).label)
    assert (lean.latency.highest, lean.latency.highest_at) == (0.5, problem(1024).label)
    # Energy, and the host's time, which was not measured.
    assert lean.compared == (pytest.approx((1 / 2 * 1 / 4) ** 0.5), None)
    floors_us = [problem(context).kv_bytes / 4e6 + 2.0 for context in (1024, 4096)]
    assert lean.base_floor_share == pytest.approx((floors_us[0] / 10 * floors_us[1] / 40) ** 0.5)
    # The noisy row of the first run counts.
    assert (fa2.kernel, fa2.latency.problems, fa2.compared) == ("fa2", 2, (None, None))
    assert fa2.latency.geomean == pytest.approx((8 / 12 * 0.5) ** 0.5)


def test_no_statistic_spans_two_runs(write_run: WriteRun) -> None:
    latencies = {"a": {"lean": 10.0, "fa2": 20.0}, "b": {"lean": 1.0, "fa2": 4.0}}
    directories = [
        write_run([row(problem(), *timed) for timed in of_run.items()], folder=name, name=name)
        for name, of_run in latencies.items()
    ]
    results = Results(read_runs(directories))
    summaries = [part.summary for part in results.parts]
    assert [(of.run, of.speedups["fa2"].geomean) for of in summaries] == [("a", 2.0), ("b", 4.0)]
    assert results.frame["speedup"].dropna().tolist() == [2.0, 4.0]
    assert [side.name for side in sides_of(read_runs(directories))] == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([row(problem(), "lean", 10.0)], [row(problem(), "lean", 1.0, cache="warm")]),
        ([], [row(problem(), "lean", 10.0, status="suspect", reason="x")]),
    ],
    ids=["cold and warm", "nothing timed"],
)
def test_without_a_problem_in_common_that_is_said(write_run, first, second) -> None:
    runs = [write_run(rows, folder=name, name=name) for name, rows in (("a", first), ("b", second))]
    assert side_by_side_of(runs) == []
    [path] = write_report(runs[0], runs[0].parent / "out", ["html"], runs[1:])
    html = path.read_text(encoding="utf-8")
    assert "The runs have no problem in common that the same kernel ran." in html
    assert ('id="sides-sides"' in html) is bool(first)


def test_runs_of_one_name_are_told_apart_by_the_ends_of_their_paths(write_run: WriteRun) -> None:
    directories = [write_run(measured_rows(), folder=folder) for folder in ("x", "y")]
    assert [run.name for run in read_runs(directories)] == ["x", "y"]
    # The name x is taken.
    (directories[0].parent / "z").mkdir()
    deeper = write_run(measured_rows(), folder="z/x")
    other = write_run(measured_rows(), folder="other", name="x")
    names = [run.name for run in read_runs([*directories, deeper, other])]
    parent = directories[0].parent.name
    assert names == [f"{parent}/x", f"{parent}/y", "z/x", "x"]
    assert read_run(directories[0]).name == "example"
    with pytest.raises(UserError, match=r"run '.*/x' is given twice: name each run once"):
        read_runs([directories[0], directories[1], directories[0] / ".." / "x"])


@pytest.mark.deep
def test_no_two_lines_of_many_runs_look_alike(write_run: WriteRun) -> None:
    names = [f"run{index}" for index in range(12)]
    runs = read_runs([write_run([row(problem(), "lean", 1.0)], folder=n, name=n) for n in names])
    lines = page_data(Results(runs))["sides"]["lines"]
    assert [line["run"] for line in lines] == names
    assert len({(line["color"], line["symbol"]) for line in lines}) == 12


def test_report_of_two_runs(write_run: WriteRun, tmp_path: Path) -> None:
    first, second = map(str, two_runs(write_run))
    out = tmp_path / "both"
    result = CliRunner().invoke(app, ["report", first, second, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output == f"{out / 'report.html'}\n{out / 'report.csv'}\n"
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "<title>here and there (predicted): leanbench report</title>" in html
    assert (
        "<strong>there</strong>: <strong>Predicted by the performance model for NVIDIA B200;"
        " nothing was measured.</strong>" in html
    )
    section = html[html.index('<section id="side-by-side">') :].partition("</section>")[0]
    text = " ".join(re.sub("<[^>]+>", " ", section).split())
    assert (
        "lean there, NVIDIA B200, predicted here, NVIDIA H200, measured 2 0.35× 0.25× context 4k"
        " 0.50× context 1k" in text
    )
    rows = (out / "report.csv").read_text().splitlines()
    assert len(rows) == 9
    assert [line.split(",").count("there") for line in rows[1:]] == [0] * 4 + [1] * 4


def test_a_report_of_two_runs_needs_a_folder(write_run: WriteRun) -> None:
    result = CliRunner().invoke(app, ["report", *map(str, two_runs(write_run))])
    assert result.exit_code == 2
    assert "say with --out which folder to write" in " ".join(result.stderr.split())
