"""The command: what it prints in each format, and how it ends."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.running import invoke, refusal
from compare_examples import ENVIRONMENT, problem, row, run_of, spread, write_run
from typer.testing import Result

CONTEXTS = (1024, 2048, 4096, 8192)
HOSTILE = "[red]</details> a | b `c`\n@everyone <img src=x>"


ONE = {(problem(), "lean"): spread(10.0)}
LABEL = "b1 h8 n1024 d64 fp16 HND"


def run(*arguments: str) -> Result:
    return invoke("compare", *arguments)


def in_format(kind: str, *arguments: str) -> Any:
    """Return what the command prints, parsed if it is JSON or CSV."""
    text = run(*arguments, "--format", kind).stdout
    if kind == "csv":
        return [*csv.DictReader(text.splitlines(keepends=True))]
    return json.loads(text) if kind == "json" else text


def write_two(base: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Write runs a and b of these samples."""
    run_of(Path("a"), base)
    run_of(Path("b"), new)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `before`, and `after` with a slower, a faster, an equal and a crashed cell."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs")
    run_of(path / "before", {(problem(context), "lean"): spread(10.0) for context in CONTEXTS})
    changed = dict(zip(CONTEXTS, (12.0, 9.0, 10.0), strict=False))
    rows = [row(problem(n), "lean", spread(us), energy_mj=None) for n, us in changed.items()]
    samples = {row["cell"]: spread(us) for row, us in zip(rows, changed.values(), strict=True)}
    rows.append(row(problem(8192), status="crashed", reason=HOSTILE))
    write_run(path / "after", rows, samples, environment={**ENVIRONMENT, "triton": "3.7.0"})


def test_predictions_have_no_column_of_intervals():
    for name, us in (("a", 10.0), ("b", 12.0)):
        rows = [row(problem(), source="predicted", latency_us=us)]
        write_run(Path(name), rows, source="predicted")
    lines = [line.split() for line in run("a", "b").stdout.splitlines()]
    at = next(number for number, words in enumerate(lines) if words[:1] == ["problem"])
    assert lines[at][-2:] == ["difference", "verdict"]
    assert lines[at + 2][-4:] == ["10.00", "12.00", "+20.00%", "slower"]


def test_table_and_markdown(snapshot):
    result = run("before", "after")
    assert (result.exit_code, result.stderr) == (0, "")
    # The reason of a failure is not taken for markup.
    assert "\x1b" not in result.stdout
    text = result.stdout + in_format("markdown", "before", "after")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE AND TIME", text)
    assert "\n".join(line.rstrip() for line in text.splitlines()) == snapshot


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


def test_the_table_is_capped():
    kernels = ("lean", "fa2")
    cells = {(problem(n), kernel): spread(10.0) for n in range(1, 18) for kernel in kernels}
    write_two(cells, cells)
    capped, whole = run("a", "b").stdout, run("a", "b", "--all").stdout
    assert capped.count(" same") == 30 + 1
    assert "4 more, use --all" in capped
    assert whole.count(" same") == 34 + 1
    assert "more, use" not in whole
    assert len(in_format("csv", "a", "b")) == 34


def test_kernels_stand_in_a_column_where_there_are_several():
    cells = {(problem(), kernel): spread(10.0) for kernel in ("lean", "fa2")}
    write_two(cells, cells)
    lines = [" ".join(line.split()) for line in run("a", "b").stdout.splitlines()]
    assert any(line.startswith("problem kernel ") for line in lines)
    # One problem alone keeps its name.
    shown = [line.split()[6] for line in lines if line.startswith(LABEL)]
    assert shown == ["lean", "fa2"]
    assert run("a", "b", "--kernels", "fa2").stdout.count(" same") == 2


def test_kernel_names_are_no_markup():
    cells = {(problem(), kernel): spread(10.0) for kernel in ("[bold]x", "y_|z")}
    write_two(cells, cells)
    assert "[bold]x" in run("a", "b").stdout
    assert "[bold]x, measured" in run("a", "b", "--kernels", "[bold]x").stdout
    markdown = in_format("markdown", "a", "b")
    assert "| \\[bold\\]x |" in markdown
    assert "| y\\_\\|z |" in markdown


def test_energy_stands_in_every_format():
    for name, energy_mj in (("a", 4.0), ("b", 5.0), ("without", None)):
        write_run(Path(name), [row(problem(), "lean", spread(10.0), energy_mj=energy_mj)])
    table = [line for line in in_format("markdown", "a", "b").splitlines() if line.startswith("|")]
    assert table[0].split(" | ")[-2:] == ["interval", "energy |"]
    assert table[2].split(" | ")[-1] == "+25.0% |"
    lines = [
        line for line in run("a", "b").stdout.splitlines() if line[:7] in ("problem", "b1 h8 n")
    ]
    assert [line.split()[-1] for line in lines] == ["energy", "+25.0%"]
    assert "energy" not in run("a", "without").stdout
    [pair] = in_format("json", "a", "b")["pairs"]
    assert (pair["energy_ratio"], pair["base_energy_mj"], pair["new_energy_mj"]) == (1.25, 4.0, 5.0)


def test_json():
    content = in_format("json", "before", "after", "--margin", "2%")
    assert (content["source"], content["margin"]) == ("measured", 0.02)
    assert content["pairs_without_samples"] == 0
    assert content["counts"] == {"broken": 1, "slower": 1, "faster": 1, "same": 1}
    assert content["differences"] == [{"field": "triton", "base": ["3.6.0"], "new": ["3.7.0"]}]
    worst = {"cell": f"lean · {LABEL}", "ratio": pytest.approx(1.2)}
    assert content["worst_regression"] == worst
    assert [content[side]["run"] for side in ("base", "new")] == ["runs/before", "runs/after"]
    crashed, slower = content["pairs"][:2]
    assert (crashed["outcome"], crashed["verdict"], crashed["ratio"]) == ("broken", None, None)
    assert crashed["reason"] == f"new (crashed): {HOSTILE}"
    assert (slower["verdict"], slower["ratio"]) == ("slower", pytest.approx(1.2))
    assert slower["ratio_low"] == pytest.approx(1.2 * 0.997, rel=1e-4)
    assert slower["from_samples"] is True
    assert slower["problem"]["context"] == 1024


def test_csv():
    lines = in_format("csv", "before", "after")
    shown = [f"{line['context']} {line['outcome']} {line['verdict']}" for line in lines]
    assert shown == ["8192 broken ", "1024 slower slower", "2048 faster faster", "4096 same same"]
    assert float(lines[1]["ratio"]) == pytest.approx(1.2)
    assert (lines[0]["new_latency_us"], lines[0]["reason"]) == ("", f"new (crashed): {HOSTILE}")
    assert lines[1]["base_config"] == "tile_tokens=64"


def test_a_cell_of_csv_is_no_formula():
    cells = {(problem(), "=A1"): spread(10.0)}
    write_two(cells, cells)
    [line] = in_format("csv", "a", "b")
    assert (line["base_kernel"], line["new_kernel"]) == ("'=A1", "'=A1")
    assert line["base_latency_us"] == "10.0"


def test_fail_above_names_the_cells_on_stderr():
    result = run("before", "after", "--fail-above", "5%", "--format", "csv")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "--fail-above 5%: 2 of 4 cells fail"
    assert lines[1].startswith("  lean · b1 h8 n8192 d64 fp16 HND: ok → crashed, new (crashed): ")
    slower = f"  lean · {LABEL}: 10.00 → 12.00 µs, +20.00%"
    assert any(line.startswith(slower) for line in lines)
    assert not any("n2048" in line or "n4096" in line for line in lines)
    # The table is whole all the same.
    assert len([*csv.DictReader(result.stdout.splitlines(keepends=True))]) == 4


def test_fail_above_is_a_threshold_on_the_median():
    write_two(ONE, {(problem(), "lean"): spread(12.0)})
    for threshold, exit_code in (("19%", 1), ("21%", 0), ("0%", 1)):
        assert run("a", "b", "--fail-above", threshold).exit_code == exit_code
    # The other way round everything is faster.
    assert run("b", "a", "--fail-above", "0%").exit_code == 0


def test_cells_without_a_partner_are_counted_and_named():
    base, new = (
        {(problem(context), "lean"): spread(10.0) for context in contexts}
        for contexts in ((1, 2, 3, 4, 5), (5, 6))
    )
    write_two(base, new)
    result = run("./a", "./b", "--fail-above", "5%")
    label = "lean · b1 h8 n{} d64 fp16 HND".format
    named = "; ".join(label(context) for context in (1, 2, 3))
    lines = result.stdout.splitlines()
    assert f"Only in a: 4 cells, {named} and 1 more." in lines
    assert f"Only in b: 1 cell, {label(6)}." in lines
    assert result.exit_code == 0
    judged = "--fail-above 5% does not judge what NEW did not run: cells in BASE alone, 4\n"
    assert result.stderr == judged


def test_runs_without_samples_say_so():
    for name, middle in (("a", 10.0), ("b", 12.0)):
        write_run(Path(name), [row(problem(), "lean", spread(middle))])
    text = run("a", "b").stdout
    instead = "the rows' own 95% intervals stand in, so that the ratio's holds with 90%."
    assert f"No raw samples for 1 of 1 cell: {instead}" in text
    assert "+20.00% (90% interval +19.04% to +20.96%)" in text


def test_a_line_that_was_cut_off_is_told_on_stderr():
    write_two(ONE, ONE)
    with Path("b", "results.jsonl").open("a") as file:
        file.write('{"cell": "le')
    result = run("a", "b")
    assert result.exit_code == 0
    assert "b: results.jsonl line 2 was cut off in writing and is left out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("aftre", "there is no run 'aftre', did you mean 'after'?"),
        ("after --margin 0.01", "--margin '0.01' is "),
        ("after --margin 100%", "--margin '100%' is above the maximum of 99%"),
        ("after --fail-above -5%", "--fail-above '-5%' is "),
        ("after --format html", "--format 'html' is not supported"),
        ("after --kernels lean,", "--kernels 'lean,' has an empty entry: separa"),
        ("after --kernels fa2", "runs/before and runs/after ran no kernel 'fa2'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    assert refusal("compare", "before", *arguments.split()).startswith(sentence)


def test_reference_runs_compare(pytestconfig):
    run_dir = pytestconfig.rootpath / "reports/h200/model/paper-fig7a"
    content = in_format("json", f"{run_dir}:fixed_split", f"{run_dir}:lean")
    assert (content["pairs_without_samples"], len(content["pairs"])) == (0, 10)
    assert content["best_gain"]["cell"] == "fixed_split → lean · b1 h56 n1024 d64 fp16 HND"
    # 8.8 and 9.6 µs.
    assert content["best_gain"]["ratio"] == pytest.approx(8.8 / 9.6, rel=0.01)
    content = in_format("json", str(run_dir), f"{run_dir}-again")
    assert content["counts"] == {"same": 30}


def test_a_warning_stands_beside_the_verdict_in_every_format():
    unsafe = "the GPU's own clock gives 9.00 µs a launch: neither figure is safe"
    other = "the GPU's own clock gives 8.00 µs a launch: neither figure is safe"
    cells = zip(CONTEXTS, (10.0, 9.0, 10.0), ([unsafe], [other], []), strict=False)
    write_run(Path("a"), [row(problem(context), "lean", spread(10.0)) for context in CONTEXTS[:3]])
    new = [row(problem(n), "lean", spread(us), warnings=warnings) for n, us, warnings in cells]
    write_run(Path("b"), new)
    paths = ("a", "b")
    told = f"! a row has a warning, in 2 cells. lean (2 rows): at worst, {unsafe}."
    table = run(*paths, "--all").stdout
    lines = [line.split() for line in table.splitlines() if re.match(r"n\d", line)]
    verdicts = {words[0]: " ".join(words[4:-3]) for words in lines}
    assert verdicts == {"n1024": "same !", "n2048": "faster !", "n4096": "same"}
    assert told in " ".join(table.split())
    markdown = in_format("markdown", *paths)
    assert "| same ! |" in markdown
    assert "| faster ! |" in markdown
    assert told in markdown
    pairs = in_format("json", *paths)["pairs"]
    warned = {pair["problem"]["context"]: pair["new_warnings"] for pair in pairs}
    assert warned == {1024: [unsafe], 2048: [other], 4096: []}
    lines = in_format("csv", *paths)
    assert [line["new_warnings"] for line in lines] == [other, unsafe, ""]
    assert [line["base_warnings"] for line in lines] == ["", "", ""]


def test_host_times_say_what_they_are_of_where_they_are_shown():
    host_us = {"lean": 40.0, "fa2": 10.0}
    rows = [row(problem(), name, spread(10.0), host_us=us) for name, us in host_us.items()]
    write_run(Path("run"), rows)
    for kind in ("table", "markdown"):
        shown = in_format(kind, "run:lean", "run:fa2")
        assert "host: of lean its whole public call" in shown
    write_run(Path("bare"), [row(problem(), name, spread(10.0)) for name in host_us])
    assert "host:" not in run("bare:lean", "bare:fa2").stdout
