"""Sweeps that meet crashes, hangs, signals and kill -9. They predict, so they need no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from leanbench.core import registry
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.model.cell import predict_cell

KERNELS = Path(__file__).parents[1] / "fixtures" / "kernels"


def command(*words: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from leanbench.cli.main import main; main()",
        "sweep",
        "--no-report",
        *words,
    ]


def environment() -> dict[str, str]:
    # No GPU even where there is one: these tests are about processes.
    return {**os.environ, "LEANBENCH_KERNEL_PATH": str(KERNELS), "CUDA_VISIBLE_DEVICES": ""}


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--out", str(folder), *words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("--out", str(folder), *words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]


def test_a_sweep_without_a_figure_fails(tmp_path):
    """`standard` has no schedule that the performance model could predict from."""
    grid = ("--context", "1k,2k", "--kernels", "standard", "--gpu", "a100")
    done = sweep(tmp_path, *grid, "--name", "run", "--quiet")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Nothing to compare: all 2 cells are unsupported, the first because standard has no"
        " schedule to predict from."
    )
    assert [row["status"] for row in rows(tmp_path / "run")] == ["unsupported"] * 2
    assert sweep(tmp_path, *grid[:-3], "standard,lean", *grid[-2:], "--quiet").returncode == 0


def wait_for_rows(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "results.jsonl").exists() and (run / "results.jsonl").read_bytes().count(
            b"\n"
        ) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"{run} did not get {count} rows within 60 s")


def child_pids(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("needs /proc/PID/task/PID/children, which this system does not have")
    return [int(child) for child in children.read_text().split()]


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # ended; whoever inherited it has not asked yet
            return
        time.sleep(0.05)
    pytest.fail(f"worker {pid} still runs after its sweep ended")


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        ("crashing", "crashed", "the worker was ended by SIGABRT, see worker.log"),
        (
            "raising",
            "crashed",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
        ("exiting", "crashed", "the worker ended with exit code 3, see worker.log"),
        ("hanging", "timeout", "no result within 2 s, raise the limit with --timeout"),
        ("greedy", "out_of_memory", "MemoryError: tried to allocate 1 TB"),
    ],
)
def test_a_faulty_kernel_costs_one_row(tmp_path, kernel, status, reason):
    """In the middle of those that are measured together, at one of three contexts."""
    words = (
        "--kernels",
        f"lean,{kernel},fa2",
        "--context",
        "1k:4k:x2",
        "--name",
        "r",
        "--timeout",
        "2s",
    )
    done = sweep(tmp_path, *words)
    assert done.returncode == (0 if status == "out_of_memory" else 1), done.stderr
    found = rows(tmp_path / "r")
    statuses = {(row["kernel"], row["problem"]["context"]): row["status"] for row in found}
    expected = {
        (name, context): "ok" for name in ("lean", kernel, "fa2") for context in (1024, 2048, 4096)
    }
    assert statuses == {**expected, (kernel, 2048): status}
    assert len(found) == 9
    [faulty] = [row for row in found if row["status"] != "ok"]
    assert faulty["reason"] == reason
    assert "latency_us" not in faulty
    # Also said in the table.
    assert f"{status}: {kernel} · b1 h32/8 n2048 d128 fp16 HND: {reason}" in done.stdout
    others = {
        (row["problem"]["context"], row["kernel"]): row["latency_us"]
        for row in found
        if row["kernel"] != kernel
    }
    assert list(others) == [
        (context, name) for context in (1024, 2048, 4096) for name in ("lean", "fa2")
    ]
    assert others == {(context, name): predicted_us(context, name) for context, name in others}


def predicted_us(context: int, name: str) -> float:
    """What this process predicts."""
    problem = AttentionProblem(1, 32, 8, context, 128)
    return predict_cell(problem, registry.kernel(name), "default", find("a100"))["latency_us"]


def test_a_worker_that_is_killed_from_outside_costs_one_row(tmp_path):
    """As the system does that runs out of memory."""
    asked = ("--kernels", "slow,steady", "--context", "1k:8k:x2", "--name", "r")
    with start(tmp_path, *asked) as process:
        wait_for_rows(tmp_path / "r", 2)
        # Into the 0.3 s of the slow kernel.
        time.sleep(0.1)
        (worker,) = child_pids(process.pid)
        os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == 1
    found = rows(tmp_path / "r")
    assert Counter(row["kernel"] for row in found) == {"slow": 4, "steady": 4}
    [faulty] = [row for row in found if row["status"] != "ok"]
    assert (faulty["kernel"], faulty["status"]) == ("slow", "crashed")
    assert faulty["reason"] == "the worker was ended by SIGKILL, see worker.log"


def test_rows_are_valid_and_point_to_their_environment(tmp_path):
    from leanbench.records.row import Row

    sweep(tmp_path, "--kernels", "steady", "--context", "1k", "--name", "r")
    (row,) = rows(tmp_path / "r")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert Row.model_validate(row).model_dump(mode="json", exclude_none=True) == row
    assert row["source"] == manifest["source"] == "predicted"
    assert row["cell"] in manifest["cells"]
    assert row["kv_bytes"] == 2 * 1024 * 8 * 128 * 2
    assert manifest["environments"][row["environment"]]["python"] == ".".join(
        map(str, sys.version_info[:3])
    )


def test_what_kernels_print_goes_to_the_workers_log(tmp_path):
    done = sweep(tmp_path, "--kernels", "raising", "--context", "2k", "--name", "r")
    assert "Traceback" not in done.stdout + done.stderr
    log = (tmp_path / "r" / "worker.log").read_text()
    assert "Traceback" in log
    assert "an illegal memory access was encountered" in log


def test_kill_9_then_resume_runs_every_cell_once(tmp_path):
    asked = ("--kernels", "slow", "--context", "1k:128k:x2", "--name", "r")
    with start(tmp_path, *asked) as process:
        wait_for_rows(tmp_path / "r", 2)
        (worker,) = child_pids(process.pid)
        process.kill()
    assert_gone(worker)
    before = rows(tmp_path / "r")
    assert 2 <= len(before) < 8
    # What a kill in the middle of a write would leave.
    with (tmp_path / "r" / "results.jsonl").open("ab") as file:
        file.write(b'{"cell":"slow-b1')

    refused = sweep(tmp_path, *asked)
    assert refused.returncode == 2
    assert "is not empty: add --resume" in refused.stderr

    done = sweep(tmp_path, *asked, "--resume")
    assert done.returncode == 0, done.stderr
    assert (
        f"Resuming {tmp_path / 'r'}: {len(before)} of 8 cells are done, {8 - len(before)} are left."
        in done.stderr
    )
    after = rows(tmp_path / "r")
    assert after[: len(before)] == before
    assert Counter(row["problem"]["context"] for row in after) == {1024 * 2**n: 1 for n in range(8)}
    assert {row["status"] for row in after} == {"ok"}

    # Nothing is left: no cell runs again.
    assert sweep(tmp_path, *asked, "--resume").returncode == 0
    assert rows(tmp_path / "r") == after


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_kernel_that_hangs_and_says_how_to_go_on(tmp_path, number, code):
    with start(
        tmp_path, "--kernels", "slow,hanging", "--context", "1k,2k,4k", "--name", "r"
    ) as process:
        # Both at 1k; at 2k hanging never returns, and slow waits for it.
        wait_for_rows(tmp_path / "r", 2)
        (worker,) = child_pids(process.pid)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    assert_gone(worker)
    assert "Traceback" not in stderr
    assert f"Stopped by {signal.Signals(number).name}: 2 of 6 cells are done, 4 are left." in stderr
    assert stderr.rstrip().endswith(
        f"Go on with: leanbench sweep --context 1k,2k,4k --kernels slow,hanging --out {tmp_path}"
        " --no-report --name r --resume"
    )
    assert [(row["kernel"], row["problem"]["context"]) for row in rows(tmp_path / "r")] == [
        ("slow", 1024),
        ("hanging", 1024),
    ]


def test_a_spent_budget_says_how_to_go_on_and_resume_finds_the_run(tmp_path):
    asked = ("--kernels", "slow", "--context", "1k:8k:x2")
    done = sweep(tmp_path, *asked, "--budget", "0.2s")
    assert done.returncode == 0
    assert "The budget is spent: 1 of 4 cells are done, 3 are left." in done.stderr
    (run,) = tmp_path.iterdir()
    assert run.name.startswith("custom-a100-80gb-")
    assert f"--name {run.name} --resume" in done.stderr
    assert len(rows(run)) == 1

    assert sweep(tmp_path, *asked, "--resume").returncode == 0
    assert list(tmp_path.iterdir()) == [run]
    assert len(rows(run)) == 4


def test_resume_with_other_cells_settings_or_another_gpu_is_refused(tmp_path):
    sweep(tmp_path, "--kernels", "steady", "--context", "1k", "--name", "r")
    other = sweep(tmp_path, "--kernels", "steady", "--context", "2k", "--name", "r", "--resume")
    assert other.returncode == 2
    assert "1 of its 1 cells are not asked for now, such as steady-b1-h32-8-n1024-" in other.stderr
    other = sweep(
        tmp_path,
        "--kernels",
        "steady",
        "--context",
        "1k",
        "--name",
        "r",
        "--resume",
        "--gpu",
        "h200",
    )
    assert other.returncode == 2
    assert (
        "has rows predicted for a100-80gb, this command's would be predicted for h200"
        in other.stderr
    )
    other = sweep(
        tmp_path, "--kernels", "steady", "--context", "1k", "--name", "r", "--resume", "--ci", "1%"
    )
    assert other.returncode == 2
    assert (
        "was measured with other settings (effort): repeat the command it was started with"
        in other.stderr
    )
    assert len(rows(tmp_path / "r")) == 1
