"""Heat maps of a page: what it holds for them, and what its script makes of that."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import MARKS, answer_of
from example_runs import WriteRun, data_of, problem, row

from leanbench.report import write_report

TEMPLATES = Path(__file__).parents[2] / "reports" / "templates"
NODE = shutil.which("node")
PROBE = Path(__file__).with_name("browser_probe.js").read_text(encoding="utf-8")
#: Text and colour of each cell of the map of speedups, of the series that is shown first.
SPEEDUPS = """return document.getElementById("maps-speedup").picture.cells
  .map(({ text, color }) => [text, color]);"""
ORANGE = "#D99A1C"


def records(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the page's rows with their texts."""
    columns = data["columns"]

    def text(column: dict[str, Any], value: Any) -> Any:
        return value if value is None or not column["texts"] else column["texts"][value]

    cells = [zip(columns, values, strict=True) for values in data["rows"]]
    return [{column["name"]: text(column, value) for column, value in row} for row in cells]


def run_of(write_run: WriteRun, folder: str, baseline: str, problems: int = 2) -> Path:
    """A run in which `baseline` is twice as fast as flashinfer, then half as fast."""
    rows = []
    for heads in (8, 16):
        for context in (1024, 4096, 16384)[:problems]:
            us = 10.0 if context == 1024 else 40.0
            rows.append(row(problem(context, heads), baseline, us))
            rows.append(row(problem(context, heads), "flashinfer", 20.0))
    return write_run(rows, folder=folder)


def page_of(out: Path, *runs: Path, baseline: str | None = None) -> str:
    [page] = write_report(runs[0], out, ["html"], runs[1:], baseline)
    return page.read_text(encoding="utf-8")


@pytest.mark.deep
def test_every_row_of_a_page_has_its_runs_baseline(tmp_path: Path, write_run: WriteRun) -> None:
    runs = run_of(write_run, "plain", "lean"), run_of(write_run, "latent", "lean_mla")
    data = data_of(page_of(tmp_path, *runs))
    of_run = {(Path(each["run"]).name, each["baseline"]) for each in records(data)}
    assert of_run == {("plain", "lean"), ("latent", "lean_mla")}
    [speedup] = [each for each in data["maps"] if each["key"] == "speedup"]
    assert speedup["title"] == "Speedup of the baseline"
    assert speedup["note"] == (
        "blue: the baseline is faster, orange: slower; the baseline is lean, lean_mla in"
        f" {runs[1].name}"
    )
    [column] = [each for each in data["columns"] if each["name"] == "baseline"]
    assert column["shown"] is False
    alone = data_of(page_of(tmp_path, runs[1]))
    [speedup] = [each for each in alone["maps"] if each["key"] == "speedup"]
    assert speedup["title"] == "Speedup of lean_mla"
    assert speedup["note"] == "blue: lean_mla is faster, orange: slower"


@pytest.mark.deep
@MARKS[0]
@MARKS[1]
def test_the_map_of_speedups_is_filled_for_a_run_without_lean(tmp_path, write_run):
    """The run with the most cells is shown first."""

    def speedups(*runs: Path, baseline: str | None = None) -> list[list[str]]:
        page = page_of(tmp_path, *runs, baseline=baseline)
        blue = data_of(page)["kernels"][0]["color"]
        cells = answer_of(tmp_path, page, "", PROBE, SPEEDUPS)["seen"]
        return [[text, {blue: "blue", ORANGE: "orange"}[color]] for text, color in cells]

    latent = run_of(write_run, "latent", "lean_mla", problems=3)
    rows = [["2.00", "blue"], ["0.50", "orange"], ["0.50", "orange"]] * 2
    assert speedups(run_of(write_run, "plain", "lean"), latent) == rows
    large = run_of(write_run, "large", "lean", problems=3)
    assert speedups(large, run_of(write_run, "small", "lean_mla")) == rows
    chosen = speedups(latent, baseline="flashinfer")
    assert [text for text, _ in chosen] == ["0.50", "2.00", "2.00"] * 2


@pytest.mark.skipif(NODE is None, reason="no node on the PATH")
@pytest.mark.parametrize("script", sorted(path.name for path in TEMPLATES.glob("*.js")))
def test_scripts_parse(script: str) -> None:
    done = subprocess.run(
        [str(NODE), "--check", str(TEMPLATES / script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
