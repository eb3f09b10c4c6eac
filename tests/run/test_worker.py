import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.configs.store import settings_hash
from leanbench.core.errors import DoesNotFit, SuspectResult, Tampered, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.gpu.nvml_library import GpuLostError
from leanbench.measure.ranks import LOST_FOLLOWER, RANK_LOST, ProcessGroupReuseError, RankLost
from leanbench.records.environment import predicted_environment
from leanbench.run import worker_process
from leanbench.run.cells import Cell
from leanbench.run.messages import receive, send
from leanbench.run.worker import Announcer, _attempt, _start
from leanbench.run.worker_process import WorkerLost, WorkerProcess, WorkerTarget, WorkerTimeout

PROBLEM = AttentionProblem(2, 8, 8, (1024, 300), 64)
OVERRIDE = LeanTritonConfig(64, 4, 2, 1, 1, False)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_a_gpu_goes_through_json(spec):
    assert GpuSpec.from_dict(json.loads(json.dumps(asdict(spec)))) == spec


def request(*kernels: str, configs: str = "default") -> dict[str, Any]:
    """Return a request as it arrives in the worker."""
    message = {"problem": PROBLEM.to_dict(), "kernels": kernels, "configs": configs}
    return json.loads(json.dumps({**message, "overrides": {}}))


class Silent:
    """A connection to nobody."""

    def send_bytes(self, data: bytes) -> None:
        pass


def announced(name: str | None) -> Announcer:
    """Return an announcer after `name` was announced."""
    announce = Announcer(cast("Connection", Silent()))
    announce(name)
    return announce


def raising(error: Exception) -> Any:
    def run_problem(problem, kernels, configs, overrides):
        raise error

    return run_problem


LOST = "the process of another GPU ended while this was measured, see worker.log"
MISALIGNED = "CUDA error: misaligned address"
ILLEGAL = "Triton Error [CUDA]: an illegal memory access"


@pytest.mark.parametrize(
    ("error", "status", "reason", "usable", "is_logged"),
    [
        (ValueError("wrong\nmore"), "crashed", "ValueError: wrong", True, True),
        (ValueError(), "crashed", "ValueError", True, True),
        (torch.AcceleratorError("assert"), "crashed", "AcceleratorError: assert", False, True),
        (RuntimeError(MISALIGNED), "crashed", f"RuntimeError: {MISALIGNED}", False, True),
        (RuntimeError(ILLEGAL), "crashed", f"RuntimeError: {ILLEGAL}", False, True),
        (GpuLostError("it is lost"), "crashed", "GpuLostError: it is lost", False, True),
        (RankLost(), "crashed", LOST, False, True),
        # A refusal or an alarm is a sentence without a traceback.
        (UserError("1.0 is too old"), "unsupported", "1.0 is too old", True, False),
        (DoesNotFit("needs 300 KB"), "unsupported", "needs 300 KB", True, False),
        (SuspectResult("it changed its inputs"), "suspect", "it changed its inputs", True, False),
        # The next kernel needs the clock that torch defines.
        (Tampered("it replaced a clock"), "suspect", "it replaced a clock", False, False),
    ],
)
def test_errors_become_the_row_of_the_blamed_kernel(
    error, status, reason, usable, is_logged, capsys
):
    rows, can_continue = _attempt(raising(error), request("lean", "fa2"), announced("fa2"))
    assert rows == {"fa2": {"status": status, "reason": reason}}
    assert can_continue is usable
    assert (type(error).__name__ in capsys.readouterr().err) is is_logged


def test_errors_outside_of_kernels_and_about_paths_that_are_no_utf_8():
    error = torch.OutOfMemoryError("no room")
    failed = {"status": "out_of_memory", "reason": "OutOfMemoryError: no room"}
    asked = request("lean", "fa2")
    both = {"lean": failed, "fa2": failed}
    assert _attempt(raising(error), asked, announced(None)) == (both, True)
    assert _attempt(raising(error), asked, announced("lean")) == ({"lean": failed}, True)
    reuse = ProcessGroupReuseError("4 ranks need a new process")
    assert _attempt(raising(reuse), asked, announced("lean")) == ({}, False)
    error = FileNotFoundError(2, "No such file or directory", os.fsdecode(b"/lib/\xff.so"))
    rows, _ = _attempt(raising(error), request("lean"), announced("lean"))
    assert rows["lean"]["reason"].endswith(r"No such file or directory: '/lib/\udcff.so'")
    assert rows["lean"]["reason"].encode()


@contextmanager
def capture_of_a_graph() -> Iterator[None]:
    """Fail at the end of a broken capture, as torch.cuda.graph does."""
    try:
        yield
    finally:
        raise torch.AcceleratorError("CUDA error: a previous error during capture")


def test_a_broken_capture_is_told_by_the_launch_that_broke_it(capsys):
    def broken(problem, kernels, configs, overrides) -> Any:
        with capture_of_a_graph():
            raise RuntimeError("Triton Error [CUDA]: operation not permitted")

    def ended_early(problem, kernels, configs, overrides) -> Any:
        with capture_of_a_graph():
            pass

    def lost(problem, kernels, configs, overrides) -> Any:
        try:
            raise KeyError("no plan yet")
        except KeyError:
            raise torch.AcceleratorError(MISALIGNED)  # noqa: B904

    cases: tuple[tuple[Any, str], ...] = (
        (broken, "RuntimeError: Triton Error [CUDA]: operation not permitted"),
        (ended_early, "AcceleratorError: CUDA error: a previous error during capture"),
        (lost, f"AcceleratorError: {MISALIGNED}"),
    )
    for run, reason in cases:
        rows, usable = _attempt(run, request("lean", "fa2"), announced("fa2"))
        assert (rows, usable) == ({"fa2": {"status": "crashed", "reason": reason}}, False)
    # The log has both.
    logged = capsys.readouterr().err
    assert "operation not permitted" in logged
    assert "previous error during capture" in logged


def test_a_request_reaches_its_kernels_unchanged():
    def run_problem(problem, kernels, configs, overrides):
        return {name.name: {"seen": (problem, configs, overrides)} for name in kernels}

    message = {**request("fa2", "lean", configs="best"), "overrides": {"lean": OVERRIDE.to_dict()}}
    rows, can_go_on = _attempt(run_problem, json.loads(json.dumps(message)), announced(None))
    seen = {"seen": (PROBLEM, "best", {"lean": OVERRIDE})}
    assert rows == {"fa2": seen, "lean": seen}
    assert list(rows) == ["fa2", "lean"]
    assert can_go_on


@contextmanager
def started(log: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(WorkerTarget(find("h200"), None), log)
    try:
        yield worker
    finally:
        worker.kill()


def test_a_worker_answers_with_the_models_figures(tmp_path):
    from leanbench.model.predict import predict_cell

    with started(tmp_path / "log") as worker:
        settings = {"settings": settings_hash(find("h200"))}
        assert worker.environment == predicted_environment() | settings
        own = Cell(PROBLEM, "lean", override=OVERRIDE)
        rows, usable = worker.run([own, Cell(PROBLEM, "fa2")], timeout_s=60)
        again, _ = worker.run([Cell(PROBLEM, "fixed_split", "best")], timeout_s=60)
    expected = {
        name: predict_cell(PROBLEM, kernel(name), request, find("h200"))
        for name, request in (("lean", OVERRIDE), ("fa2", "default"), ("fixed_split", "best"))
    }
    # Energy was not requested.
    for row in expected.values():
        assert row.pop("energy_mj") > 0
    assert usable
    assert rows | again == json.loads(json.dumps(expected))
    assert list(again) == ["fixed_split"]
    assert rows["lean"]["config_choice"] == "given"


def test_a_worker_that_is_late_is_a_timeout(tmp_path):
    with started(tmp_path / "log") as worker:
        # Stopped, so that it is late however fast it would be.
        os.kill(worker._process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout) as late:
            worker.run([Cell(PROBLEM, "lean")], timeout_s=0.05)
        assert late.value.blamed is None
    assert worker._process.returncode == -9


def test_a_worker_that_dies_before_any_kernel_ran_blames_nobody(tmp_path):
    with started(tmp_path / "log") as worker:
        os.kill(worker._process.pid, signal.SIGSTOP)
        killed = threading.Timer(0.1, os.kill, (worker._process.pid, signal.SIGKILL))
        killed.start()
        with pytest.raises(WorkerLost, match=r"^the worker was ended by SIGKILL$") as lost:
            worker.run([Cell(PROBLEM, "lean")], timeout_s=60)
        killed.join()
        assert lost.value.blamed is None


def test_a_worker_that_lost_another_gpus_process_says_so(tmp_path, monkeypatch):
    with started(tmp_path / "log") as worker:
        monkeypatch.setattr(worker._process, "wait", lambda timeout: LOST_FOLLOWER)
        lost = worker._lost("lean")
        monkeypatch.undo()
    assert (str(lost), lost.blamed) == (RANK_LOST, "lean")


@pytest.mark.parametrize("answer", [b"\xff\xfe", b"[]"])
def test_a_worker_whose_answer_cannot_be_read_is_lost(tmp_path, answer):
    connection: Any = SimpleNamespace(
        send_bytes=lambda data: None, poll=lambda timeout_s: True, recv_bytes=lambda: answer
    )
    with started(tmp_path / "log") as worker:
        own, worker._connection = worker._connection, connection
        with pytest.raises(WorkerLost, match=r"^the worker's answer cannot be read$") as lost:
            worker.run([Cell(PROBLEM, "lean")], timeout_s=60)
        worker._connection = own
    assert (lost.value.blamed, lost.value.was_killed) == (None, False)


class Scripted(WorkerProcess):
    """Worker with scripted messages, on a clock that only they move."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *lines: tuple[float, dict[str, Any]]
    ) -> None:
        self._connection: Any = SimpleNamespace(send_bytes=lambda data: None)
        self._script = list(lines)
        self._now_s = 0.0
        #: Allowed seconds and running kernel of each wait.
        self.waits: list[tuple[float, str | None]] = []
        monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: self._now_s))

    def _receive(self, timeout_s: float, at: str | None) -> dict[str, Any]:
        self.waits.append((round(timeout_s, 9), at))
        seconds, line = self._script.pop(0)
        if seconds > timeout_s:
            raise WorkerTimeout(blamed=at)
        self._now_s += seconds
        return line


ANSWER = {"rows": {"a": {"status": "ok"}, "b": {"status": "ok"}}, "usable": True}


def test_a_kernel_has_the_timeout_for_all_its_turns(monkeypatch):
    turns = [(5.0, {"at": "a"}), (8.0, {"at": "b"}), (8.0, {"at": None}), (4.0, ANSWER)]
    worker = Scripted(monkeypatch, *turns)
    cells = [Cell(PROBLEM, "a"), Cell(PROBLEM, "b")]
    assert worker.run(cells, timeout_s=10.0) == (ANSWER["rows"], True)
    # 25 s together, and nobody had more than 10.
    assert worker.waits == [(10.0, None), (10.0, "a"), (10.0, "b"), (5.0, None)]
    turns = [(0.0, {"at": "a"}), *[(4.0, {"at": "b"}), (1.0, {"at": "a"})] * 2, (3.0, ANSWER)]
    worker = Scripted(monkeypatch, *turns)
    with pytest.raises(WorkerTimeout) as late:
        worker.run([Cell(PROBLEM, "a"), Cell(PROBLEM, "b")], timeout_s=10.0)
    assert late.value.blamed == "a"
    waits = [(10.0, None), (10.0, "a"), (10.0, "b"), (6.0, "a"), (9.0, "b"), (2.0, "a")]
    assert worker.waits == waits


@contextmanager
def spawned() -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """Start a worker with a connection."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        words = [sys.executable, "-m", "leanbench.run.worker", str(theirs.fileno())]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    with ours:
        yield ours, process


def test_a_worker_says_whose_code_runs():
    with spawned() as (connection, process):

        def ask(message: dict[str, Any]) -> list[dict[str, Any]]:
            send(connection, message)
            answers = [receive(connection)]
            while "at" in answers[-1]:
                answers.append(receive(connection))
            return answers

        ask(asdict(WorkerTarget(find("a100"), None)))
        assert [
            answer.get("at", "rows") for answer in ask(request("lean", "fa2"))
        ] == "lean fa2 rows".split()
        # Between problems nobody's does.
        assert [answer.get("at", "rows") for answer in ask(request("fa2"))] == [None, "fa2", "rows"]
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_environment_of_problems_that_gpus_share(monkeypatch, gpus):
    def shared(*devices: int) -> dict[str, Any]:
        return {"gpu_uuids": [*devices], "gpu_links": [{"first": 0, "second": 1, "nvlinks": 18}]}

    fakes = {
        "leanbench.measure.instruments.open_instruments": lambda *arguments: None,
        "leanbench.records.environment.measured_environment": lambda index: {"gpu_uuid": "GPU-a"},
        "leanbench.measure.ranks._device_count": lambda: 2,
        "leanbench.measure.ranks.environment_of_several": lambda devices: shared(*devices),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(name, fake)
    target = WorkerTarget(find("h200"), 1, gpus=gpus)
    _, hello = _start(json.loads(json.dumps(asdict(target))), announced(None))
    settings = settings_hash(find("h200"))
    several = shared(1, 0) if gpus == 2 else {}
    assert hello == {"environment": {"gpu_uuid": "GPU-a", **several, "settings": settings}}


def test_a_worker_that_cannot_start_says_why_and_where_to_look(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"the worker did not start: \w+: .*, see .*log"):
        WorkerProcess(WorkerTarget(find("a100"), 0), tmp_path / "log")
