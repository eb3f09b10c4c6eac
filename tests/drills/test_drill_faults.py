"""A fault in the middle of 50 cells: one row says it, and 49 are right."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from depth import deep
from drill_sweeps import KERNELS, children, environment, rows, run, stand_in_us, start, wait_until
from typer.testing import CliRunner

from leanbench.cli.main import app
from leanbench.records.manifest import read_manifest
from leanbench.records.row import Row

FEW = ("sweep", "--no-report", "--context", "1k", "--name", "r")
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


def test_a_family_that_cannot_be_loaded_is_a_sentence_and_the_others_go_on(tmp_path):
    file = tmp_path / "room" / "mine" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("import no_such_module\n")
    room = environment(
        LEANBENCH_KERNEL_PATH=os.pathsep.join([*map(str, KERNELS), str(tmp_path / "room")])
    )
    sentence = (
        f"{file}, line 1, cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')"
    )
    listed = run("list", "kernels", env=room)
    assert (listed.returncode, listed.stderr) == (
        0,
        f"! {sentence}, so its kernels are left out.\n",
    )
    assert {"lean", "steady"} <= {line.split(" ")[0] for line in listed.stdout.splitlines()}
    swept = run(*FEW, "--kernels", "steady", "--out", str(tmp_path), env=room)
    assert swept.returncode == 0, swept.stderr
    assert swept.stderr.splitlines().count(f"! {sentence}, so its kernels are left out.") == 1
    assert [(row["status"], row["latency_us"]) for row in rows(tmp_path / "r")] == [
        ("ok", stand_in_us(1024))
    ]
    refused = run(*FEW, "--kernels", "steady,mine", "--out", str(tmp_path), env=room)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"Error: {sentence}, so its kernels are left out; there is no")


#: By kernel, with those of `make test-deep` last: they end as others do, or tests/run has them.
FAULTS = {
    "loses_gpu": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "reads_null": "the worker was ended by SIGSEGV, see worker.log",
    "ignores_signals": "no result within 4 s, raise the limit with --timeout",
    "greedy_host": "MemoryError",
    "hangs_up": "the worker ended with exit code 0, see worker.log",
    "recurses": "RecursionError: maximum recursion depth exceeded",
    "raises": "ZeroDivisionError: division by zero",
    "aborts": "the worker was ended by SIGABRT, see worker.log",
    "exits": "the worker ended with exit code 1, see worker.log",
    "loops": "no result within 4 s, raise the limit with --timeout",
}
STATUSES = {"ignores_signals": "timeout", "loops": "timeout", "greedy_host": "out_of_memory"}


@pytest.mark.parametrize("kernel", [*list(FAULTS)[:3], *map(deep, list(FAULTS)[3:])])
def test_a_fault_costs_one_row_of_50(tmp_path, kernel):
    status, reason = STATUSES.get(kernel, "crashed"), FAULTS[kernel]
    done = run(*asked(kernel, tmp_path, "4s" if status == "timeout" else "120s"))
    assert done.returncode == (0 if status == "out_of_memory" else 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_one_fault(tmp_path / "r", kernel, status, reason)
    # Also said in the table.
    assert f"{status}: {kernel} · b1 h32/8 n13312 d128 fp16 HND: {reason}" in done.stdout
    if reason.startswith("RuntimeError"):
        assert "Traceback" in (tmp_path / "r" / "worker.log").read_text()


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


def test_a_sweep_without_a_figure_fails(tmp_path):
    """`standard` has no schedule that the performance model could predict from."""
    words = "sweep --no-report --quiet --gpu a100 --context 1k,2k --name run --kernels"
    done = run(*words.split(), "standard", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Nothing to compare: all 2 cells are unsupported, standard because standard has"
        " no schedule to predict from: measure it, or leave it out."
    )
    assert [row["status"] for row in rows(tmp_path / "run")] == ["unsupported"] * 2
    done = run(*words.split(), "standard,lean", "--out", str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = run(*FEW, "--kernels", "fa2", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_rows_are_valid_and_point_to_their_environment(finished):
    [row] = rows(finished / "r")
    manifest = read_manifest(finished / "r")
    assert Row.model_validate(row).model_dump(mode="json", exclude_none=True) == row
    assert row["source"] == manifest["source"] == "predicted"
    assert row["cell"] in manifest["cells"]
    assert row["kv_bytes"] == 2 * 1024 * 8 * 128 * 2
    python = manifest["environments"][row["environment"]]["python"]
    assert python == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("--batch 2", "1 of its 1 cells are not asked for now, such as fa2-b1-h32-8-n1024-"),
        ("--gpu h200", "has rows predicted for a100-80gb, this command's would be predicted for"),
        ("--ci 1%", "was measured with other settings (effort): repeat the command it was started"),
    ],
)
def test_resume_with_other_cells_settings_or_another_gpu_is_refused(
    finished, changed, sentence, monkeypatch
):
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
    words = [*FEW, "--kernels", "fa2", "--resume", *changed.split(), "--out", str(finished)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert sentence in refused.stderr
    assert len(rows(finished / "r")) == 1


def test_a_spent_budget_says_how_to_go_on_and_resume_finds_the_run(tmp_path):
    words = "sweep --no-report --kernels slow --context 1k:8k:x2 --out".split()
    done = run(*words, str(tmp_path), "--budget", "0.2s")
    assert done.returncode == 0
    assert "The budget is spent: 1 of 4 cells are done, 3 are left." in done.stderr
    [path] = tmp_path.iterdir()
    assert path.name.startswith("custom-a100-80gb-")
    assert f"--name {path.name} --resume" in done.stderr
    assert len(rows(path)) == 1
    assert run(*words, str(tmp_path), "--resume").returncode == 0
    assert list(tmp_path.iterdir()) == [path]
    assert len(rows(path)) == 4
