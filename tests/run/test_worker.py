import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest

from leanbench.errors import UserError
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.problem import AttentionProblem
from leanbench.registry import kernel
from leanbench.run.cells import Cell
from leanbench.run.environment import environment_key, predicted_environment
from leanbench.run.worker import _attempt, spec_from_dict
from leanbench.run.worker_process import WorkerProcess, WorkerTarget, WorkerTimeout

PROBLEM = AttentionProblem(2, 8, 8, (1024, 300), 64)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_a_gpu_goes_through_json(spec):
    assert spec_from_dict(json.loads(json.dumps(asdict(spec)))) == spec


class AcceleratorError(RuntimeError):
    """Named as torch's is."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


@pytest.mark.parametrize(
    ("error", "status", "reason", "usable"),
    [
        (ValueError("wrong\nmore"), "crashed", "ValueError: wrong", True),
        (ValueError(), "crashed", "ValueError", True),
        (OutOfMemoryError("CUDA out of memory. Tried"), "out_of_memory", "CUDA out of memory. Tried", True),
        (AcceleratorError("device-side assert"), "crashed", "AcceleratorError: device-side assert", False),
        (RuntimeError("CUDA error: misaligned address"), "crashed", "RuntimeError: CUDA error", False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), "crashed", "Triton Error [CUDA]", False),
    ],
)
def test_errors_become_rows_and_cuda_errors_end_the_worker(error, status, reason, usable, capsys):
    def run_cell(problem, kernel, configs):
        raise error

    asked = {"problem": PROBLEM.to_dict(), "kernel": "lean", "configs": "default"}
    row, can_go_on = _attempt(run_cell, asked)
    assert row["status"] == status
    assert reason in row["reason"]
    assert "\n" not in row["reason"]
    assert can_go_on is usable
    assert type(error).__name__ in capsys.readouterr().err


def test_a_cell_reaches_its_kernel_unchanged():
    def run_cell(problem, kernel, configs):
        return {"seen": (problem, kernel.name, configs)}

    asked = json.loads(json.dumps({"problem": PROBLEM.to_dict(), "kernel": "lean", "configs": "best"}))
    assert _attempt(run_cell, asked) == ({"seen": (PROBLEM, "lean", "best")}, True)


def test_a_worker_answers_with_the_models_figures(tmp_path):
    from leanbench.model.cell import predict_cell

    worker = WorkerProcess(WorkerTarget(find("h200"), None), tmp_path / "log")
    try:
        assert worker.environment == predicted_environment()
        outcome, usable = worker.run(Cell(PROBLEM, "lean"), timeout_s=60)
    finally:
        worker.kill()
    expected = predict_cell(PROBLEM, kernel("lean"), "default", find("h200"))
    assert usable
    assert outcome == json.loads(json.dumps(expected))


def test_a_worker_that_is_late_is_a_timeout(tmp_path):
    worker = WorkerProcess(WorkerTarget(find("h200"), None), tmp_path / "log")
    try:
        # Stopped, so that it is late however fast it would be.
        os.kill(worker._process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout):
            worker.run(Cell(PROBLEM, "lean"), timeout_s=0.05)
    finally:
        worker.kill()
    assert worker._process.returncode == -9


def test_a_worker_ends_when_its_parent_closes_the_channel():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "leanbench.run.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    with ours:
        ours.sendall(json.dumps(asdict(WorkerTarget(find("a100"), None))).encode() + b"\n")
        assert b'"environment"' in ours.recv(1 << 16)
    assert process.wait(timeout=20) == 0


def test_a_worker_that_cannot_start_says_why_and_where_to_look(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"the worker did not start: \w+: .*, see .*log"):
        WorkerProcess(WorkerTarget(find("a100"), 0), tmp_path / "log")


def test_environment_keys_differ_with_anything_in_them():
    environment = predicted_environment()
    assert environment_key(environment) == environment_key(dict(reversed(environment.items())))
    assert environment_key(environment) != environment_key({**environment, "driver": "580"})
