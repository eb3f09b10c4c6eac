"""A kernel that breaks the GPU's context, or never ends, costs one row of a real sweep."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from leanbench.gpu.visible import local_gpus
from leanbench.records.samples import read_samples

pytestmark = pytest.mark.gpu

#: Memory that the driver can keep or free between two readings.
MEMORY_NOISE_BYTES = 256 << 20
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


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not done():
        if time.monotonic() > deadline:
            pytest.fail("it did not come within 90 s")
        time.sleep(0.05)


#: 25 contexts, 2048 in the middle of the first half; with two kernels, 50 cells.
ASKED = ("--context", "256:6400:+256", "--heads", "8", "--head-dim", "64", "--timeout", "20s")


def used_bytes() -> int:
    """Return the memory of the GPU in use by any process."""
    gpu = local_gpus()[0]
    assert gpu.memory_total_bytes is not None
    assert gpu.memory_free_bytes is not None
    return gpu.memory_total_bytes - gpu.memory_free_bytes


def assert_one_fault(out: Path, kernel: str, status: str, reason: str) -> None:
    by_cell = {(row["kernel"], row["problem"]["context"]): row for row in rows(out)}
    assert len(by_cell) == len(rows(out)) == 50
    faulty = by_cell.pop((kernel, 2048))
    assert faulty["status"] == status, faulty
    assert re.search(reason, faulty["reason"]), faulty
    assert "latency_us" not in faulty
    for row in by_cell.values():
        # The following cells, too, are unaffected by the broken context.
        assert row["status"] in ("ok", "noisy"), row
        assert row["relative_error"] < 2e-3
        assert row["latency_us"] > 0


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        ("illegal_access", "crashed", "illegal memory access"),
        ("endless_loop", "timeout", "no result within 20 s"),
        ("device_assert", "crashed", "device-side assert"),
        ("too_large", "out_of_memory", "OutOfMemoryError"),
    ],
)
def test_a_fault_costs_one_row_of_50(tmp_path, kernel, status, reason):
    before = used_bytes()
    process = sweep(tmp_path, "--kernels", f"fa2,{kernel}", *ASKED)
    assert process.wait(timeout=240) == (0 if status == "out_of_memory" else 1)
    assert_one_fault(tmp_path, kernel, status, reason)
    assert used_bytes() - before < MEMORY_NOISE_BYTES


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_kernel_that_never_ends_and_frees_the_gpu(tmp_path, number, code):
    before = used_bytes()
    process = sweep(tmp_path, "--kernels", "fa2,endless_loop", *ASKED, "--timeout", "90s")
    # Seven problems of two kernels; the eighth never ends.
    wait_until(lambda: len(rows(tmp_path)) >= 14)
    time.sleep(3)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert len(rows(tmp_path)) == 14
    wait_until(lambda: used_bytes() - before < MEMORY_NOISE_BYTES)


def test_a_suspect_row_ends_neither_the_sweep_nor_other_rows(tmp_path):
    """The kernel is only wrong at 2048, between two right ones, which are still measured."""
    options = "--kernels fa2,changes_inputs,lean --context 1k,2k --heads 8 --head-dim 64"
    assert sweep(tmp_path, *options.split()).wait(timeout=120) == 0
    by_cell = {(row["kernel"], row["problem"]["context"]): row for row in rows(tmp_path)}
    assert len(by_cell) == len(rows(tmp_path)) == 6
    suspect = by_cell.pop(("changes_inputs", 2048))
    assert suspect["status"] == "suspect", suspect
    assert suspect["reason"].startswith("changes_inputs changed its inputs")
    assert "latency_us" not in suspect
    for row in by_cell.values():
        assert row["status"] in ("ok", "noisy"), row
        assert row["latency_us"] > 0
        assert row["relative_error"] < 2e-3
    assert set(read_samples(tmp_path / "r")) == {row["cell"] for row in by_cell.values()}


def test_raw_samples_are_those_of_the_rows(tmp_path):
    options = "--kernels lean,fa2 --context 1k,4k --heads 8 --head-dim 64 --cache warm".split()
    assert sweep(tmp_path, *options).wait(timeout=120) == 0
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
