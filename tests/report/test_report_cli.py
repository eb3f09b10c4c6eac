import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from example_runs import WriteRun, measured_rows, problem, row, rows_with_all_fields
from typer.testing import CliRunner

from leanbench.cli.report import report
from leanbench.core.errors import UserError
from leanbench.core.paths import REPORTS
from leanbench.records.reading import read_run
from leanbench.report import write_report

app = typer.Typer()
app.command()(report)


def test_prints_the_paths_and_nothing_else(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    # A report replaces the one before it.
    (directory / "report.csv").write_text("old")
    result = CliRunner().invoke(app, [str(directory)])
    assert result.exit_code == 0
    assert result.output == f"{directory / 'report.html'}\n{directory / 'report.csv'}\n"
    lines = (directory / "report.csv").read_text().splitlines()
    assert lines[0].startswith("problem,batch,q_heads,kv_heads,context,")
    assert len(lines) == 10
    assert (directory / "report.html").read_text().startswith("<!doctype html>")
    names = {path.name for path in directory.iterdir()}
    assert names == {*"manifest.json results.jsonl report.html report.csv".split()}


def test_out_and_format(write_run: WriteRun, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    words = [str(write_run(measured_rows())), "--out", str(out), "--format", "csv"]
    assert CliRunner().invoke(app, words).output == f"{out / 'report.csv'}\n"
    assert [path.name for path in out.iterdir()] == ["report.csv"]


def test_a_published_run_is_left_as_it_is(tmp_path: Path, monkeypatch) -> None:
    run = REPORTS / "h200" / "batch-invariant"
    before = sorted(run.iterdir())
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(run)
    for name in (run, link):
        result = CliRunner().invoke(app, [str(name), "--format", "markdown,csv"])
        out = Path("runs/h200/batch-invariant")
        assert result.output == f"{out / 'report.md'}\n{out / 'report.csv'}\n"
        assert (out / "report.md").read_text().startswith("# ")
    assert sorted(run.iterdir()) == before


@pytest.mark.deep
def test_a_run_that_lacks_cells_says_so_and_how_to_go_on(write_run: WriteRun, monkeypatch) -> None:
    rows = measured_rows()
    cells = [*(row["cell"] for row in rows), "a", "b"]
    directory = write_run(rows, folder="killed", cells=cells)
    monkeypatch.chdir(directory.parent)
    result = CliRunner().invoke(app, [str(directory), "--format", "html,markdown"])
    assert result.exit_code == 0
    left = "2 of 11 cells have no row yet: finish it with"
    command = "leanbench sweep example --out . --name killed --resume"
    sentence = f"The run is not finished, {left} `{command}`."
    assert sentence in (directory / "report.html").read_text()
    note = f"- **Note:** The run is not finished, {left} \\`{command}\\`. Rows that were timed"
    assert note in (directory / "report.md").read_text()
    assert read_run(directory).unfinished == f"{left} `{command}`"
    # All cells have a row, or nobody knows which there are.
    for number, known in enumerate((cells[:-2], None, "x", [1])):
        finished = write_run(rows, folder=f"finished{number}", cells=known)
        assert read_run(finished).unfinished == ""
        [path] = write_report(finished, finished, ["markdown"])
        assert "not finished" not in path.read_text()
    no_command = read_run(write_run([], folder="none", cells=["a"], command=None))
    assert no_command.unfinished == (
        "1 of 1 cell has no row yet: finish it with its command and --resume"
    )


@pytest.mark.parametrize(
    ("folder", "command", "advised"),
    [
        ("runs", "leanbench sweep x", "leanbench sweep x"),
        ("runs", "leanbench sweep x --out there", "leanbench sweep x"),
        ("kept/of it", "leanbench sweep x", "leanbench sweep x --out 'kept/of it'"),
        ("kept", "leanbench sweep x --out=there -q", "leanbench sweep x -q --out kept"),
        ("kept", "leanbench sweep 'x", "leanbench sweep 'x --out kept"),
    ],
)
def test_the_advised_command_finds_the_run(
    write_run: WriteRun, tmp_path, monkeypatch, folder: str, command: str, advised: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    written = write_run([], folder="moved", cells=["a"], command=command)
    directory = written.rename(tmp_path / folder / "moved")
    assert read_run(directory).go_on == f"finish it with `{advised} --name moved --resume`"


def test_the_command_says_what_a_run_lacks(write_run, caplog):
    directory = write_run([row(problem(), "lean", 10.0)], cells=["a", "b", "c"])
    write_report(directory, directory)
    # A sweep has printed it.
    assert not caplog.messages
    assert CliRunner().invoke(app, [str(directory)]).exit_code == 0
    [said] = caplog.messages
    assert said.startswith(f"{directory}: 3 of 3 cells have no row yet: finish it with `leanbench ")


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_run_without_rows_replaces_no_report(write_run: WriteRun, is_missing: bool) -> None:
    directory = write_run([], folder="killed", cells=["a"])
    if is_missing:
        (directory / "results.jsonl").unlink()
    (directory / "report.html").write_text("of yesterday")
    result = CliRunner().invoke(app, [str(directory)])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == (
        f"{directory} has no row to report, its results.jsonl is missing or empty: finish it with"
        f" `leanbench sweep example --out {directory.parent} --name killed --resume`"
    )
    assert (directory / "report.html").read_text() == "of yesterday"
    assert not (directory / "report.csv").exists()


def test_unknown_format_suggests_the_nearest(write_run: WriteRun) -> None:
    result = CliRunner().invoke(app, [str(write_run([])), "--format", "html,cvs"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "there is no report format 'cvs', did you mean 'csv'?"


def test_parquet_holds_the_csvs_rows(write_run: WriteRun) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    import pandas as pd

    directory = write_run(rows_with_all_fields())
    csv, parquet = write_report(directory, directory, ["csv", "parquet"])
    read = pd.read_parquet(parquet)
    assert read["latency_us"].tolist() == [10.0, 20.0, 10.0, 200.0, 1600.0, 2.0]
    assert list(read.columns) == list(pd.read_csv(csv).columns)
    # A count that was not measured is null, and those that were stay whole numbers.
    assert str(read["registers_per_thread"].dtype) == "Int64"


@pytest.mark.skipif(any(map(find_spec, ("pyarrow", "fastparquet"))), reason="pyarrow is installed")
def test_parquet_without_its_library_says_what_to_install(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    with pytest.raises(UserError, match=r"Parquet file needs pyarrow, .* pip install pyarrow"):
        write_report(directory, directory, ["csv", "parquet"])
    assert not (directory / "report.csv").exists()


def test_a_kernels_name_ends_no_cell_and_no_block_of_markdown(write_run: WriteRun) -> None:
    rows = [*measured_rows(), row(problem(), "a|b</details>`x`", 5.0, energy_mj=1.0)]
    directory = write_run(rows, name="a_run")
    [path] = write_report(directory, directory, ["markdown"])
    text = path.read_text(encoding="utf-8")
    assert path == directory / "report.md"
    assert text.startswith("# a\\_run\n\n")
    assert text.count("\n</details>\n") == text.count("<details>")
    shown = [line for line in text.splitlines() if line.startswith("| b1 h56 n1024")]
    [line] = [line for line in shown if "a\\|b" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == 10


def test_output_that_cannot_be_written_is_said_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"write .*file/out \(not a directory\): choose another f"):
        write_report(tmp_path / "no run here", tmp_path / "file" / "out")


def test_target_that_is_a_folder(write_run: WriteRun) -> None:
    directory = write_run([])
    (directory / "report.csv").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*report\.csv: it is a folder"):
        write_report(directory, directory)
    assert not (directory / "report.html").exists()
