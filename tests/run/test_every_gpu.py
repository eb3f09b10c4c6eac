"""Predictions of every sweep, and every command that predicts, on every GPU of the catalogue."""

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from depth import DEEP
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.registry import kernel
from leanbench.decode.predict import predict_step
from leanbench.gpu.catalogue import CATALOGUE
from leanbench.model.predict import predict_cell
from leanbench.records.reading import read_run
from leanbench.run.cells import Cell, expand
from leanbench.run.sweep_file import load_sweep, shipped_sweeps

#: Cells of a sweep that are predicted on each GPU.
CELLS = 4 if DEEP else 1
SWEEPS = sorted(shipped_sweeps())

every_gpu = pytest.mark.parametrize("spec", [pytest.param(gpu, id=gpu.name) for gpu in CATALOGUE])


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Start in an empty folder without GPU and settings."""
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
    monkeypatch.setenv("LEANBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


#: `leanbench` with few problems of each family.
TUNE = """
import sys
from leanbench.tune import plan
plan.PREDICTED_PROBLEMS = 1
from leanbench.__main__ import main
sys.exit(main())
"""


@cache
def cells_of(sweep: str) -> tuple[Cell, ...]:
    """Return cells spread over a sweep, the last one among them."""
    cells = expand(load_sweep(sweep))
    last = len(cells) - 1
    places = dict.fromkeys(last - number * last // CELLS for number in range(CELLS))
    return tuple(cells[place] for place in places)


def predict(cell: Cell, spec: GpuSpec) -> dict[str, Any]:
    own = kernel(cell.kernel)
    predict_row = predict_cell if cell.problem.whole_model is None else predict_step
    return predict_row(cell.problem, own, cell.override or own.config_choice or cell.configs, spec)


def assert_one_sentence(text: str | None) -> None:
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    assert "Error:" not in text


@pytest.mark.parametrize("sweep", SWEEPS if DEEP else ["decode", "ragged", "shared", "smoke"])
@every_gpu
def test_cells_are_predicted_or_refused(spec: GpuSpec, sweep: str):
    for cell in cells_of(sweep):
        row = predict(cell, spec)
        if row["status"] == "ok":
            assert 0 < row["latency_us"] < math.inf
            assert row["bandwidth_tb_s"] is None or row["bandwidth_tb_s"] < spec.bandwidth_tb_s
        else:
            assert row["status"] in ("unsupported", "out_of_memory")
            assert_one_sentence(row["reason"])


def run(*words: str) -> None:
    """Run a command that writes a run, and check its rows and exit code."""
    done = CliRunner().invoke(app, [*words, "--name", "part", "--out", "runs", "-q"])
    assert isinstance(done.exception, SystemExit | None), done.output
    statuses = {row.status for row, _ in read_run(Path("runs/part")).results}
    assert statuses
    assert statuses <= {"ok", "unsupported", "out_of_memory"}
    assert done.exit_code == (0 if "ok" in statuses else 1), done.output


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sweep", "gpu"),
    # Each sweep once, each GPU in turn.
    [(sweep, CATALOGUE[place % len(CATALOGUE)].name) for place, sweep in enumerate(SWEEPS)],
)
def test_a_part_of_every_sweep_runs(sweep: str, gpu: str):
    problems = len({cell.problem for cell in expand(load_sweep(sweep))})
    run("sweep", sweep, "--shard", f"1/{max(1, problems // 4)}", "--gpu", gpu)


@pytest.mark.deep
@every_gpu
def test_decode_and_trace_run(spec: GpuSpec):
    run("decode", "llama-3-8b", "--context", "4k,64k", "--gpu", spec.name)
    trace = f"trace h32/8 n4k d128 --gpu {spec.name} --out trace --quiet"
    assert CliRunner().invoke(app, trace.split()).exit_code == 0
    assert Path("trace/trace.html").stat().st_size > 1000


@pytest.mark.deep
@pytest.mark.timeout(3000)
@every_gpu
def test_the_default_families_are_tuned(spec: GpuSpec):
    # Triton's interpreter, which tests use, compiles nothing.
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", TUNE, "tune", "--gpu", spec.name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all 6 problems were predicted" in done.stdout
    assert "is left out" not in done.stderr
