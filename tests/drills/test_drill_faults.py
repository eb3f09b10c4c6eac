"""A fault in the middle of 50 cells: one row says it, and 49 are right."""

from __future__ import annotations

import os
import signal

import pytest
from depth import deep
from drill_sweeps import children, rows, run, stand_in_us, start, wait_until

CONTEXTS = [1024 * count for count in range(1, 26)]


def asked(kernel: str, out: object, timeout: str = "120s") -> list[str]:
    words = f"sweep --no-report --kernels steady,{kernel} --context 1k:25k:+1k --name r"
    return [*words.split(), "--timeout", timeout, "--out", str(out)]


def assert_one_fault(path, kernel: str, status: str, reason: str) -> None:
    recorded = rows(path)
    assert [
        (row["problem"]["context"], row["kernel"]) for row in recorded if row["kernel"] == "steady"
    ] == [(context, "steady") for context in CONTEXTS]
    assert (
        sorted(row["problem"]["context"] for row in recorded if row["kernel"] == kernel) == CONTEXTS
    )
    assert len(recorded) == len({row["cell"] for row in recorded}) == 50
    [faulty] = [row for row in recorded if row["status"] != "ok"]
    assert (faulty["kernel"], faulty["problem"]["context"]) == (kernel, 13 * 1024)
    assert (faulty["status"], faulty["reason"]) == (status, reason)
    assert "latency_us" not in faulty
    for row in recorded:
        if row is not faulty:
            assert row["latency_us"] == stand_in_us(row["problem"]["context"]), row


#: By kernel.
FAULTS = {
    "loses_gpu": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "reads_null": "the worker was ended by SIGSEGV, see worker.log",
    "ignores_signals": "no result within 4 s, raise the limit with --timeout",
    "greedy_host": "MemoryError",
    "hangs_up": "the worker ended with exit code 0, see worker.log",
    "recurses": "RecursionError: maximum recursion depth exceeded",
    "raises": "ZeroDivisionError: division by zero",
}
STATUSES = {"ignores_signals": "timeout", "greedy_host": "out_of_memory"}


@pytest.mark.parametrize("kernel", [next(iter(FAULTS)), *map(deep, list(FAULTS)[1:])])
def test_a_fault_costs_one_row_of_50(tmp_path, kernel):
    status, reason = STATUSES.get(kernel, "crashed"), FAULTS[kernel]
    done = run(*asked(kernel, tmp_path, "4s" if status == "timeout" else "120s"))
    assert done.returncode == (0 if status == "out_of_memory" else 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_one_fault(tmp_path / "r", kernel, status, reason)
    assert f"{status}: {kernel} · b1 h32/8 n13312 d128 fp16 HND: {reason}" in done.stdout
    if reason.startswith("RuntimeError"):
        assert "Traceback" in (tmp_path / "r" / "worker.log").read_text()


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, *map(deep, (signal.SIGTERM, signal.SIGSEGV))])
def test_a_worker_that_is_ended_from_outside_costs_one_row_of_50(tmp_path, number):
    mark = tmp_path / "mark"
    with start(*asked("waits", tmp_path), LEANBENCH_DRILL_MARK=str(mark)) as process:
        wait_until(mark.exists, "the kernel's start")
        (worker,) = children(process.pid)
        os.kill(worker, number)
        process.communicate(timeout=240)
    assert process.returncode == 1
    assert_one_fault(
        tmp_path / "r", "waits", "crashed", f"the worker was ended by {number.name}, see worker.log"
    )


@pytest.mark.deep
def test_a_spent_budget_says_how_to_go_on_and_resume_finds_the_run(tmp_path):
    words = "sweep --no-report --kernels slow --context 1k:8k:x2 --out".split()
    done = run(*words, str(tmp_path), "--budget", "0.2s")
    assert done.returncode == 0
    assert "The budget is spent: 1 of 4 cells are done, 3 are left." in done.stderr
    [path] = tmp_path.iterdir()
    assert path.name.startswith("custom-h200-")
    assert f"--name {path.name} --resume" in done.stderr
    assert len(rows(path)) == 1
    assert run(*words, str(tmp_path), "--resume").returncode == 0
    assert list(tmp_path.iterdir()) == [path]
    assert len(rows(path)) == 4
