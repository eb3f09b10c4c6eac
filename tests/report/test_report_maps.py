"""Heat maps of a page: what it holds for them, and what its script makes of that in Node, where a
browser is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, problem, row

from leanbench.report import write_report

TEMPLATES = Path(__file__).parents[2] / "reports" / "templates"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on the PATH")

#: As much of a page as the maps' script asks for; what it draws is kept.
PAGE = """
const drawn = {};
globalThis.Option = class {};
globalThis.document = {
  activeElement: { closest: () => ({ firstChild: { textContent: "none" } }) },
  createElement: () => ({ firstChild: {}, addEventListener() {}, append() {}, add() {} }),
  querySelectorAll: () => [],
  querySelector: () => null,
  getElementById: (id) => ({ id, textContent: DATA, replaceChildren() {} }),
};
const NEUTRAL = "neutral", WARNED = "warned", drawCells = null;
const place = (element, draw, picture) => { drawn[element.id] = picture; };
const keepDrawn = (element, draw) => draw();
"""
#: The speedups that are drawn first, with their colours.
ANSWER = """
const speedups = drawn["maps-speedup"].cells.map(({ text, color }) => [text, color]);
console.log(JSON.stringify(speedups));
"""


def data_of(out: Path) -> dict[str, Any]:
    page = (out / "report.html").read_text()
    [data] = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page)
    return json.loads(data)


def records(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the page's rows with their texts."""
    columns = data["columns"]
    return [
        {
            column["name"]: column["texts"][value]
            if column["texts"] and value is not None
            else value
            for column, value in zip(columns, values, strict=True)
        }
        for values in data["rows"]
    ]


def in_node(data: dict[str, Any]) -> list[list[str]]:
    """Text and colour of each cell of the map of speedups, of the series that is shown first."""
    scripts = [(TEMPLATES / f"report_{name}.js").read_text() for name in ("common", "maps")]
    page = f"const DATA = {json.dumps(json.dumps(data))};{PAGE}"
    program = "\n".join([page, *scripts, ANSWER])
    done = subprocess.run(
        [str(NODE), "-"], input=program, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_of(write_run: WriteRun, folder: str, baseline: str, problems: int = 2) -> Path:
    """A run in which `baseline` is twice as fast as flashinfer, then half as fast."""
    rows = []
    for heads in (8, 16):
        for context in (1024, 4096, 16384)[:problems]:
            us = 10.0 if context == 1024 else 40.0
            rows.append(row(problem(context, heads), baseline, us))
            rows.append(row(problem(context, heads), "flashinfer", 20.0))
    return write_run(rows, folder=folder)


def report(out: Path, *runs: Path, baseline: str | None = None) -> dict[str, Any]:
    write_report(runs[0], out, ["html"], runs[1:], baseline)
    return data_of(out)


@pytest.mark.deep
def test_every_row_of_a_page_has_its_runs_baseline(tmp_path: Path, write_run: WriteRun) -> None:
    runs = run_of(write_run, "plain", "lean"), run_of(write_run, "latent", "lean_mla")
    data = report(tmp_path, *runs)
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
    alone = report(tmp_path, runs[1])
    [speedup] = [each for each in alone["maps"] if each["key"] == "speedup"]
    assert (speedup["title"], speedup["note"]) == (
        "Speedup of lean_mla",
        "blue: lean_mla is faster, orange: slower",
    )


@pytest.mark.deep
@needs_node
def test_the_map_of_speedups_is_filled_for_a_run_without_lean(
    tmp_path: Path, write_run: WriteRun
) -> None:
    """The run with the most cells is shown first."""
    plain = run_of(write_run, "plain", "lean")
    latent = run_of(write_run, "latent", "lean_mla", problems=3)
    data = report(tmp_path, plain, latent)
    blue = data["kernels"][0]["color"]
    one_row = [["2.00", blue], ["0.50", "warned"], ["0.50", "warned"]]
    assert in_node(data) == [*one_row, *one_row]
    large = run_of(write_run, "large", "lean", problems=3)
    assert in_node(report(tmp_path, large, run_of(write_run, "small", "lean_mla"))) == [
        *one_row,
        *one_row,
    ]
    chosen = report(tmp_path, latent, baseline="flashinfer")
    assert [text for text, _ in in_node(chosen)] == ["0.50", "2.00", "2.00"] * 2


@needs_node
@pytest.mark.parametrize("script", sorted(path.name for path in TEMPLATES.glob("*.js")))
def test_scripts_parse(script: str) -> None:
    done = subprocess.run(
        [str(NODE), "--check", str(TEMPLATES / script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
