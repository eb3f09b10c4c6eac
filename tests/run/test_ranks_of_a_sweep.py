"""Problems of several processes: one that hangs, fails or ends idle, and its cost."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretended_ranks
import pytest

from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.measure.ranks import FAILED_FOLLOWER, RANK_LOST
from leanbench.records.row import Row
from leanbench.run import worker_process
from leanbench.run.cells import Cell
from leanbench.run.problem_runner import Budget, ProblemRunner
from leanbench.run.worker_process import WorkerProcess, WorkerTarget, WorkerTimeout

#: For the hang, of 0.1 s each: the limit of a test that is broken.
_LOOKS = 1200
CELLS = [
    [
        Cell(AttentionProblem(1, 8, 8, context, 64, parallel="tp:2"), kernel)
        for kernel in ("lean", "fa2", "fixed_split")
    ]
    for context in (1024, pretended_ranks.HANGS_AT, 4096)
]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProblemRunner]:
    def start(words: list[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(pretended_ranks.command("worker", words[-1]), **options)

    pretended = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(worker_process, "subprocess", pretended)
    monkeypatch.setenv("PYTHONPATH", pretended_ranks.folders())
    monkeypatch.setenv(pretended_ranks.FOLLOWERS, str(tmp_path / "followers"))
    receive = WorkerProcess._receive

    def hurried(own: WorkerProcess, timeout_s: float, at: str | None) -> Any:
        """Stop waiting once the rank hangs."""
        for _ in range(_LOOKS):
            if at != pretended_ranks.HANGS or hangs(tmp_path / "followers"):
                break
            with suppress(WorkerTimeout):
                return receive(own, 0.1, at)
        return receive(own, 0.1 if at == pretended_ranks.HANGS else timeout_s, at)

    monkeypatch.setattr(WorkerProcess, "_receive", hurried)
    runner = ProblemRunner(WorkerTarget(find("h200"), 0, gpus=4), 120.0, tmp_path / "log")
    yield runner
    runner.close()


def hangs(followers: Path) -> bool:
    """Return True if the first follower has stopped and no other was started."""
    pids = followers.read_text().split() if followers.exists() else []
    return len(pids) == 1 and state_of(int(pids[0])) == "T"


def is_there(pid: int) -> bool:
    """Return True if a process has not ended."""
    return state_of(pid) not in (None, "Z", "X")


def state_of(pid: int) -> str | None:
    """Return the state letter of a process; None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_rank_that_hangs_costs_its_cell_and_a_new_group(
    runner: ProblemRunner, tmp_path: Path
) -> None:
    results = [own for cells in CELLS for own in runner.run(cells, Budget(None))]
    rows = {(own.cell.problem.max_context, own.cell.kernel): own.row for own in results}
    log = (tmp_path / "log").read_text()
    assert len(rows) == len(results) == 9
    for (context, kernel), row in rows.items():
        if (context, kernel) == (pretended_ranks.HANGS_AT, pretended_ranks.HANGS):
            assert row.status == "timeout"
            assert row.reason == "no result within 120 s, raise the limit with --timeout"
            assert row.latency_us is None
        else:
            assert (row.status, row.latency_us) == ("ok", 2.0 * context), (row, log)
    # Two workers on boards that are one, each with a follower; nothing is left of the first pair.
    assert len({own.board.key for own in results}) == 1
    assert results[0].board.environment["gpu_uuids"] == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    first, second = map(int, (tmp_path / "followers").read_text().split())
    assert not is_there(first)
    assert is_there(second)
    runner.close()
    for _ in range(_LOOKS):
        if not is_there(second):
            return
        time.sleep(0.1)
    pytest.fail("the second follower was left")


@pytest.mark.deep
def test_each_number_of_gpus_has_a_worker_of_its_own(runner: ProblemRunner, tmp_path: Path) -> None:
    shares = ("none", "cp:2", "none", "tp:2", "cp:4", "none", "cp:2xtp:2", "tp:8", "cp:4")
    problems = [
        AttentionProblem(1, 8, 8, 1024 * number, 64, parallel=parallel)
        for number, parallel in enumerate(shares, start=1)
    ]
    rows = [
        own.row for problem in problems for own in runner.run([Cell(problem, "lean")], Budget(None))
    ]
    log = (tmp_path / "log").read_text()
    assert len(rows) == len(shares)
    of_eight = rows.pop(7)
    assert of_eight.status == "unsupported"
    assert of_eight.reason is not None
    assert of_eight.reason.startswith("this problem is for 8 GPUs and 4 can be used here")
    assert [row.status for row in rows] == ["ok"] * len(rows), (rows, log)
    workers = [row.warnings for row in rows]
    # Problems on one GPU, or on too many, run in any worker.
    assert workers == [workers[0]] * 4 + [workers[4]] * 4
    assert workers[0] != workers[4]
    assert len((tmp_path / "followers").read_text().split()) == 1 + 3


@pytest.mark.deep
def test_a_rank_that_fails_alone_costs_its_cell_at_once(
    runner: ProblemRunner, tmp_path: Path
) -> None:
    problem = AttentionProblem(1, 8, 8, pretended_ranks.FAILS_AT, 64, parallel="tp:2")
    cells = [Cell(problem, kernel) for kernel in ("lean", "fa2", "fixed_split")]
    rows = {own.cell.kernel: own.row for own in runner.run(cells, Budget(None))}
    log = (tmp_path / "log").read_text()
    assert rows["fa2"].status == "crashed", log
    assert rows["fa2"].reason == f"{RANK_LOST}, see worker.log"
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in log
    assert f"rank 1 ended with {FAILED_FOLLOWER}" in log
    for kernel in ("lean", "fixed_split"):
        assert (rows[kernel].status, rows[kernel].latency_us) == ("ok", 2.0 * 8192), log


@pytest.mark.deep
def test_a_rank_that_ends_idle_costs_no_cell(runner: ProblemRunner, tmp_path: Path) -> None:
    def measured(context: int, parallel: str) -> Row:
        problem = AttentionProblem(1, 8, 8, context, 64, parallel=parallel)
        (own,) = runner.run([Cell(problem, "lean")], Budget(None))
        assert own.row.status == "ok", (own.row, (tmp_path / "log").read_text())
        return own.row

    first = measured(1024, "tp:2")
    os.kill(int((tmp_path / "followers").read_text()), signal.SIGKILL)
    for _ in range(_LOOKS):
        if "rank 1 ended with -9" in (tmp_path / "log").read_text():
            break
        time.sleep(0.1)
    alone, second = measured(1024, "none"), measured(4096, "tp:2")
    assert alone.warnings == first.warnings != second.warnings
    assert len((tmp_path / "followers").read_text().split()) == 2
