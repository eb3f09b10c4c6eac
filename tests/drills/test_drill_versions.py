"""Files of another schema version: refused in a sentence that says what to do, by every command
that reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drill_sweeps import run
from tuned_examples import H200, family, tuned_configs
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.configs.store import merge
from leanbench.configs.tuned_file import read
from leanbench.core.errors import UserError

ASKED = ["sweep", "-q", "--no-report", "--kernels", "lean", "--context", "1k,2k", "--name", "r"]
OLDER = "use the leanbench version that wrote it or start a new run"
NEWER = "update leanbench"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert run(*ASKED, "--out", str(folder)).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("version", "fix"),
    [(1, OLDER), (3, NEWER), (99, NEWER), ("2", OLDER), (2.0, OLDER), (True, OLDER), (None, OLDER)],
)
def test_a_run_of_another_version_is_refused_by_every_command(out, version, fix):
    path = out / "r"
    manifest = path / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_text(json.dumps({**json.loads(before), "schema_version": version}))
    results = (path / "results.jsonl").read_bytes()
    try:
        commands = (
            ["report", str(path)],
            ["compare", f"{path}:lean", f"{path}:fa2"],
            [*ASKED, "--out", str(out), "--resume"],
        )
        for words in commands:
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 2, done.stderr
            given = json.dumps(version)
            says = f"{path} was written with schema version {given}, this leanbench reads 2: {fix}"
            assert done.stderr.splitlines()[-1] == f"Error: {says}"
        assert (path / "results.jsonl").read_bytes() == results
        assert not (path / "report.html").exists()
    finally:
        manifest.write_bytes(before)


def test_rows_with_fields_that_are_to_come_are_read(out):
    """A new optional field does not raise the version."""
    results = out / "r" / "results.jsonl"
    before = results.read_bytes()
    rows = [{**json.loads(line), "field_of_tomorrow": 3} for line in before.splitlines()]
    results.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    try:
        assert run(*ASKED, "--out", str(out), "--resume").returncode == 0
        assert len(results.read_bytes().splitlines()) == 2
    finally:
        results.write_bytes(before)


def test_rows_without_the_fields_of_today_are_read(out):
    """As leanbench wrote them when it measured latency alone."""
    results = out / "r" / "results.jsonl"
    before = results.read_bytes()
    then = (
        "cell",
        "problem",
        "kernel",
        "decomposition",
        "source",
        "status",
        "latency_us",
        "kv_bytes",
    )
    then += ("wall_s", "time", "environment")
    rows: list[dict[str, Any]] = [json.loads(line) for line in before.splitlines()]
    results.write_bytes(
        b"".join(json.dumps({name: row[name] for name in then}).encode() + b"\n" for row in rows)
    )
    try:
        done = run("sweep", *ASKED[2:], "--out", str(out), "--resume")
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        report = run("report", str(out / "r"), "--out", str(out / "report"))
        assert report.returncode == 0, report.stderr
        assert len((out / "report" / "report.csv").read_text().splitlines()) == 3
    finally:
        results.write_bytes(before)


@pytest.mark.parametrize(
    ("version", "fix"),
    [(0, "move it away and tune again"), (99, "move it away, or update leanbench")],
)
def test_tuned_configs_of_another_version_are_refused_and_not_overwritten(tmp_path, version, fix):
    path = tmp_path / "h200.json"
    content = {
        **json.loads(tuned_configs().model_dump_json(exclude_none=True)),
        "schema_version": version,
    }
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        read(path)
    assert (
        str(refused.value) == f"{path} has schema version {version}, this leanbench reads 3: {fix}"
    )
    with pytest.raises(UserError, match="it is not overwritten"):
        merge(tuned_configs().gpu, [family(group_size=8)], path)
    assert json.loads(path.read_text()) == content
    assert tuned_configs().gpu.is_like(H200)
