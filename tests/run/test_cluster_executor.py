"""A sweep on a cluster of this process: every cell has one row, whatever happens to nodes."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_cluster import Call, FakeCluster, nodes

from leanbench.cluster.cluster import shared_variables
from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.measure.options import MeasureOptions
from leanbench.records.boards import boards_of
from leanbench.records.directory import RunDirectory, read_rows
from leanbench.records.manifest import read_manifest
from leanbench.records.row import Row
from leanbench.run import cluster_executor, problem_runner
from leanbench.run.cells import Cell
from leanbench.run.cluster_executor import AgentRequest, Answer, ClusterExecutor
from leanbench.run.runner import run_cells
from leanbench.run.worker_process import WorkerLost, WorkerTarget

TARGET = Target(find("h200"), 0)
KERNELS = ("lean", "fa2")
CELLS = [
    Cell(AttentionProblem(1, 8, 8, 1024 * number, 64), kernel)
    for number in range(1, 9)
    for kernel in KERNELS
]
ASKED = {
    "source": "measured",
    "gpu": {"name": "h200"},
    "environments": {},
    "cells": [cell.key for cell in CELLS],
}
REQUEST = AgentRequest(None, False, MeasureOptions(), 120.0, {})


class Worker:
    """Stands for WorkerProcess: a latency that names the problem, on a board of its own."""

    started = 0
    #: Signal that ends the worker at its first try of a problem.
    kills: ClassVar[dict[AttentionProblem, str]] = {}

    def __init__(self, target: WorkerTarget, log: Path) -> None:
        Worker.started += 1
        self.environment = {"gpu_uuid": f"GPU-{Worker.started}", "kernels": "aa"}
        self.calibration_us = 63.0 + Worker.started / 10 if target.calibrate else None
        self._log = log

    def run(self, cells: Sequence[Cell], timeout_s: float) -> tuple[dict[str, Any], bool]:
        if (kill := Worker.kills.pop(cells[0].problem, None)) is not None:
            raise WorkerLost(f"the worker was ended by {kill}", "lean", kill == "SIGKILL")
        with self._log.open("a") as log:
            log.write(f"{cells[0].problem.label}\n")
        latency_us = float(cells[0].problem.max_context)
        return {cell.kernel: {"status": "ok", "latency_us": latency_us} for cell in cells}, True

    def kill(self) -> None: ...


class Unwatched:
    def starts(self, cell: Cell, process: int = 1) -> None: ...

    def measured(self, cell: Cell) -> None: ...

    def finished(self, cell: Cell, row: Row) -> None: ...


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(Worker, "started", 0)
    monkeypatch.setattr(problem_runner, "WorkerProcess", Worker)
    monkeypatch.setattr(cluster_executor, "choose", lambda gpu, require_gpu: TARGET)


def go(
    path: Path, cluster: FakeCluster, cells: Sequence[Cell] = CELLS, budget_s: float | None = None
) -> int:
    """Run cells in a new or an existing run."""
    opened = RunDirectory.resume if path.exists() else RunDirectory.create
    with opened(path, deepcopy(ASKED)) as run:
        executor = ClusterExecutor(cluster, REQUEST, cells, lambda text: None)
        first = next(boards_of(run.manifest), None)
        executor.prepare(executor.target(), path / "worker.log", first, mix_boards=False)
        return run_cells(cells, run, executor, Unwatched(), budget_s)


def assert_each_once(path: Path) -> None:
    assert sorted(row.cell for row in read_rows(path)) == sorted(cell.key for cell in CELLS)


def test_every_cell_has_one_row_with_its_board(tmp_path):
    cluster = FakeCluster(nodes(1, 2))
    assert go(tmp_path / "r", cluster) == 0
    rows = {row.cell: row for row in read_rows(tmp_path / "r")}
    assert_each_once(tmp_path / "r")
    for cell in CELLS:
        assert rows[cell.key].latency_us == cell.problem.max_context
    # All kernels of a problem on one GPU.
    for lean, fa2 in zip(CELLS[::2], CELLS[1::2], strict=True):
        assert rows[lean.key].environment == rows[fa2.key].environment
    manifest = read_manifest(tmp_path / "r")
    used = {row.environment for row in rows.values()}
    assert used == manifest["environments"].keys() == manifest["boards"].keys()
    boards = {board.environment["gpu_uuid"]: board for board in boards_of(manifest)}
    assert set(boards) == {"GPU-1", "GPU-2", "GPU-3"}
    assert boards["GPU-2"].calibration_us == 63.2
    assert {row.run_id for row in rows.values()} == {manifest["id"]}
    log = (tmp_path / "r" / "worker.log").read_text().splitlines()
    assert sorted(log) == sorted(cell.problem.label for cell in CELLS[::2])
    assert cluster.closed


def test_a_worker_that_is_killed_costs_no_row_and_one_that_crashes_costs_the_kernels(tmp_path):
    Worker.kills |= {CELLS[2].problem: "SIGKILL", CELLS[6].problem: "SIGSEGV"}
    cluster = FakeCluster(nodes(1, 1))
    assert go(tmp_path / "r", cluster) == 0
    assert Worker.kills == {}
    statuses = {row.cell: row.status for row in read_rows(tmp_path / "r")}
    assert [key for key, status in statuses.items() if status != "ok"] == [CELLS[6].key]
    assert len(statuses) == len(CELLS)
    assert [actor.alive for actor in cluster.actors] == [False] * 3
    assert len(cluster.works) == len(CELLS) / 2 + 1


def test_cells_that_take_two_agents_along_are_crashed_rows(tmp_path):
    poison = CELLS[4].problem

    def end(cluster: FakeCluster, call: Call) -> None:
        if call.arguments[0].cells[0].problem == poison:
            call.actor.alive = False

    assert go(tmp_path / "r", FakeCluster(nodes(1, 1, 1), end)) == 0
    rows = {row.cell: row for row in read_rows(tmp_path / "r")}
    crashed = [row for row in rows.values() if row.status == "crashed"]
    assert [row.cell for row in crashed] == [cell.key for cell in CELLS[4:6]]
    assert crashed[0].reason is not None
    assert crashed[0].reason.count("was lost (ActorDiedError)") == 2
    assert len(rows) == len(CELLS)


def test_results_that_come_twice_are_one_row(tmp_path, monkeypatch):
    work = cluster_executor.SweepAgent.work

    def twice(agent, job):
        answer = work(agent, job)
        return Answer([*answer.results, *answer.results], answer.log)

    monkeypatch.setattr(cluster_executor.SweepAgent, "work", twice)
    assert go(tmp_path / "r", FakeCluster(nodes(1, 1))) == 0
    assert_each_once(tmp_path / "r")


def test_a_driver_that_was_killed_is_resumed_on_boards_like_the_first(tmp_path, monkeypatch):
    def kill(cluster: FakeCluster, call: Call) -> None:
        if len(cluster.works) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "r", FakeCluster(nodes(1), kill))
    assert len(read_rows(tmp_path / "r")) == 6
    cluster = FakeCluster(nodes(1, 1))
    assert go(tmp_path / "r", cluster) == 0
    assert len(cluster.works) == len(CELLS) / 2 - 3
    assert_each_once(tmp_path / "r")
    (tmp_path / "r" / "results.jsonl").write_text("")
    other = {"gpu_uuid": "GPU-9", "kernels": "bb"}
    monkeypatch.setattr(Worker, "environment", property(lambda self: other, lambda *a: None), False)
    with pytest.raises(UserError, match="kernels is bb, not aa as of NVIDIA H200 GPU-1"):
        go(tmp_path / "r", FakeCluster(nodes(1)))


def test_a_spent_budget_leaves_cells(tmp_path):
    cluster = FakeCluster(nodes(1))
    assert go(tmp_path / "r", cluster, budget_s=0.0) == len(CELLS)
    assert cluster.works == []


def test_problems_of_two_gpus_are_refused_by_name_where_no_node_has_two():
    shared = Cell(AttentionProblem(1, 8, 8, 4096, 64, parallel="tp:2"), "lean")
    with pytest.raises(
        UserError, match=r"^b1 h8 n4096 d64 .*tp:2.*: 2 GPUs of one host are needed"
    ):
        ClusterExecutor(FakeCluster(nodes(1, 1)), REQUEST, [CELLS[0], shared], print)
    cluster = FakeCluster(nodes(2))
    executor = ClusterExecutor(cluster, REQUEST, [CELLS[0], shared], print)
    assert executor.target() == TARGET
    (actor,) = cluster.actors
    assert actor.agent._request == replace(REQUEST, gpus=2)


def test_agents_have_the_settings_of_this_process(monkeypatch):
    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    monkeypatch.delenv("LEANBENCH_KERNEL_PATH", raising=False)
    assert shared_variables() == {"LEANBENCH_CONFIGS": "off"}
    request = replace(REQUEST, variables={"LEANBENCH_CONFIGS": "on"})
    cluster_executor.SweepAgent(request)
    assert shared_variables() == {"LEANBENCH_CONFIGS": "on"}
