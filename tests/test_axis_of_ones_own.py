"""The axis of CONTRIBUTING.md, declared once in a copy of the sources, is known everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from copied_sources import ROOT, copy_sources, run

#: Grid and kernel of the sweeps; cells with a temperature are rejected.
SWEEP = """
name = "heated"
kernels = ["fa2"]
context = 1024
temperature = ["none", 30]
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the rooms and one more field of AttentionProblem."""
    folder = tmp_path_factory.mktemp("copy")
    copy_sources(folder)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    field = re.search(r"An axis of your own.*?```python\n(.*?)```", text, re.DOTALL)
    assert field is not None
    problem = folder / "leanbench/core/problem.py"
    source = problem.read_text(encoding="utf-8")
    place = "    def __post_init__"
    assert source.count(place) == 1
    source = source.replace(place, f"{field[1]}\n{place}")
    source = source.replace("import Axis, Capacity", "import Axis, Capacity, Decimals")
    problem.write_text(source, encoding="utf-8")
    (folder / "heated.toml").write_text(SWEEP, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def answers(copy: Path) -> dict[str, str]:
    """Return the output of commands by name."""
    commands = {
        "help": "sweep --help",
        "list": "list axes",
        "dry run": "sweep heated.toml --dry-run --gpu h200",
        "flag": "sweep --temperature 50,none --context 1k --kernels lean --dry-run --gpu h200",
        "wrong": "sweep --temperature 2000 --dry-run",
        "trace": "trace h32/8 n1k d128 t30 --kernels fa2 --gpu h200",
        "sweep": "sweep heated.toml --gpu h200 --name first",
        "again": "sweep heated.toml --temperature none,50 --gpu h200 --name second",
        "report": "report first --format markdown",
        "compare": "compare first second --format json",
    }
    results = run(copy, *commands.values())
    return {name: result[1] + result[2] for name, result in zip(commands, results, strict=True)}


def rows(copy: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((copy / "runs/first/report.csv").read_text())))


@pytest.mark.deep
def test_it_is_a_flag_with_its_help_and_default(answers):
    assert "--temperature LIST" in answers["help"]
    assert "Scores are divided by it: 0.7,30" in answers["help"]
    [line] = [line for line in answers["list"].splitlines() if line.startswith("--temperature")]
    assert line.split()[:3] == ["--temperature", "t", "none"]


def test_a_sweep_file_and_a_flag_make_cells_and_a_wrong_value_is_a_sentence(answers):
    labels = ["b1 h32/8 n1024 d128 fp16 HND", "b1 h32/8 n1024 d128 t30 fp16 HND"]
    for label in labels:
        assert label in answers["dry run"]
    assert "b1 h32/8 n1024 d128 t50 fp16 HND" in answers["flag"]
    assert answers["wrong"].startswith("Error: temperature 2000.0 is above the maximum of 1000")


def test_kernels_that_do_not_know_it_refuse_it(answers, copy):
    assert (
        "fa2 takes no temperature, this problem has temperature 30: leave it out"
        in answers["trace"]
    )
    assert [(row["temperature"], row["status"]) for row in rows(copy)] == [
        ("none", "ok"),
        ("30", "unsupported"),
    ]


def test_rows_keep_it_and_problems_without_it_are_as_ever(answers, copy):
    lines = (copy / "runs/first/results.jsonl").read_text().splitlines()
    problems = [json.loads(line)["problem"] for line in lines]
    assert [problem.get("temperature", "absent") for problem in problems] == ["absent", 30.0]
    cells = [json.loads(line)["cell"] for line in lines]
    assert cells[0] == "fa2-b1-h32-8-n1024-d128-fp16-HND-default-d00019f9"
    assert cells[1].startswith("fa2-b1-h32-8-n1024-d128-t30-fp16-HND-default-")


def test_reports_have_it(answers, copy):
    page = (copy / "runs/first/report.html").read_text()
    assert (
        '"label": "temperature", "name": "temperature", "values": ["none", "30"]' in page
    )  # a selector
    assert '"heading": "temperature"' in page  # a column
    markdown = (copy / "runs/first/report.md").read_text()
    assert "b1 h32/8 n1024 d128 t30 fp16 HND" in markdown


def test_a_comparison_pairs_by_it(answers):
    compared = json.loads(answers["compare"])
    assert [pair["problem"].get("temperature") for pair in compared["pairs"]] == [None]
    assert compared["only_in_base"] == ["fa2 · b1 h32/8 n1024 d128 t30 fp16 HND"]
    assert compared["only_in_new"] == ["fa2 · b1 h32/8 n1024 d128 t50 fp16 HND"]


def test_the_command_of_a_row_repeats_it(answers, copy):
    commands = [row["command"] for row in rows(copy)]
    assert ["--temperature 30" in command for command in commands] == [False, True]
