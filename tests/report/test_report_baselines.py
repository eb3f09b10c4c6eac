"""The kernel that others are compared with: every form of a report names the same."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, data_of, problem, row

from leanbench.cli.sweep_run import show_ending
from leanbench.records.reading import read_run
from leanbench.report import write_report

pytestmark = pytest.mark.deep

Said = pytest.CaptureFixture[str]
MLA = Path(__file__).parents[2] / "reports" / "h200" / "mla"


def named_by(out: Path) -> dict[str, set[str]]:
    """Collect the baselines that each file of a report names."""
    page = (out / "report.html").read_text()
    data = data_of(page)
    speedup = next(column for column in data["columns"] if column["name"] == "speedup")
    markdown = (out / "report.md").read_text().replace("\\", "")
    return {
        "page": {data["baseline"], speedup["heading"].removeprefix("speedup of ")},
        "sentences of the page": by_how_much(page),
        "CSV": {line["baseline"] for line in rows_of(out)},
        "sentences": by_how_much(markdown),
        "every row": set(re.findall(r"\| speedup of ([\w ]+) ", markdown)),
    }


def by_how_much(text: str) -> set[str]:
    return set(re.findall(r"(\w+) is [\d.]+× as fast as", text))


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "report.csv").read_text().splitlines()))


def report(out: Path, *runs: Path, baseline: str | None = None) -> Path:
    formats = ("html", "csv", "markdown")
    write_report(runs[0], out, formats, runs[1:], baseline)
    return out


def libraries(write_run: WriteRun) -> Path:
    """Write a run whose first kernel supports no problem and whose `lean` row is a refusal."""
    refused: dict[str, Any] = {"status": "unsupported", "reason": "x"}
    rows = []
    for shape in (problem(1024), problem(4096)):
        rows += [row(shape, name, **refused) for name in ("lean", "flash_mla")]
        rows += [row(shape, "flashinfer", 10.0), row(shape, "flash_attn_3", 15.0)]
    return write_run(rows, folder="libraries")


def check_all(out: Path, run: Path, kernel: str, baseline: str | None, said: Said) -> None:
    """Every file of a report, and what ends a sweep in the terminal, names the kernel."""
    show_ending(read_run(run), baseline)
    terminal = said.readouterr().out
    named = named_by(report(out, run, baseline=baseline))
    named["terminal"] = by_how_much(terminal)
    named["terminal's columns"] = set(re.findall(r"(\w+) vs \w+", terminal))
    assert named == {form: {kernel} for form in named}


def test_every_form_names_the_baseline_of_latent_caches(tmp_path: Path, capsys: Said) -> None:
    check_all(tmp_path, MLA, "lean_mla", None, capsys)


@pytest.mark.parametrize(
    ("chosen", "kernel"), [(None, "flashinfer"), ("flash_attn_3", "flash_attn_3")]
)
def test_every_form_names_the_baseline_of_libraries_alone(
    tmp_path: Path, write_run: WriteRun, capsys: Said, chosen: str | None, kernel: str
) -> None:
    check_all(tmp_path, libraries(write_run), kernel, chosen, capsys)


def test_each_run_has_its_own_in_every_form(tmp_path: Path, write_run: WriteRun) -> None:
    rows = [row(problem(), "fa2", 30.0), row(problem(), "lean", 10.0)]
    out = report(tmp_path, libraries(write_run), write_run(rows, folder="with-lean"))
    named = named_by(out)
    for form in ("CSV", "sentences of the page", "sentences"):
        assert named[form] == {"lean", "flashinfer"}, form
    # In a heading over rows of both none is named; one that has a mark of its own is lean.
    assert named["page"] == {"the baseline", "lean"}
    assert named["every row"] == {"the baseline"}
    lines = [line for line in rows_of(out) if line["speedup"]]
    compared = {(line["kernel"], line["baseline"], line["speedup"]) for line in lines}
    assert compared == {("flash_attn_3", "flashinfer", "1.5"), ("fa2", "lean", "3.0")}
