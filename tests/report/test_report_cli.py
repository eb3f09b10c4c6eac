from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from example_runs import WriteRun, measured_rows
from typer.testing import CliRunner

from leanbench.cli.report import report
from leanbench.errors import UserError
from leanbench.report import write_report

app = typer.Typer()
app.command()(report)


def test_prints_the_paths_and_nothing_else(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    result = CliRunner().invoke(app, [str(directory)])
    assert result.exit_code == 0
    assert result.output == f"{directory / 'report.html'}\n{directory / 'report.csv'}\n"
    assert (directory / "report.csv").read_text().startswith("problem,batch,q_heads,kv_heads,context,")
    assert (directory / "report.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in directory.iterdir()} == {
        "manifest.json",
        "results.jsonl",
        "report.html",
        "report.csv",
    }


def test_out_and_format(write_run: WriteRun, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = CliRunner().invoke(app, [str(write_run(measured_rows())), "--out", str(out), "--format", "csv"])
    assert result.output == f"{out / 'report.csv'}\n"
    assert [path.name for path in out.iterdir()] == ["report.csv"]


def test_unknown_format_suggests_the_nearest(write_run: WriteRun) -> None:
    result = CliRunner().invoke(app, [str(write_run([])), "--format", "html,cvs"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "there is no report format 'cvs', did you mean 'csv'?"


def test_output_that_cannot_be_written_is_said_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/out \(not a directory\): choose another folder"):
        write_report(tmp_path / "no run here", tmp_path / "file" / "out")


def test_target_that_is_a_folder(write_run: WriteRun) -> None:
    directory = write_run([])
    (directory / "report.csv").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*report\.csv: it is a folder"):
        write_report(directory, directory)
    assert not (directory / "report.html").exists()


def test_second_report_replaces_the_first(write_run: WriteRun) -> None:
    directory = write_run(measured_rows())
    (directory / "report.csv").write_text("old")
    write_report(directory, directory, ["csv"])
    assert len((directory / "report.csv").read_text().splitlines()) == 10


def test_command_imports_no_heavy_module() -> None:
    heavy = {"pandas", "plotly", "jinja2", "torch", "numpy", "pydantic"}
    code = f"import leanbench.cli.report, leanbench.report, sys; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
