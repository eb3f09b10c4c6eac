"""The loop over problems with scripted workers: blame, retries and rows."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.measure.ranks import RANK_LOST
from leanbench.records.directory import RunDirectory, read_rows
from leanbench.records.environment import environment_key
from leanbench.records.manifest import read_manifest
from leanbench.records.row import Row
from leanbench.records.samples import Samples, read_samples
from leanbench.run import problem_runner as module
from leanbench.run.cells import Cell
from leanbench.run.problem_runner import Limits
from leanbench.run.runner import LocalExecutor, Stopped, run_cells
from leanbench.run.worker_process import WorkerLost, WorkerTarget, WorkerTimeout

PROBLEMS = [AttentionProblem(1, 8, 8, context, 64) for context in (1024, 2048, 4096)]
KERNELS = ("fa2", "lean", "fixed_split")
CELLS = [Cell(problem, kernel) for problem in PROBLEMS for kernel in KERNELS]
ASKED = {"gpu": {"name": "h200"}, "environments": {}, "cells": [cell.key for cell in CELLS]}
RAW = {
    "samples_us": [1.0, 2.0],
    "rounds": [0, 1],
    "sm_clock_mhz": [None, 1980],
    "crosscheck_us": [1.5],
}

Rows = dict[str, dict[str, Any]]
#: What a worker does with the cells of a problem.
Act = Callable[[Sequence[Cell]], tuple[Rows, bool]]


def measured(cells: Sequence[Cell]) -> tuple[Rows, bool]:
    """Return latencies that identify problem and kernel."""
    return {
        cell.kernel: {"status": "ok", "latency_us": latency_us(cell), "raw_samples": dict(RAW)}
        for cell in cells
    }, True


def latency_us(cell: Cell) -> float:
    return cell.problem.max_context + KERNELS.index(cell.kernel) / 10


class Workers:
    """Stands for the class WorkerProcess: `acts` answer the first requests, `measured` others."""

    def __init__(self, *acts: Act) -> None:
        self._acts = list(acts)
        self.started = 0
        self.alive = 0
        #: Kernels and timeout of each request.
        self.asked: list[tuple[tuple[str, ...], float]] = []

    def __call__(self, target: WorkerTarget, log: Path) -> Workers:
        assert self.alive == 0, "one worker at a time"
        self.started += 1
        self.alive = 1
        self.environment = {"worker": "scripted"}
        self.calibration_us = 63.0 if target.calibrate else None
        return self

    def run(self, cells: Sequence[Cell], timeout_s: float) -> tuple[Rows, bool]:
        assert self.alive
        assert len({cell.problem for cell in cells}) == 1
        self.asked.append((tuple(cell.kernel for cell in cells), timeout_s))
        return (self._acts.pop(0) if self._acts else measured)(cells)

    def kill(self) -> None:
        self.alive = 0


class Watching:
    def __init__(self, signalled: int | None = None) -> None:
        self.events: list[tuple[str, str, int]] = []
        #: Process and context of each problem that started.
        self.started: list[tuple[int, int]] = []
        #: Signal to this process after each row.
        self.signalled = signalled

    def starts(self, cell: Cell, process: int = 1) -> None:
        self.started.append((process, cell.problem.max_context))
        self.events.append(("starts", cell.kernel, cell.problem.max_context))

    def measured(self, cell: Cell) -> None:
        self.events.append(("measured", cell.kernel, cell.problem.max_context))

    def finished(self, cell: Cell, row: Row) -> None:
        assert row.cell == cell.key
        self.events.append((row.status, cell.kernel, cell.problem.max_context))
        if self.signalled is not None:
            signal.raise_signal(self.signalled)


def go(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Workers,
    cells: Sequence[Cell] = CELLS[:3],
    *,
    limits: Limits | None = None,
    observer: Watching | None = None,
    repeat: int = 1,
) -> int:
    """Run cells in a new or an existing run."""
    monkeypatch.setattr(module, "WorkerProcess", workers)
    opened = RunDirectory.resume if path.exists() else RunDirectory.create
    with opened(path, ASKED) as run:
        limits = limits or Limits()
        target = WorkerTarget(find("h200"), 0)
        executor = LocalExecutor(target, limits.timeout_s, path / "log", repeat)
        left = run_cells(cells, run, executor, observer or Watching(), limits.budget_s)
    assert workers.alive == 0
    return left


def found(path: Path) -> list[tuple[str, int, str, float | None]]:
    """Return (kernel, context, status, latency) of each row."""
    return [
        (row.kernel, row.problem["context"], row.status, row.latency_us) for row in read_rows(path)
    ]


def well(cell: Cell) -> tuple[str, int, str, float]:
    return cell.kernel, cell.problem.max_context, "ok", latency_us(cell)


def lost(blamed: str | None, how: str = "the worker was ended by SIGSEGV") -> Act:
    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        raise WorkerLost(how, blamed)

    return act


def late(blamed: str | None) -> Act:
    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        raise WorkerTimeout(blamed=blamed)

    return act


def failed(kernel: str, status: str, *, usable: bool) -> Act:
    return lambda cells: ({kernel: {"status": status, "reason": "it failed"}}, usable)


def test_kernels_of_a_problem_are_asked_together(tmp_path, monkeypatch):
    workers, observer = Workers(), Watching()
    limits = Limits(7.0)
    assert go(tmp_path / "r", monkeypatch, workers, CELLS, limits=limits, observer=observer) == 0
    assert workers.asked == [(KERNELS, 7.0)] * 3
    assert workers.started == 1
    assert found(tmp_path / "r") == [well(cell) for cell in CELLS]
    of_first = [("starts", "fa2", 1024), *(("ok", kernel, 1024) for kernel in KERNELS)]
    assert observer.events[:5] == [*of_first, ("starts", "fa2", 2048)]
    assert read_samples(tmp_path / "r") == {
        cell.key: Samples(cell=cell.key, **RAW) for cell in CELLS
    }


@pytest.fixture
def heeded_signals() -> Iterator[dict[str, Any]]:
    """Replace the handlers of SIGINT and SIGTERM by recorders."""
    came: list[int] = []

    def tell(number: int, _frame: Any) -> None:
        came.append(number)

    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, tell) for number in both}
    yield {"came": came, "handler": tell}
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_gives_the_signals_back_and_minds_none_that_were_ignored(
    tmp_path, monkeypatch, heeded_signals
):
    go(tmp_path / "r", monkeypatch, Workers())
    assert signal.getsignal(signal.SIGTERM) is heeded_signals["handler"]
    signal.raise_signal(signal.SIGINT)
    assert heeded_signals["came"] == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert go(tmp_path / "ignored", monkeypatch, Workers(), observer=Watching(signal.SIGINT)) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is heeded_signals["handler"]
    assert len(found(tmp_path / "ignored")) == 3


def test_after_a_signal_further_ones_are_ignored_to_the_end(tmp_path, monkeypatch, heeded_signals):
    workers = Workers()
    with pytest.raises(Stopped) as stopped:
        go(tmp_path / "r", monkeypatch, workers, CELLS, observer=Watching(signal.SIGINT))
    assert workers.alive == 0
    assert (str(stopped.value), stopped.value.exit_code) == ("SIGINT", 130)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    assert heeded_signals["came"] == []
    assert found(tmp_path / "r") == [well(CELLS[0])]


@pytest.mark.parametrize("other", [KeyboardInterrupt, SystemError])
def test_a_signal_of_which_a_library_made_another_exception_stops_the_sweep(
    tmp_path, monkeypatch, heeded_signals, other
):
    class Interrupted(Watching):
        def finished(self, cell: Cell, row: Row) -> None:
            try:
                super().finished(cell, row)
            except BaseException:
                raise other from None

    with pytest.raises(Stopped) as stopped:
        go(tmp_path / "r", monkeypatch, Workers(), CELLS, observer=Interrupted(signal.SIGTERM))
    assert (str(stopped.value), stopped.value.exit_code) == ("SIGTERM", 143)
    assert found(tmp_path / "r") == [well(CELLS[0])]


def test_configs_are_not_mixed_in_a_request(tmp_path, monkeypatch):
    best = [Cell(PROBLEMS[0], kernel, "best") for kernel in ("fa2", "lean")]
    cells = [Cell(PROBLEMS[0], "lean"), *best]
    workers = Workers()
    go(tmp_path / "r", monkeypatch, workers, cells)
    assert [kernels for kernels, _ in workers.asked] == [("lean",), ("fa2", "lean")]


def test_rows_say_what_was_asked_and_where(tmp_path, monkeypatch):
    go(tmp_path / "r", monkeypatch, Workers(), CELLS[:1])
    (row,) = read_rows(tmp_path / "r")
    assert row.cell == CELLS[0].key
    assert row.problem == CELLS[0].problem.to_dict()
    assert (row.source, row.decomposition) == ("measured", "one_cta_per_tile")
    assert row.kv_bytes == 2 * 2**20
    assert row.environment == environment_key({"worker": "scripted"})
    assert row.run_id == read_manifest(tmp_path / "r")["id"]
    environments = {row.environment: {"worker": "scripted"}}
    assert read_manifest(tmp_path / "r")["environments"] == environments
    assert not hasattr(row, "raw_samples")


@pytest.mark.parametrize(
    ("act", "status", "reason", "started"),
    [
        (lost("lean"), "crashed", "the worker was ended by SIGSEGV, see worker.log", 2),
        (lost("lean", RANK_LOST), "crashed", f"{RANK_LOST}, see worker.log", 2),
        (late("lean"), "timeout", "no result within 7 s, raise the limit with --timeout", 2),
        (failed("lean", "crashed", usable=False), "crashed", "it failed", 2),
        (failed("lean", "crashed", usable=True), "crashed", "it failed", 1),
        (failed("lean", "out_of_memory", usable=True), "out_of_memory", "it failed", 1),
        (failed("lean", "suspect", usable=True), "suspect", "it failed", 1),
    ],
)
def test_who_fails_in_the_middle_gets_one_row_and_the_others_are_asked_again(
    tmp_path, monkeypatch, act, status, reason, started
):
    workers = Workers(act)
    assert go(tmp_path / "r", monkeypatch, workers, CELLS[:6], limits=Limits(7.0)) == 0
    assert workers.started == started
    assert [kernels for kernels, _ in workers.asked] == [KERNELS, ("fa2", "fixed_split"), KERNELS]
    others = [well(cell) for cell in CELLS[:6] if cell != CELLS[1]]
    assert [row for row in found(tmp_path / "r") if row[2] == "ok"] == others
    bad = [row for row in read_rows(tmp_path / "r") if row.status != "ok"]
    assert [(row.cell, row.status, row.reason, row.latency_us) for row in bad] == [
        (CELLS[1].key, status, reason, None)
    ]
    assert CELLS[1].key not in read_samples(tmp_path / "r")
    assert len(read_samples(tmp_path / "r")) == 5


def test_new_workers_are_started_where_they_are_needed(tmp_path, monkeypatch):
    workers = Workers(measured, lambda cells: ({}, False))
    assert go(tmp_path / "r", monkeypatch, workers, CELLS) == 0
    assert workers.started == 2
    assert [kernels for kernels, _ in workers.asked] == [KERNELS] * 4
    assert found(tmp_path / "r") == [well(cell) for cell in CELLS]
    workers = Workers(measured, lost("lean"))
    go(tmp_path / "last", monkeypatch, workers, [CELLS[0], CELLS[4]])
    assert found(tmp_path / "last") == [well(CELLS[0]), ("lean", 2048, "crashed", None)]
    # No worker is started for nothing.
    assert workers.started == 1


@pytest.mark.parametrize(
    ("act", "status", "reason"),
    [
        (lost(None), "crashed", "the worker was ended by SIGSEGV, see worker.log"),
        (late(None), "timeout", "no result within 120 s, raise the limit with --timeout"),
    ],
)
def test_where_nobody_is_to_blame_every_kernel_gets_its_row(
    tmp_path, monkeypatch, act, status, reason
):
    workers = Workers(act)
    assert go(tmp_path / "r", monkeypatch, workers, CELLS[:6]) == 0
    assert workers.started == 2
    assert found(tmp_path / "r") == [
        *[(kernel, 1024, status, None) for kernel in KERNELS],
        *[well(cell) for cell in CELLS[3:6]],
    ]
    assert {row.reason for row in read_rows(tmp_path / "r")[:3]} == {reason}


@given(st.data())
@settings(max_examples=examples(40))
def test_whatever_happens_every_cell_has_one_row(data):
    fates: dict[str, str] = {}

    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        for cell in cells:
            if cell.key not in fates:
                fates[cell.key] = data.draw(
                    st.sampled_from(["ok", "ok", "lost", "late", "failed", "everybody"])
                )
            fate = fates[cell.key]
            if fate == "everybody":
                for case in cells:
                    fates[case.key] = "lost"
                raise WorkerLost("the worker ended with exit code 1", None)
            if fate == "lost":
                raise WorkerLost("the worker ended with exit code 1", cell.kernel)
            if fate == "late":
                raise WorkerTimeout(blamed=cell.kernel)
            if fate == "failed":
                return failed(cell.kernel, "suspect", usable=data.draw(st.booleans()))(cells)
        return measured(cells)

    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory() as folder:
        run = Path(folder) / "r"
        assert go(run, monkeypatch, Workers(*[act] * 99), CELLS) == 0
        expected = {"ok": "ok", "lost": "crashed", "late": "timeout", "failed": "suspect"}
        rows = {row.cell: row for row in read_rows(run)}
        contexts = [row.problem["context"] for row in read_rows(run)]
        assert len(contexts) == len(rows) == len(CELLS)
        for cell in CELLS:
            assert rows[cell.key].status == expected[fates[cell.key]]
            expected_us = latency_us(cell) if fates[cell.key] == "ok" else None
            assert rows[cell.key].latency_us == expected_us
        # Problems come in order, whatever order their kernels fail in.
        assert contexts == sorted(contexts)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock of the budget, which only tests move."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_spent_budget_ends_between_problems(tmp_path, monkeypatch, clock):
    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        clock.now_s += 3.0
        return measured(cells)

    # A problem starts after 3 s, none after 6.
    limits = Limits(budget_s=5.0)
    assert go(tmp_path / "r", monkeypatch, Workers(act, act, act), CELLS, limits=limits) == 3
    assert found(tmp_path / "r") == [well(cell) for cell in CELLS[:6]]
    # What a problem took is shared by its kernels.
    assert [row.wall_s for row in read_rows(tmp_path / "r")] == [1.0] * 6


@pytest.mark.parametrize("usable", [True, False])
def test_a_spent_budget_ends_a_problem_of_which_a_kernel_failed(
    tmp_path, monkeypatch, clock, usable
):
    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        clock.now_s += 3.0
        return failed("lean", "crashed", usable=usable)(cells)

    within, past = Workers(act), Workers(act)
    assert go(tmp_path / "within", monkeypatch, within, limits=Limits(budget_s=4.0)) == 0
    assert [kernels for kernels, _ in within.asked] == [KERNELS, ("fa2", "fixed_split")]
    clock.now_s = 0.0
    assert go(tmp_path / "past", monkeypatch, past, CELLS, limits=Limits(budget_s=2.0)) == 8
    assert [kernels for kernels, _ in past.asked] == [KERNELS]
    assert found(tmp_path / "past") == [("lean", 1024, "crashed", None)]
    resumed = Workers()
    assert go(tmp_path / "past", monkeypatch, resumed, CELLS[:3]) == 0
    assert [kernels for kernels, _ in resumed.asked] == [("fa2", "fixed_split")]
    cells = (CELLS[0], CELLS[2])
    assert found(tmp_path / "past")[1:] == [well(cell) for cell in cells]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"latency_us": "fast"}, "latency_us: Input should be a valid number"),
        ({"latency_us": 1e300}, "latency_us: 1e+300 is not between 1e-09 and 1e+18"),
        ({"latency_us": math.inf}, "a row that is ok needs a latency_us"),
        ({"status": "\udcff"}, "status: Input should be a valid string"),
        ({"schedule": "bytes \udcff"}, "it is not UTF-8 text"),
        ({"config": {"tile_tokens": 10**30}}, "10000000000000000000 is no number of 64 bits"),
        ({"config": {"a": "\udcff"}}, "it is not UTF-8 text"),
        ({"\udcff": 1}, "Input should be a valid string, unable to parse raw data as a unicode"),
        ({"raw_samples": {**RAW, "samples_us": [math.nan]}}, "samples_us.0: Input should be a fin"),
        ({"raw_samples": {**RAW, "crosscheck_us": [math.inf]}}, "crosscheck_us.0: Input should be"),
        ({"raw_samples": {"samples_us": [1.0]}}, "rounds: Field required"),
        ({"raw_samples": [1.0]}, "'list' object is not a mapping"),
    ],
)
def test_what_no_file_can_hold_costs_that_kernels_row_alone(tmp_path, monkeypatch, fields, fault):
    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        rows, usable = measured(cells)
        rows["lean"].update(fields)
        rows["fixed_split"]["relative_error"] = math.nan
        return rows, usable

    assert go(tmp_path / "r", monkeypatch, Workers(act)) == 0
    fa2, lean, fixed_split = read_rows(tmp_path / "r")
    assert [fa2.status, lean.status, fixed_split.status] == ["ok", "crashed", "ok"]
    # Not a number is null.
    assert fixed_split.relative_error is None
    assert lean.reason is not None
    assert lean.reason.startswith(f"the kernel's result is malformed: {fault}")
    assert "\n" not in lean.reason
    assert set(read_samples(tmp_path / "r")) == {fa2.cell, fixed_split.cell}


def taking(latency_us: float, **fields: Any) -> Act:
    """Return rows of one latency, whose own interval is half a microsecond to each side."""

    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        own = {"latency_ci_low_us": latency_us - 0.5, "latency_ci_high_us": latency_us + 0.5}
        raw = {**RAW, "samples_us": [latency_us] * 2}
        row = {"status": "ok", "latency_us": latency_us, **own, "raw_samples": raw, **fields}
        return {cell.kernel: dict(row) for cell in cells}, True

    return act


def test_a_cell_is_measured_by_fresh_processes_and_the_median_one_is_its_row(tmp_path, monkeypatch):
    acts = [taking(11.0), taking(14.0, warnings=["late"]), taking(10.0)]
    workers = Workers(*acts)
    assert go(tmp_path / "run", monkeypatch, workers, repeat=3) == 0
    assert workers.started == 3
    # Another kernel goes first each time.
    assert [kernels[0] for kernels, _ in workers.asked] == ["fa2", "lean", "fixed_split"]
    for row in read_rows(tmp_path / "run"):
        assert (row.latency_us, row.processes) == (11.0, 3)
        assert (row.latency_ci_low_us, row.latency_ci_high_us) == (10.0, 14.0)
        assert row.process_spread == pytest.approx(2 / 11)
        assert row.warnings == ["late"]
    for samples in read_samples(tmp_path / "run").values():
        assert (samples.samples_us, samples.processes_us) == ([11.0, 11.0], [11.0, 14.0, 10.0])


def test_an_interval_over_processes_includes_that_of_the_median_process(tmp_path, monkeypatch):
    workers = Workers(taking(10.1), taking(10.0, status="noisy", reason="wide"))
    go(tmp_path / "run", monkeypatch, workers, CELLS[:1], repeat=2)
    [row] = read_rows(tmp_path / "run")
    assert (row.latency_us, row.status, row.reason) == (10.0, "noisy", "wide")
    assert (row.latency_ci_low_us, row.latency_ci_high_us) == (9.5, 10.5)


def test_a_failed_kernel_is_not_repeated_and_the_others_are(tmp_path, monkeypatch):
    wrong = {"status": "incorrect", "reason": "relative error"}
    some = lambda cells: ({**measured(cells)[0], "lean": dict(wrong)}, True)  # noqa: E731
    workers = Workers(some)
    assert go(tmp_path / "run", monkeypatch, workers, repeat=3) == 0
    asked = [set(kernels) for kernels, _ in workers.asked]
    assert asked == [set(KERNELS), {"fa2", "fixed_split"}, {"fa2", "fixed_split"}]
    rows = {row.kernel: row for row in read_rows(tmp_path / "run")}
    assert (rows["lean"].status, rows["lean"].processes) == ("incorrect", None)
    assert (rows["fa2"].status, rows["fa2"].processes) == ("ok", 3)


def slow(clock: SimpleNamespace, seconds: float) -> Act:
    """Return an act that takes this long."""

    def act(cells: Sequence[Cell]) -> tuple[Rows, bool]:
        clock.now_s += seconds
        return measured(cells)

    return act


def test_a_turn_ends_by_time_and_a_problem_has_its_rows_before_the_turn_ends(
    tmp_path, monkeypatch, clock, heeded_signals
):
    # A process takes problems for 30 s: two of 20 s, then the last one.
    acts = [slow(clock, 20.0)] * 6
    workers, observer = Workers(*acts), Watching()
    assert go(tmp_path / "r", monkeypatch, workers, CELLS, observer=observer, repeat=2) == 0
    assert workers.started == 4
    first_turn = [(1, 1024), (1, 2048), (2, 1024), (2, 2048)]
    assert observer.started == [*first_turn, (1, 4096), (2, 4096)]
    names = [event for event, _, _ in observer.events if event != "starts"]
    of_problem = ["measured"] * 3 + ["ok"] * 3
    assert names == [*["measured"] * 6, *of_problem, *of_problem, *["measured"] * 3, *of_problem]
    assert [row.cell for row in read_rows(tmp_path / "r")] == [cell.key for cell in CELLS]

    # A signal at the first row of the turn leaves whole cells, and the rest is measured later.
    stopping = Watching(signal.SIGINT)
    with pytest.raises(Stopped):
        go(tmp_path / "s", monkeypatch, Workers(*acts), CELLS, observer=stopping, repeat=2)
    assert [row.processes for row in read_rows(tmp_path / "s")] == [2]
    resumed = Workers()
    assert go(tmp_path / "s", monkeypatch, resumed, CELLS, repeat=2) == 0
    assert [kernels for kernels, _ in resumed.asked][:1] == [KERNELS[1:]]
    assert sorted(found(tmp_path / "s")) == sorted(well(cell) for cell in CELLS)


def test_problems_take_turns_and_a_spent_budget_leaves_no_half_of_a_cell(
    tmp_path, monkeypatch, clock
):
    workers = Workers()
    assert go(tmp_path / "run", monkeypatch, workers, CELLS, repeat=2) == 0
    # A process for all problems, then the next one.
    assert workers.started == 2
    assert len(read_rows(tmp_path / "run")) == 9
    # The first process takes as many problems as both have time for.
    workers = Workers(*[slow(clock, 10.0)] * 4)
    left = go(tmp_path / "b", monkeypatch, workers, CELLS, repeat=2, limits=Limits(budget_s=35.0))
    assert (left, clock.now_s) == (3, 40.0)
    assert [row.processes for row in read_rows(tmp_path / "b")] == [2] * 6
