"""A fault in the middle of 50 cells: one row says it, and 49 are right."""

from __future__ import annotations

import os
import signal

import pytest
from drill_sweeps import KERNELS, children, environment, rows, run, stand_in_us, start, wait_until

FEW = ("sweep", "--no-report", "--context", "1k", "--name", "r")
CONTEXTS = [1024 * count for count in range(1, 26)]


def asked(kernel: str, out: object, timeout: str = "120s") -> list[str]:
    words = [
        "sweep",
        "--no-report",
        "--kernels",
        f"steady,{kernel}",
        "--context",
        "1k:25k:+1k",
        "--name",
        "r",
    ]
    return [*words, "--timeout", timeout, "--out", str(out)]


def assert_one_fault(path, kernel: str, status: str, reason: str) -> None:
    found = rows(path)
    assert [
        (row["problem"]["context"], row["kernel"]) for row in found if row["kernel"] == "steady"
    ] == [(context, "steady") for context in CONTEXTS]
    assert sorted(row["problem"]["context"] for row in found if row["kernel"] == kernel) == CONTEXTS
    assert len(found) == len({row["cell"] for row in found}) == 50
    [faulty] = [row for row in found if row["status"] != "ok"]
    assert (faulty["kernel"], faulty["problem"]["context"]) == (kernel, 13 * 1024)
    assert (faulty["status"], faulty["reason"]) == (status, reason)
    assert "latency_us" not in faulty
    for row in found:
        if row is not faulty:
            assert row["latency_us"] == stand_in_us(row["problem"]["context"]), row


def test_a_family_that_cannot_be_loaded_is_a_sentence_and_the_others_go_on(tmp_path):
    file = tmp_path / "room" / "mine" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("import no_such_module\n")
    room = environment(
        LEANBENCH_KERNEL_PATH=os.pathsep.join([*map(str, KERNELS), str(tmp_path / "room")])
    )
    said = (
        f"{file}, line 1, cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"
    )
    listed = run("list", "kernels", env=room)
    assert (listed.returncode, listed.stderr) == (0, f"! {said}, so its kernels are left out.\n")
    assert {"lean", "steady"} <= {line.split(" ")[0] for line in listed.stdout.splitlines()}
    swept = run(*FEW, "--kernels", "steady", "--out", str(tmp_path), env=room)
    assert swept.returncode == 0, swept.stderr
    assert swept.stderr.splitlines().count(f"! {said}, so its kernels are left out.") == 1
    assert [(row["status"], row["latency_us"]) for row in rows(tmp_path / "r")] == [
        ("ok", stand_in_us(1024))
    ]
    refused = run(*FEW, "--kernels", "steady,mine", "--out", str(tmp_path), env=room)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"Error: {said}, so its kernels are left out; there is no")


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        pytest.param(
            "raises", "crashed", "ZeroDivisionError: division by zero", marks=pytest.mark.deep
        ),
        ("recurses", "crashed", "RecursionError: maximum recursion depth exceeded"),
        ("reads_null", "crashed", "the worker was ended by SIGSEGV, see worker.log"),
        pytest.param(
            "aborts",
            "crashed",
            "the worker was ended by SIGABRT, see worker.log",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "exits",
            "crashed",
            "the worker ended with exit code 1, see worker.log",
            marks=pytest.mark.deep,
        ),
        ("hangs_up", "crashed", "the worker ended with exit code 0, see worker.log"),
        pytest.param(
            "loops",
            "timeout",
            "no result within 4 s, raise the limit with --timeout",
            marks=pytest.mark.deep,
        ),
        ("ignores_signals", "timeout", "no result within 4 s, raise the limit with --timeout"),
        pytest.param("greedy_host", "out_of_memory", "MemoryError", marks=pytest.mark.deep),
    ],
)
def test_a_fault_costs_one_row_of_50(tmp_path, kernel, status, reason):
    done = run(*asked(kernel, tmp_path, "4s" if status == "timeout" else "120s"))
    assert done.returncode == (0 if status == "out_of_memory" else 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_one_fault(tmp_path / "r", kernel, status, reason)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_that_is_ended_from_outside_costs_one_row_of_50(tmp_path, number):
    mark = tmp_path / "mark"
    with start(*asked("waits", tmp_path), LEANBENCH_DRILL_MARK=str(mark)) as process:
        wait_until(mark.exists, "the kernel's start")
        (worker,) = children(process.pid)
        os.kill(worker, number)
        process.communicate(timeout=120)
    assert process.returncode == 1
    assert_one_fault(
        tmp_path / "r", "waits", "crashed", f"the worker was ended by {number.name}, see worker.log"
    )
