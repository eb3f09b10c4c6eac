"""2,000 small cells in one sweep: no growth after the first hundred, no slowdown, no leftovers."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from leanbench.gpu.visible import local_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(5400)]

CELLS = 2000
EVERY = 100
#: Two kernels at each of a thousand contexts.
ASKED = ["--kernels", "lean,fa2", "--context", "256:16240:+16", "--heads", "8", "--head-dim", "64"]
QUICK = ["--ci", "5%", "--min-samples", "6", "--max-samples", "10", "--timeout", "60s"]
#: Normal variation: pages of the allocators, a file that is open while a row is written.
HOST_NOISE_BYTES = 128 << 20
GPU_NOISE_BYTES = 256 << 20
FILES_NOISE = 4


@dataclass(frozen=True)
class Reading:
    rows: int
    seconds: float
    #: Resident memory: of the sweep, and of its worker with its children.
    sweep_bytes: int
    worker_bytes: int
    gpu_bytes: int
    #: Open files of all processes.
    open_files: int
    processes: int


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(pid for child in below for pid in family(int(child)))]


def gpu_bytes() -> int:
    gpu = local_gpus()[0]
    assert gpu.memory_total_bytes is not None
    assert gpu.memory_free_bytes is not None
    return gpu.memory_total_bytes - gpu.memory_free_bytes


def reading(pid: int, rows: int, seconds: float) -> Reading:
    pids = family(pid)
    resident = [
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        for pid in pids
    ]
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return Reading(
        rows, round(seconds, 1), resident[0], sum(resident[1:]), gpu_bytes(), files, len(pids)
    )


def soak(out: Path) -> tuple[list[Reading], int]:
    """Return a reading every `EVERY` rows, and the exit code.

    The last reading is omitted, because the worker is exiting.
    """
    words = [
        sys.executable,
        "-m",
        "leanbench",
        "sweep",
        *ASKED,
        *QUICK,
        "-q",
        "--no-report",
        "--require-gpu",
    ]
    readings: list[Reading] = []
    begun = time.monotonic()
    process = subprocess.Popen([*words, "--out", str(out), "--name", "soak"])
    results = out / "soak" / "results.jsonl"
    while process.poll() is None:
        rows = results.read_bytes().count(b"\n") if results.exists() else 0
        if EVERY * (len(readings) + 1) <= rows < CELLS:
            readings.append(reading(process.pid, rows, time.monotonic() - begun))
            print(readings[-1], flush=True)
        time.sleep(0.1)
    return readings, process.returncode


def test_2000_cells_leave_everything_as_it_was(tmp_path):
    before = gpu_bytes()
    readings, code = soak(tmp_path)
    (tmp_path / "soak.json").write_text(
        json.dumps([asdict(reading) for reading in readings], indent=1)
    )
    assert code == 0
    rows = [
        json.loads(line) for line in (tmp_path / "soak" / "results.jsonl").read_text().splitlines()
    ]
    assert len({row["cell"] for row in rows}) == len(rows) == CELLS
    assert {row["status"] for row in rows} <= {"ok", "noisy"}
    assert len(readings) >= CELLS // EVERY - 1
    first, last = readings[0], readings[-1]
    assert last.sweep_bytes - first.sweep_bytes < HOST_NOISE_BYTES, readings
    assert last.worker_bytes - first.worker_bytes < HOST_NOISE_BYTES, readings
    assert last.gpu_bytes - first.gpu_bytes < GPU_NOISE_BYTES, readings
    assert abs(last.open_files - first.open_files) <= FILES_NOISE, readings
    assert last.processes == first.processes, readings
    # The first hundred compile. Contexts grow, and with them a cell's bytes, but not its sampling
    # time.
    paces = [
        (after.seconds - before.seconds) / (after.rows - before.rows)
        for before, after in itertools.pairwise(readings)
    ]
    assert statistics.median(paces[-5:]) < 1.25 * statistics.median(paces[:5]), paces
    assert gpu_bytes() - before < GPU_NOISE_BYTES
    files = {path.name for path in (tmp_path / "soak").iterdir()}
    assert files == {"lock", "manifest.json", "results.jsonl", "samples.jsonl.gz", "worker.log"}
