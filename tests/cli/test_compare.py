"""The command: what it prints in each format, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from compare_examples import ENVIRONMENT, problem, row, run_of, spread, write_run
from typer.testing import CliRunner, Result

from leanbench.cli.main import app

CONTEXTS = (1024, 2048, 4096, 8192)
HOSTILE = "[red]</details> a | b `c`\n@everyone <img src=x>"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments])


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write `before`, and `after` with a slower, a faster, an equal and a crashed cell."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs"
    cells = {(problem(context), "lean"): spread(10.0) for context in CONTEXTS}
    run_of(path / "before", cells)
    changed = dict(zip(CONTEXTS, (12.0, 9.0, 10.0), strict=False))
    rows = [
        row(problem(context), "lean", spread(us), energy_mj=None) for context, us in changed.items()
    ]
    samples = {row["cell"]: spread(us) for row, us in zip(rows, changed.values(), strict=True)}
    rows.append(row(problem(8192), status="crashed", reason=HOSTILE))
    write_run(path / "after", rows, samples, environment={**ENVIRONMENT, "triton": "3.7.0"})
    return path


def test_predictions_have_no_column_of_intervals(tmp_path):
    runs = [
        str(
            write_run(
                tmp_path / name,
                [row(problem(), source="predicted", latency_us=us)],
                source="predicted",
            )
        )
        for name, us in (("base", 10.0), ("new", 12.0))
    ]
    lines = [line.split() for line in run(*runs).stdout.splitlines()]
    at = next(number for number, words in enumerate(lines) if words[:1] == ["problem"])
    assert lines[at][-2:] == ["difference", "verdict"]
    assert lines[at + 2][-4:] == ["10.00", "12.00", "+20.00%", "slower"]


@pytest.mark.usefixtures("runs")
def test_table():
    result = run("before", "after")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"base: runs/before \(NVIDIA H200, \d{4}-\d\d-\d\d \d\d:\d\d\)", lines[0])
    assert re.fullmatch(r"new: runs/after \(NVIDIA H200, \d{4}-\d\d-\d\d \d\d:\d\d\)", lines[1])
    assert lines[2] == "they differ in triton: 3.6.0 → 3.7.0"
    assert lines[4].rstrip() == "lean, measured, all b1 h8 d64 fp16 HND"
    # 11 samples 0.1% apart on either side: of the 121 ratios, the 31st from either end.
    assert [line.split() for line in lines[5:11] if not line.startswith("─")] == [
        ["problem", "base", "µs", "new", "µs", "difference", "verdict", "interval"],
        ["n8192", "10.00", "-", "-", "ok", "→", "crashed"],
        ["n1024", "10.00", "12.00", "+20.00%", "slower", "+19.64%", "to", "+20.36%"],
        ["n2048", "10.00", "9.000", "-10.00%", "faster", "-10.27%", "to", "-9.73%"],
        ["n4096", "10.00", "10.00", "+0.00%", "same", "-0.30%", "to", "+0.30%"],
    ]
    assert "4 cells: 1 no longer ok, 1 slower, 1 faster, 1 same. (measured)" in lines
    # |difference|: 20%, 10% and none.
    at = lines.index(
        "New over base: geometric mean 1.0260x over 3 cells ok on both sides; median |difference|"
        " 10.00%."
    )
    assert lines[at + 1] == "Not the same: 2 cells, geometric mean 1.0392x."
    assert (
        "Worst regression: lean · b1 h8 n1024 d64 fp16 HND, 10.00 → 12.00 µs, +20.00% (95% interval"
        " +19.64%" in (result.stdout)
    )
    assert "Best gain: lean · b1 h8 n2048 d64 fp16 HND, 10.00 → 9.000 µs, -10.00%" in result.stdout
    assert "Hodges and Lehmann" in result.stdout
    # The reason stands as it is, and nothing in it is taken for markup.
    assert "new (crashed): [red]</details> a | b `c`" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


@pytest.mark.usefixtures("runs")
def test_verdicts_are_coloured_in_a_terminal(monkeypatch):
    from rich.console import Console

    from leanbench.cli import output

    monkeypatch.setattr(
        output, "console", lambda: Console(file=sys.stdout, force_terminal=True, width=100)
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = run("before", "after").stdout
    assert "\x1b[31mslower" in text
    assert "\x1b[32mfaster" in text
    assert "\x1b[1;31mok → crashed" in text


def test_the_table_is_capped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = {
        (problem(context), kernel): spread(10.0)
        for context in range(1, 18)
        for kernel in ("lean", "fa2")
    }
    run_of(tmp_path / "a", cells)
    run_of(tmp_path / "b", cells)
    capped, whole = run("a", "b").stdout, run("a", "b", "--all").stdout
    assert capped.count(" same") == 30 + 1
    assert "4 more, use --all" in capped
    assert whole.count(" same") == 34 + 1
    assert "more, use" not in whole
    assert run("a", "b", "--format", "csv").stdout.count("\n") == 35


def test_kernels_stand_in_a_column_where_there_are_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = {(problem(1024), kernel): spread(10.0) for kernel in ("lean", "fa2")}
    run_of(tmp_path / "a", cells)
    run_of(tmp_path / "b", cells)
    words = [
        line.split()
        for line in run("a", "b").stdout.splitlines()
        if line.startswith(("problem", "b1"))
    ]
    # One problem alone keeps its name.
    assert [line[:1] if line[0] == "problem" else line[:7] for line in words] == [
        ["problem"],
        ["b1", "h8", "n1024", "d64", "fp16", "HND", "lean"],
        ["b1", "h8", "n1024", "d64", "fp16", "HND", "fa2"],
    ]
    assert words[0][1] == "kernel"
    assert run("a", "b", "--kernels", "fa2").stdout.count(" same") == 2


@pytest.mark.usefixtures("runs")
def test_markdown():
    text = run("before", "after", "--format", "markdown").stdout
    lines = text.splitlines()
    assert lines[0] == "**4 cells: 1 no longer ok, 1 slower, 1 faster, 1 same.** (measured)"
    assert lines[2].startswith("- **base:** `runs/before` (NVIDIA H200, ")
    assert lines[3].startswith("- **new:** `runs/after` (NVIDIA H200, ")
    assert "- **they differ in triton:** 3.6.0 → 3.7.0" in lines
    assert "lean, measured, all b1 h8 d64 fp16 HND:" in lines
    assert "<details><summary>Every cell (4)</summary>" in lines
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6
    assert (
        table[2] == "| n8192 | 10.00 | - | - | ok → crashed (new (crashed): \\[red\\]"
        "\\</details\\> a \\| b \\`c\\` @<!-- -->everyone \\<img src=x\\>) |  |"
    )
    assert table[3] == "| n1024 | 10.00 | 12.00 | +20.00% | slower | +19.64% to +20.36% |"
    assert lines[-1] == "</details>"
    assert any(line.startswith("- Method: ") and "Hodges and Lehmann" in line for line in lines)


def test_kernel_names_are_no_markup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = {(problem(), kernel): spread(10.0) for kernel in ("[bold]x", "y_|z")}
    run_of(tmp_path / "a", cells)
    run_of(tmp_path / "b", cells)
    assert "[bold]x" in run("a", "b").stdout
    assert "[bold]x, measured" in run("a", "b", "--kernels", "[bold]x").stdout
    markdown = run("a", "b", "--format", "markdown").stdout
    assert "| \\[bold\\]x |" in markdown
    assert "| y\\_\\|z |" in markdown


def test_energy_stands_in_every_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, energy_mj in (("a", 4.0), ("b", 5.0), ("without", None)):
        write_run(tmp_path / name, [row(problem(), "lean", spread(10.0), energy_mj=energy_mj)])
    table = [
        line
        for line in run("a", "b", "--format", "markdown").stdout.splitlines()
        if line.startswith("|")
    ]
    assert table[0].split(" | ")[-2:] == ["interval", "energy |"]
    assert table[2].split(" | ")[-1] == "+25.0% |"
    words = [
        line.split()
        for line in run("a", "b").stdout.splitlines()
        if line.startswith(("problem", "b1"))
    ]
    assert [line[-1] for line in words] == ["energy", "+25.0%"]
    assert "energy" not in run("a", "without").stdout
    (pair,) = json.loads(run("a", "b", "--format", "json").stdout)["pairs"]
    assert (pair["energy_ratio"], pair["base_energy_mj"], pair["new_energy_mj"]) == (1.25, 4.0, 5.0)


@pytest.mark.usefixtures("runs")
def test_json():
    content = json.loads(run("before", "after", "--format", "json", "--margin", "2%").stdout)
    assert (content["source"], content["margin"], content["pairs_without_samples"]) == (
        "measured",
        0.02,
        0,
    )
    assert content["counts"] == {"broken": 1, "slower": 1, "faster": 1, "same": 1}
    assert content["differences"] == [{"field": "triton", "base": ["3.6.0"], "new": ["3.7.0"]}]
    assert content["worst_regression"] == {
        "cell": "lean · b1 h8 n1024 d64 fp16 HND",
        "ratio": pytest.approx(1.2),
    }
    assert [content[side]["run"] for side in ("base", "new")] == ["runs/before", "runs/after"]
    crashed, slower = content["pairs"][:2]
    assert (crashed["outcome"], crashed["verdict"], crashed["ratio"], crashed["reason"]) == (
        "broken",
        None,
        None,
        f"new (crashed): {HOSTILE}",
    )
    assert (slower["verdict"], slower["ratio"], slower["ratio_low"], slower["from_samples"]) == (
        "slower",
        pytest.approx(1.2),
        pytest.approx(1.2 * 0.997, rel=1e-4),
        True,
    )
    assert slower["problem"]["context"] == 1024


@pytest.mark.usefixtures("runs")
def test_csv():
    lines = list(csv.DictReader(io.StringIO(run("before", "after", "--format", "csv").stdout)))
    assert [(line["context"], line["outcome"], line["verdict"]) for line in lines] == [
        ("8192", "broken", ""),
        ("1024", "slower", "slower"),
        ("2048", "faster", "faster"),
        ("4096", "same", "same"),
    ]
    assert float(lines[1]["ratio"]) == pytest.approx(1.2)
    assert (lines[0]["new_latency_us"], lines[0]["reason"]) == ("", f"new (crashed): {HOSTILE}")
    assert lines[1]["base_config"] == "tile_tokens=64"


def test_a_cell_of_csv_is_no_formula(tmp_path):
    for name in ("a", "b"):
        run_of(tmp_path / name, {(problem(), "=A1"): spread(10.0)})
    result = run(str(tmp_path / "a"), str(tmp_path / "b"), "--format", "csv")
    [line] = csv.DictReader(io.StringIO(result.stdout))
    assert (line["base_kernel"], line["new_kernel"]) == ("'=A1", "'=A1")
    assert line["base_latency_us"] == "10.0"


@pytest.mark.usefixtures("runs")
def test_fail_above_names_the_cells_on_stderr():
    result = run("before", "after", "--fail-above", "5%", "--format", "csv")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "--fail-above 5%: 2 of 4 cells fail"
    assert lines[1].startswith("  lean · b1 h8 n8192 d64 fp16 HND: ok → crashed, new (crashed): ")
    assert any(
        line.startswith("  lean · b1 h8 n1024 d64 fp16 HND: 10.00 → 12.00 µs, +20.00%")
        for line in lines
    )
    assert not any("n2048" in line or "n4096" in line for line in lines)
    # The table is whole all the same.
    assert len(list(csv.DictReader(io.StringIO(result.stdout)))) == 4


@pytest.mark.parametrize(("threshold", "exit_code"), [("19%", 1), ("21%", 0), ("0%", 1)])
@pytest.mark.usefixtures("runs")
def test_fail_above_is_a_threshold_on_the_median(threshold, exit_code, tmp_path):
    run_of(tmp_path / "slow", {(problem(context), "lean"): spread(12.0) for context in CONTEXTS})
    assert run("before", str(tmp_path / "slow"), "--fail-above", threshold).exit_code == exit_code
    # The other way round everything is faster.
    assert run(str(tmp_path / "slow"), "before", "--fail-above", "0%").exit_code == 0


def test_a_slowdown_that_is_not_significant_does_not_fail(tmp_path):
    for name, middle in (("a", 10.0), ("b", 11.0)):
        run_of(tmp_path / name, {(problem(), "lean"): spread(middle, step=0.05)})
    result = run(str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "5%")
    assert "1 cell: 1 ambiguous." in result.stdout
    assert (result.exit_code, result.stderr) == (0, "")


def test_cells_without_a_partner_are_counted_and_named(tmp_path):
    run_of(
        tmp_path / "a", {(problem(context), "lean"): spread(10.0) for context in (1, 2, 3, 4, 5)}
    )
    run_of(tmp_path / "b", {(problem(context), "lean"): spread(10.0) for context in (5, 6)})
    result = run(str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "5%")
    label = "lean · b1 h8 n{} d64 fp16 HND".format
    named = "; ".join(label(context) for context in (1, 2, 3))
    assert f"Only in {tmp_path / 'a'}: 4 cells, {named} and 1 more." in result.stdout.splitlines()
    assert f"Only in {tmp_path / 'b'}: 1 cell, {label(6)}." in result.stdout.splitlines()
    assert result.exit_code == 0
    assert (
        result.stderr
        == "--fail-above 5% does not judge what NEW did not run: cells in BASE alone, 4\n"
    )


def test_runs_without_samples_say_so(tmp_path):
    for name, middle in (("a", 10.0), ("b", 12.0)):
        write_run(tmp_path / name, [row(problem(), "lean", spread(middle))])
    text = run(str(tmp_path / "a"), str(tmp_path / "b")).stdout
    assert (
        "No raw samples for 1 of 1 cell: the rows' own 95% intervals stand in, so that the ratio's"
        " holds with 90%." in (text)
    )
    assert "+20.00% (90% interval +19.04% to +20.96%)" in text


def test_a_line_that_was_cut_off_is_told_on_stderr(tmp_path):
    cells = {(problem(), "lean"): spread(10.0)}
    run_of(tmp_path / "a", cells)
    with (run_of(tmp_path / "b", cells) / "results.jsonl").open("a") as file:
        file.write('{"cell": "le')
    result = run(str(tmp_path / "a"), str(tmp_path / "b"))
    assert result.exit_code == 0
    assert "b: results.jsonl line 2 was cut off in writing and is left out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["before", "aftre"], "there is no run 'aftre', did you mean 'after'?"),
        (["before", "after", "--margin", "0.01"], "--margin '0.01' is "),
        (["before", "after", "--margin", "100%"], "--margin '100%' is above the maximum of 99%"),
        (["before", "after", "--fail-above", "-5%"], "--fail-above '-5%' is "),
        (["before", "after", "--format", "html"], "--format 'html' is not supported"),
        (["before", "after", "--kernels", "lean,"], "--kernels 'lean,' has an empty entry: separa"),
        (["before", "after", "--kernels", "fa2"], "runs/before and runs/after ran no kernel 'fa2'"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_bad_input_is_one_sentence(arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {sentence}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_reference_runs_compare(pytestconfig):
    run_dir = pytestconfig.rootpath / "reports/h200/model/paper-fig7a"
    content = json.loads(
        run(f"{run_dir}:fixed_split", f"{run_dir}:lean", "--format", "json").stdout
    )
    assert (content["pairs_without_samples"], len(content["pairs"])) == (0, 10)
    assert content["best_gain"]["cell"] == "fixed_split → lean · b1 h56 n1024 d64 fp16 HND"
    # 8.8 and 9.6 µs.
    assert content["best_gain"]["ratio"] == pytest.approx(8.8 / 9.6, rel=0.01)
    content = json.loads(run(str(run_dir), f"{run_dir}-again", "--format", "json").stdout)
    assert content["counts"] == {"same": 30}


def test_a_warning_stands_beside_the_verdict_in_every_format(tmp_path):
    unsafe = "the GPU's own clock gives 9.00 µs a launch: neither figure is safe"
    other = "the GPU's own clock gives 8.00 µs a launch: neither figure is safe"
    base = [row(problem(context), "lean", spread(10.0)) for context in CONTEXTS[:3]]
    new = [
        row(problem(context), "lean", spread(us), warnings=warnings)
        for context, us, warnings in zip(
            CONTEXTS, (10.0, 9.0, 10.0), ([unsafe], [other], []), strict=False
        )
    ]
    paths = [
        str(write_run(tmp_path / name, rows)) for name, rows in (("before", base), ("after", new))
    ]
    told = f"! a row has a warning, in 2 cells. lean (2 rows): at worst, {unsafe}."
    table = run(*paths, "--all").stdout
    lines = [line.split() for line in table.splitlines() if re.match(r"n\d", line)]
    verdicts = {words[0]: " ".join(words[4:-3]) for words in lines}
    assert verdicts == {"n1024": "same !", "n2048": "faster !", "n4096": "same"}
    assert told in " ".join(table.split())
    markdown = run(*paths, "--format", "markdown").stdout
    assert "| same ! |" in markdown
    assert "| faster ! |" in markdown
    assert told in markdown
    pairs = json.loads(run(*paths, "--format", "json").stdout)["pairs"]
    assert {pair["problem"]["context"]: pair["new_warnings"] for pair in pairs} == {
        1024: [unsafe],
        2048: [other],
        4096: [],
    }
    lines = list(csv.DictReader(io.StringIO(run(*paths, "--format", "csv").stdout)))
    assert [line["new_warnings"] for line in lines] == [other, unsafe, ""]
    assert [line["base_warnings"] for line in lines] == ["", "", ""]


def test_host_times_say_what_they_are_of_where_they_are_shown(tmp_path):
    fields = {"lean": {"host_us": 40.0}, "fa2": {"host_us": 10.0}}
    rows = [row(problem(), name, spread(10.0), **own) for name, own in fields.items()]
    path = write_run(tmp_path / "run", rows)
    for format_ in ("table", "markdown"):
        shown = run(f"{path}:lean", f"{path}:fa2", "--format", format_).stdout
        assert "host: of lean its whole public call" in shown
    bare = write_run(tmp_path / "bare", [row(problem(), name, spread(10.0)) for name in fields])
    assert "host:" not in run(f"{bare}:lean", f"{bare}:fa2").stdout
