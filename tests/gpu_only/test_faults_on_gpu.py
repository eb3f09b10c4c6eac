"""A kernel that breaks the GPU's context, or never ends, costs one row of a real sweep."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from leanbench.run.samples import read_samples

pytestmark = pytest.mark.gpu

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gpu_kernels"


def sweep(out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "leanbench", "sweep", *arguments]
    return subprocess.Popen(
        [*command, "--out", str(out), "--name", "r", "--no-report", "--require-gpu"],
        env={**os.environ, "LEANBENCH_KERNEL_PATH": str(FIXTURES)},
        start_new_session=True,
    )


def rows(out: Path) -> list[dict]:
    path = out / "r" / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_faults_cost_one_row_each(tmp_path):
    faulty = ("illegal_access", "endless_loop", "abort")
    asked = ("--kernels", ",".join(("fa2", *faulty)), "--context", "1k,2k,4k", "--heads", "8", "--head-dim", "64")
    process = sweep(tmp_path, *asked, "--timeout", "20s")
    assert process.wait(timeout=240) == 1
    found = {(row["kernel"], row["problem"]["context"]): row for row in rows(tmp_path)}
    assert len(found) == len(rows(tmp_path)) == 12
    for (name, context), row in found.items():
        if name in faulty and context == 2048:
            assert row["status"] == ("timeout" if name == "endless_loop" else "crashed"), row
            assert row["reason"]
        else:
            assert row["status"] in ("ok", "noisy"), row
            assert row["relative_error"] < 2e-3


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("changes_inputs", "changes_inputs changed its inputs: Q, K, V or the lengths are not what they were"),
        ("other_stream", "outputs were not written when the CUDA graph was replayed: part of the work ran on another"),
    ],
)
def test_a_kernel_whose_figures_would_mean_nothing_is_suspect(tmp_path, kernel, reason):
    """At 2048 only, in the middle of two that are right, which are measured all the same."""
    asked = ("--kernels", f"fa2,{kernel},lean", "--context", "1k,2k", "--heads", "8", "--head-dim", "64")
    # Suspect is no failure of the sweep.
    assert sweep(tmp_path, *asked).wait(timeout=120) == 0
    found = {(row["kernel"], row["problem"]["context"]): row for row in rows(tmp_path)}
    assert len(found) == len(rows(tmp_path)) == 6
    suspect = found.pop((kernel, 2048))
    assert suspect["status"] == "suspect", suspect
    assert reason in suspect["reason"]
    assert suspect["latency_us"] is None
    for row in found.values():
        assert row["status"] in ("ok", "noisy"), row
        assert row["latency_us"] > 0
        assert row["relative_error"] < 2e-3
    assert set(read_samples(tmp_path / "r")) == {row["cell"] for row in found.values()}


def test_raw_samples_are_those_of_the_rows(tmp_path):
    asked = ("--kernels", "lean,fa2", "--context", "1k,4k", "--heads", "8", "--head-dim", "64", "--cache", "warm")
    assert sweep(tmp_path, *asked).wait(timeout=120) == 0
    samples = read_samples(tmp_path / "r")
    assert len(samples) == len(rows(tmp_path)) == 4
    for row in rows(tmp_path):
        assert row["cache"] == "warm"
        raw = samples[row["cell"]]
        assert statistics.median(raw.samples_us) == pytest.approx(row["latency_us"], abs=1e-3)
        assert len(raw.samples_us) == len(raw.rounds) == len(raw.sm_clock_mhz) == row["samples"]
        assert raw.rounds == sorted(set(raw.rounds))
        assert statistics.median(raw.crosscheck_us) == pytest.approx(row["crosscheck_us"], abs=1e-3)
    # Measured in turn: both kernels of a problem have a first round.
    assert all(raw.rounds[0] <= 10 for raw in samples.values())


def test_killed_and_resumed_every_cell_once(tmp_path):
    asked = ("--kernels", "lean,fa2,fixed_split", "--context", "1k:32k:x2", "--heads", "8", "--head-dim", "64")
    for turn in range(3):
        process = sweep(tmp_path, *asked, *(["--resume"] if turn else []))
        done = len(rows(tmp_path))
        deadline = time.monotonic() + 60
        while len(rows(tmp_path)) < done + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert sweep(tmp_path, *asked, "--resume").wait(timeout=120) == 0
    cells = Counter(row["cell"] for row in rows(tmp_path))
    assert len(cells) == 18
    assert set(cells.values()) == {1}
    assert {row["status"] for row in rows(tmp_path)} <= {"ok", "noisy"}
    assert set(read_samples(tmp_path / "r")) == set(cells)
