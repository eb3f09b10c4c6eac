"""The quantity of CONTRIBUTING.md, declared once in a copy of the sources, is known everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from copied_sources import ROOT, copy_sources, run

#: Runs that have it, and its values by context.
VALUES = {"first": {1024: 0.02, 4096: 0.08}, "second": {1024: 0.03, 4096: 0.04}}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the rooms and one more figure in rows."""
    folder = tmp_path_factory.mktemp("copy")
    copy_sources(folder)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    field = re.search(r"A column of your own.*?```python\n(.*?)```", text, re.DOTALL)
    assert field is not None
    figures = folder / "leanbench/records/figures.py"
    figures.write_text(figures.read_text(encoding="utf-8") + "\n" + field[1], encoding="utf-8")
    return folder


def fill(run_directory: Path, values: dict[int, float]) -> None:
    """Write the figure into the rows, as a measurement would."""
    results = run_directory / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row in rows:
        row["spread_share"] = values[row["problem"]["context"]]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def answers(copy: Path) -> dict[str, str]:
    """Return the output of commands by name."""
    sweep = "sweep --kernels fa2 --context 1k,4k --gpu h200 --name"
    run(copy, *(f"{sweep} {name}" for name in VALUES))
    for name, values in VALUES.items():
        fill(copy / "runs" / name, values)
    commands = {
        "report": "report first --format html,csv,markdown",
        "both": "report first second --out both --format markdown",
        "compare": "compare first second",
        "data": "compare first second --format csv",
        "list": "list quantities",
        "markdown": "list quantities --format markdown",
        "schema": "list quantities --format json",
    }
    results = run(copy, *commands.values())
    assert [code for code, _, _ in results] == [0] * len(commands)
    return {name: result[1] for name, result in zip(commands, results, strict=True)}


@pytest.mark.deep
def test_the_csv_has_it(answers, copy):
    rows = list(csv.DictReader(io.StringIO((copy / "runs/first/report.csv").read_text())))
    assert [row["spread_share"] for row in rows] == ["0.02", "0.08"]


def test_the_page_has_it_with_all_that_was_declared(answers, copy):
    page = (copy / "runs/first/report.html").read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    columns = json.loads(data[1])["columns"]
    [column] = [column for column in columns if column["name"] == "spread_share"]
    assert (column["heading"], column["unit"], column["kind"]) == ("spread", "%", "share")
    assert (column["shown"], column["on_paper"], column["is_number"]) == (True, True, True)
    assert column["meaning"] == "distance of the quartiles over the latency"


def test_markdown_has_it(answers, copy):
    lines = (copy / "runs/first/report.md").read_text().splitlines()
    [head] = [line for line in lines if "latency µs" in line]
    place = [cell.strip() for cell in head.split("|")].index("spread")
    cells = [line.split("|")[place].strip() for line in lines if line.startswith("| b1 h32/8 n")]
    assert cells == ["2.0%", "8.0%"]


def test_runs_are_compared_by_it(answers, copy):
    [head] = [line for line in answers["compare"].splitlines() if "base µs" in line]
    assert "spread" in head
    assert "+50.0%" in answers["compare"]
    ratios = [
        float(row["spread_share_ratio"]) for row in csv.DictReader(io.StringIO(answers["data"]))
    ]
    assert sorted(ratios) == [0.5, 1.5]
    assert "spread" in (copy / "both/report.md").read_text()


def test_lists_documentation_and_schema_have_it(answers):
    [line] = [line for line in answers["list"].splitlines() if line.startswith("spread_share")]
    assert line.split(maxsplit=1)[1].strip() == (
        "spread (1 is 100%): distance of the quartiles over the latency"
    )
    added = (
        "| `spread_share` | spread | 1 is 100% | that ran | distance of the quartiles over the"
        " latency |"
    )
    assert added in answers["markdown"].splitlines()
    field = json.loads(answers["schema"])["properties"]["spread_share"]
    assert (field["kind"], field["description"]) == (
        "share",
        "distance of the quartiles over the latency",
    )
