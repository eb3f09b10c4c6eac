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

from leanbench.configs.fingerprint import settings_hash
from leanbench.core.errors import DoesNotFit, SuspectResult, UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.gpu.nvml_library import GpuLostError
from leanbench.measure.ranks import LOST_FOLLOWER, RANK_LOST, ProcessGroupReuseError, RankLost
from leanbench.records.environment import environment_key, predicted_environment
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
    """As it arrives in the worker."""
    message = {"problem": PROBLEM.to_dict(), "kernels": kernels, "configs": configs}
    return json.loads(json.dumps({**message, "overrides": {}}))


class Silent:
    """A connection to nobody."""

    def send_bytes(self, data: bytes) -> None:
        pass


def announced(name: str | None) -> Announcer:
    """After `name` was announced."""
    announce = Announcer(cast("Connection", Silent()))
    announce(name)
    return announce


@pytest.mark.parametrize(
    ("error", "status", "reason", "usable"),
    [
        (ValueError("wrong\nmore"), "crashed", "ValueError: wrong", True),
        (ValueError(), "crashed", "ValueError", True),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "out_of_memory",
            "CUDA out of memory. Tried",
            True,
        ),
        (
            torch.AcceleratorError("device-side assert"),
            "crashed",
            "AcceleratorError: device-side assert",
            False,
        ),
        (
            RuntimeError("CUDA error: misaligned address"),
            "crashed",
            "RuntimeError: CUDA error",
            False,
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access"),
            "crashed",
            "Triton Error [CUDA]",
            False,
        ),
    ],
)
def test_errors_become_rows_and_cuda_errors_end_the_worker(error, status, reason, usable, capsys):
    def run_problem(problem, kernels, configs, overrides):
        raise error

    rows, can_go_on = _attempt(run_problem, request("lean", "fa2", "fixed_split"), announced("fa2"))
    # The others are asked for again.
    assert list(rows) == ["fa2"]
    assert rows["fa2"]["status"] == status
    assert reason in rows["fa2"]["reason"]
    assert "\n" not in rows["fa2"]["reason"]
    assert can_go_on is usable
    assert type(error).__name__ in capsys.readouterr().err


@contextmanager
def capture_of_a_graph() -> Iterator[None]:
    """As torch.cuda.graph: the end of a capture that was broken is an error, too."""
    try:
        yield
    finally:
        raise torch.AcceleratorError(
            "CUDA error: operation failed due to a previous error during capture"
        )


def test_an_error_about_a_path_that_is_no_utf_8_is_a_reason_that_can_be_read():
    def run_problem(problem, kernels, configs, overrides):
        raise FileNotFoundError(2, "No such file or directory", os.fsdecode(b"/lib/\xff.so"))

    rows, _ = _attempt(run_problem, request("lean"), announced("lean"))
    assert rows["lean"]["reason"].endswith(r"No such file or directory: '/lib/\udcff.so'")
    assert rows["lean"]["reason"].encode()


def test_a_broken_capture_is_told_by_the_launch_that_broke_it(capsys):
    refused = "Triton Error [CUDA]: operation not permitted when stream is capturing"

    def run_problem(problem, kernels, configs, overrides):
        with capture_of_a_graph():
            raise RuntimeError(refused)

    def end_early(problem, kernels, configs, overrides):
        with capture_of_a_graph():
            pass

    def lose(problem, kernels, configs, overrides):
        try:
            raise KeyError("no plan yet")
        except KeyError:
            raise torch.AcceleratorError("CUDA error: misaligned address")  # noqa: B904

    reasons = [
        (run_problem, f"RuntimeError: {refused}"),
        (
            end_early,
            "AcceleratorError: CUDA error: operation failed due to a previous error during capture",
        ),
        (lose, "AcceleratorError: CUDA error: misaligned address"),
    ]
    for run, reason in reasons:
        assert _attempt(run, request("lean", "fa2"), announced("fa2")) == (
            {"fa2": {"status": "crashed", "reason": reason}},
            False,
        )
    # The log has both.
    logged = capsys.readouterr().err
    assert refused in logged
    assert "previous error during capture" in logged


def test_what_a_kernel_refuses_when_it_is_prepared_is_a_sentence(capsys):
    def run_problem(problem, kernels, configs, overrides):
        raise UserError("flash-attn 1.0 is too old: update it")

    rows, can_go_on = _attempt(run_problem, request("lean", "fa2"), announced("fa2"))
    assert rows == {
        "fa2": {"status": "unsupported", "reason": "flash-attn 1.0 is too old: update it"}
    }
    assert can_go_on
    assert capsys.readouterr().err == ""


def test_settings_that_do_not_fit_are_unsupported_and_a_lost_gpu_is_not():
    def refuse(problem, kernels, configs, overrides):
        raise DoesNotFit("lean needs 300 KB of shared memory")

    def lose(problem, kernels, configs, overrides):
        raise GpuLostError("the GPU no longer answers")

    assert _attempt(refuse, request("lean"), announced("lean")) == (
        {"lean": {"status": "unsupported", "reason": "lean needs 300 KB of shared memory"}},
        True,
    )
    assert _attempt(lose, request("lean"), announced("lean")) == (
        {"lean": {"status": "crashed", "reason": "GpuLostError: the GPU no longer answers"}},
        False,
    )


def test_a_lost_rank_is_told_in_the_words_of_the_parent(capsys):
    def run_problem(problem, kernels, configs, overrides):
        raise RankLost

    reason = "the process of another GPU ended while this was measured, see worker.log"
    assert _attempt(run_problem, request("lean", "fa2"), announced("lean")) == (
        {"lean": {"status": "crashed", "reason": reason}},
        False,
    )
    assert "RankLost" in capsys.readouterr().err


def test_a_problem_that_needs_a_new_process_has_no_rows(capsys):
    def run_problem(problem, kernels, configs, overrides):
        raise ProcessGroupReuseError("4 ranks need a new process")

    assert _attempt(run_problem, request("lean", "fa2"), announced("lean")) == ({}, False)
    assert capsys.readouterr().err == ""


def test_what_fails_where_no_kernels_code_runs_is_everybodys():
    def run_problem(problem, kernels, configs, overrides):
        raise torch.OutOfMemoryError("no room for the inputs")

    rows, can_go_on = _attempt(run_problem, request("lean", "fa2"), announced(None))
    for name in ("lean", "fa2"):
        assert rows.pop(name) == {
            "status": "out_of_memory",
            "reason": "OutOfMemoryError: no room for the inputs",
        }
    assert rows == {}
    assert can_go_on


def test_an_alarm_is_a_suspect_row_and_no_traceback(capsys):
    def run_problem(problem, kernels, configs, overrides):
        raise SuspectResult("lean changed its inputs")

    assert _attempt(run_problem, request("lean", "fa2"), announced("lean")) == (
        {"lean": {"status": "suspect", "reason": "lean changed its inputs"}},
        True,
    )
    assert capsys.readouterr().err == ""


def test_a_request_reaches_its_kernels_unchanged():
    def run_problem(problem, kernels, configs, overrides):
        return {name.name: {"seen": (problem, configs, overrides)} for name in kernels}

    rows, can_go_on = _attempt(run_problem, request("fa2", "lean", configs="best"), announced(None))
    assert rows == {"fa2": {"seen": (PROBLEM, "best", {})}, "lean": {"seen": (PROBLEM, "best", {})}}
    assert list(rows) == ["fa2", "lean"]
    assert can_go_on


def test_given_settings_reach_the_worker():
    def run_problem(problem, kernels, configs, overrides):
        return {name.name: {"seen": overrides.get(name.name, configs)} for name in kernels}

    message = {
        **request("fa2", "lean", configs="heuristic"),
        "overrides": {"lean": OVERRIDE.to_dict()},
    }
    rows, _ = _attempt(run_problem, json.loads(json.dumps(message)), announced(None))
    assert rows == {"fa2": {"seen": "heuristic"}, "lean": {"seen": OVERRIDE}}


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
        rows, usable = worker.run([Cell(PROBLEM, "lean"), Cell(PROBLEM, "fa2")], timeout_s=60)
        again, _ = worker.run([Cell(PROBLEM, "fixed_split", "best")], timeout_s=60)
    expected = {
        name: predict_cell(PROBLEM, kernel(name), "default", find("h200"))
        for name in ("lean", "fa2")
    }
    best = predict_cell(PROBLEM, kernel("fixed_split"), "best", find("h200"))
    # Nobody asked for energy.
    for row in (*expected.values(), best):
        assert row.pop("energy_mj") > 0
    assert usable
    assert rows == json.loads(json.dumps(expected))
    assert again == {"fixed_split": json.loads(json.dumps(best))}


def test_a_worker_predicts_given_settings_beside_the_heuristic(tmp_path):
    with started(tmp_path / "log") as worker:
        rows, _ = worker.run(
            [Cell(PROBLEM, "lean", override=OVERRIDE), Cell(PROBLEM, "fa2")], timeout_s=60
        )
    heuristic = kernel("fa2").default_config(PROBLEM, find("h200"))
    assert heuristic is not None
    assert (rows["lean"]["config"], rows["lean"]["config_choice"]) == (OVERRIDE.to_dict(), "given")
    assert (rows["fa2"]["config"], rows["fa2"]["config_choice"]) == (
        heuristic.to_dict(),
        "heuristic",
    )


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


@pytest.mark.parametrize("answer", [b"\xff\xfe", b"", b"[]", b"{", b"[" * 100_000])
def test_a_worker_whose_answer_cannot_be_read_is_lost(tmp_path, answer):
    """As of a kernel that writes to every file."""
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
    """A worker of which only the waiting for messages is left: each takes its time, on a clock that
    moves only then.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *lines: tuple[float, dict[str, Any]]
    ) -> None:
        self._connection: Any = SimpleNamespace(send_bytes=lambda data: None)
        self._script = list(lines)
        self._now_s = 0.0
        #: (seconds allowed, whose code ran) of each wait.
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


def test_each_kernel_has_the_timeout_for_itself(monkeypatch):
    turns = [(5.0, {"at": "a"}), (8.0, {"at": "b"}), (8.0, {"at": None}), (4.0, ANSWER)]
    worker = Scripted(monkeypatch, *turns)
    assert worker.run([Cell(PROBLEM, "a"), Cell(PROBLEM, "b")], timeout_s=10.0) == (
        ANSWER["rows"],
        True,
    )
    # 25 s together, and nobody had more than 10.
    assert worker.waits == [(10.0, None), (10.0, "a"), (10.0, "b"), (5.0, None)]


def test_the_turns_of_a_kernel_count_together(monkeypatch):
    turns = [(0.0, {"at": "a"}), *[(4.0, {"at": "b"}), (1.0, {"at": "a"})] * 2, (3.0, ANSWER)]
    worker = Scripted(monkeypatch, *turns)
    with pytest.raises(WorkerTimeout) as late:
        worker.run([Cell(PROBLEM, "a"), Cell(PROBLEM, "b")], timeout_s=10.0)
    assert late.value.blamed == "a"
    assert worker.waits == [
        (10.0, None),
        (10.0, "a"),
        (10.0, "b"),
        (6.0, "a"),
        (9.0, "b"),
        (2.0, "a"),
    ]


@contextmanager
def spawned() -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """A worker and our end of its connection, which is closed in the end."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "leanbench.run.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
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


def test_a_worker_ends_when_its_parent_closes_the_connection():
    with spawned() as (connection, process):
        send(connection, asdict(WorkerTarget(find("a100"), None)))
        assert "environment" in receive(connection)
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_environment_of_problems_that_gpus_share(monkeypatch, gpus):
    links = [{"first": 0, "second": 1, "nvlinks": 18}]
    fakes = {
        "leanbench.measure.instruments.open_instruments": lambda *arguments: None,
        "leanbench.records.environment.measured_environment": lambda index: {"gpu_uuid": "GPU-a"},
        "leanbench.measure.ranks._device_count": lambda: 2,
        "leanbench.measure.ranks.environment_of_several": lambda devices: {
            "gpu_uuids": list(devices),
            "gpu_links": links,
        },
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(name, fake)
    target = WorkerTarget(find("h200"), 1, gpus=gpus)
    _, hello = _start(json.loads(json.dumps(asdict(target))), announced(None))
    settings = settings_hash(find("h200"))
    several = {"gpu_uuids": [1, 0], "gpu_links": links} if gpus == 2 else {}
    assert hello == {"environment": {"gpu_uuid": "GPU-a", **several, "settings": settings}}


def test_a_worker_that_cannot_start_says_why_and_where_to_look(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"the worker did not start: \w+: .*, see .*log"):
        WorkerProcess(WorkerTarget(find("a100"), 0), tmp_path / "log")


def test_environment_keys_differ_with_anything_in_them():
    environment = predicted_environment()
    assert environment_key(environment) == environment_key(dict(reversed(environment.items())))
    assert environment_key(environment) != environment_key({**environment, "driver": "580"})
