"""A kernel that breaks the GPU's context, or never ends, costs one row of a real sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

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
