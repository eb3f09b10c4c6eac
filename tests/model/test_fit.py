"""Fitting, splitting and refusing, on runs that the model itself made."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.model.calibrate import calibrate, check_runs, read_runs
from leanbench.model.calibration import Errors, calibration_for
from leanbench.model.check import check, predictor
from leanbench.model.constants import Constants, LeanCudaConstants, names
from leanbench.model.fit import LEAN_CUDA, MOST_ROWS, fit, fit_lean_cuda, sample, split
from leanbench.model.measured import MeasuredCell, MeasuredRun, errors_of, orders, read_measured
from leanbench.model.rates import floor_us
from leanbench.model.simulate import latency_us
from leanbench.records.row import SCHEMA_VERSION

H200 = find("h200")
#: What "the GPU" of these tests is made of.
TRUE = Constants(bandwidth_share=0.9, tile_us=0.8, merge_launch_us=2.0)
PROBLEMS = [
    AttentionProblem(1, heads, heads, context, head_dim)
    for heads in (8, 56)
    for context in (1024, 8192, 32_768)
    for head_dim in (64, 128)
]


def cell(name: str, problem: AttentionProblem, constants: Constants = TRUE) -> MeasuredCell:
    config: Any = kernel(name).default_config(problem, H200)
    schedule: Any = kernel(name).schedule(problem, config, H200)
    us = latency_us(schedule, problem, config, H200, constants=constants)
    read_us = floor_us(problem.kv_bytes, H200, constants)
    return MeasuredCell(name, problem, config, us, read_us, None, None, None)


def measured(problems: Sequence[AttentionProblem] = PROBLEMS, name: str = "made") -> MeasuredRun:
    cells = [
        cell(name, problem)
        for problem in problems
        for name in ("lean_triton", "fa2_triton", "fixed_split_triton")
    ]
    return MeasuredRun(name, H200, tuple(cells), {"gpu": "GPU-1"})


@pytest.mark.deep
def test_a_fit_finds_what_made_the_rows():
    run = measured([problem for problem in PROBLEMS if problem.max_context < 32_768])
    before = check(run, run.cells, Constants(), "checked", workers=1)[0][0].all
    fitted = fit(run.cells, H200, Constants(), workers=1)
    after = check(run, run.cells, fitted, "checked", workers=1)[0][0].all
    assert before.median > 0.05
    assert after.median < 0.01
    assert after.worst < 0.04
    assert fitted.bandwidth_share == pytest.approx(0.9, rel=0.01)
    assert fitted.tile_us == pytest.approx(0.8, rel=0.1)
    # What no run tells apart stays.
    for name in names(Constants, "held"):
        assert getattr(fitted, name) == getattr(TRUE, name)


@pytest.mark.deep
def test_lean_cuda_has_constants_of_its_own():
    true = replace(TRUE, lean_cuda=LeanCudaConstants(chunk_us=0.75, merge_level_us=1.8))
    start = replace(TRUE, lean_cuda=(begin := LeanCudaConstants()))
    cells = [replace(cell("lean_cuda", problem, true), read_floor_us=None) for problem in PROBLEMS]
    run = MeasuredRun("made", H200, tuple(cells), {})
    fitted = fit_lean_cuda(run.cells, H200, start, workers=1)
    assert fitted.lean_cuda is not None
    assert replace(fitted, lean_cuda=None) == TRUE
    before = check(run, run.cells, start, "checked", workers=1)[0][0].all
    after = check(run, run.cells, fitted, "checked", workers=1)[0][0].all
    assert before.worst > 0.05
    assert after.worst < 0.03
    assert fitted.lean_cuda.merge_level_us > 1.3 * begin.merge_level_us
    with pytest.raises(UserError, match="0 rows are too few to fit the model to"):
        fit_lean_cuda(measured().cells, H200, start)


def test_too_few_rows_are_refused():
    with pytest.raises(UserError, match="3 rows are too few to fit the model to, it needs 12"):
        fit(measured(PROBLEMS[:1]).cells, H200, Constants())


def test_halves_share_no_shape():
    """Batch and heads that make the same output tiles are one shape."""
    same = [AttentionProblem(batch, 64 // batch, 64 // batch, 2048, 64) for batch in (1, 2, 4)]
    others = [AttentionProblem(1, 8, 8, 256 * context, 64) for context in range(1, 25)]
    fitted, checked = split(measured([*same, *others]))
    shapes = {cell.shape for cell in fitted}, {cell.shape for cell in checked}
    assert not shapes[0] & shapes[1]
    assert len(shapes[0] | shapes[1]) == 25
    assert min(len(shape) for shape in shapes) > 5
    # All kernels of a shape are on one side; of three batches that make one shape, one is fitted
    # to.
    assert len(fitted) == 3 * len(shapes[0])
    assert split(measured([*same, *others])) == (fitted, checked)


def test_a_sample_has_as_many_of_each_kernel_and_all_sizes():
    cells = [
        replace(own, problem=AttentionProblem(1, 8, 8, 64 * context, 64))
        for own in (cell("fa2_triton", PROBLEMS[0]), cell("lean_triton", PROBLEMS[0]))
        for context in range(1, 300)
    ]
    chosen = sample(cells, H200, most=20)
    assert [cell.kernel for cell in chosen].count("lean_triton") == 10
    contexts = [cell.problem.max_context for cell in chosen if cell.kernel == "fa2_triton"]
    assert contexts[0] < 64 * 30
    assert contexts[-1] > 64 * 260
    assert len(cells) < 2 * MOST_ROWS


def test_several_processes_predict_the_same():
    cells = measured([AttentionProblem(1, 8, 8, 128 * tiles, 64) for tiles in range(1, 16)]).cells
    assert len(cells) >= 40
    with predictor(cells, H200, workers=2) as several, predictor(cells, H200, workers=1) as alone:
        assert several(TRUE) == alone(TRUE) == [cell.latency_us for cell in cells]


def test_errors_and_orders_by_hand():
    errors = errors_of([-0.1, 0.02, 0.03, -0.04, 0.05])
    assert (errors.rows, errors.median, errors.worst) == (5, 0.04, 0.1)
    assert errors.p90 == pytest.approx(0.08)
    assert errors_of([-0.5]) == Errors(1, 0.5, 0.5, 0.5)
    own = cell("fa2_triton", PROBLEMS[0])
    latencies_us = {"a": 100, "b": 104, "c": 200}
    cells = [replace(own, kernel=name, latency_us=us) for name, us in latencies_us.items()]
    cells.append(replace(own, problem=PROBLEMS[1], latency_us=1))
    # a and b are too near to have an order; c is slower than both, predicted slower than one.
    assert orders(cells, [100, 300, 250, 1]) == (2, 1)


def written(
    tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda row: None, **manifest: Any
) -> str:
    """A run directory as `leanbench sweep` writes it."""
    folder = tmp_path / "run"
    folder.mkdir()
    content = {"schema_version": SCHEMA_VERSION, "name": "r", "source": "measured"}
    content |= {"gpu": asdict(H200), "environments": {}, **manifest}
    (folder / "manifest.json").write_text(json.dumps(content))
    lines = []
    stamp = {"source": "measured", "status": "ok", "wall_s": 1, "time": "t", "environment": "e"}
    for index, cell in enumerate(measured(PROBLEMS[:2]).cells):
        row = {
            "cell": str(index),
            "problem": cell.problem.to_dict(),
            "kernel": cell.kernel,
            "decomposition": kernel(cell.kernel).decomposition,
            "config": cell.config.to_dict(),
            "latency_us": cell.latency_us,
            "kv_bytes": cell.problem.kv_bytes,
            **stamp,
        }
        change(row)
        lines.append(json.dumps(row) + "\n")
    (folder / "results.jsonl").write_text("".join(lines))
    return str(folder)


def test_only_usable_rows_are_read(tmp_path):
    def change(row: dict[str, Any]) -> None:
        changes = {"0": {"status": "noisy"}, "1": {"cache": "warm"}, "2": {"kernel": "unknown"}}
        row.update(changes.get(row["cell"], {}))

    run = read_measured(written(tmp_path, change))
    assert [(cell.kernel, cell.problem) for cell in run.cells] == [
        (name, PROBLEMS[1]) for name in ("lean_triton", "fa2_triton", "fixed_split_triton")
    ]
    assert run.cells[0].latency_us == cell("lean_triton", PROBLEMS[1]).latency_us


@pytest.mark.parametrize(
    ("change", "manifest", "sentence"),
    [
        ({}, {"source": "predicted"}, "predicted by the model itself: name a run that was meas"),
        ({"source": "predicted"}, {}, "was predicted by the model itself"),
        ({"status": "noisy"}, {}, r"has no row to compare with: .*\(6 rows\)"),
        ({}, {"gpu": asdict(find("a100"))}, "was measured on a100-80gb, not on h200"),
        ({}, {"gpu": None}, "does not say which GPU"),
    ],
)
def test_unusable_runs_are_refused(tmp_path, change, manifest, sentence):
    run = written(tmp_path, lambda row: row.update(change), **manifest)
    with pytest.raises(UserError, match=sentence):
        read_runs([run], "h200")


def test_a_calibration_knows_what_it_was_fitted_to_and_how_wrong_it_is():
    contexts = [AttentionProblem(1, 8, 8, 256 * tiles, 64) for tiles in range(1, 16)]
    run, second = measured(contexts), measured(PROBLEMS[:2], "other")
    fitted = calibrate([run], [second], workers=1)
    assert fitted.calibration.gpu == "h200"
    rows = {(figures.run, figures.role): figures.all.rows for figures in fitted.calibration.runs}
    assert rows["made", "fitted"] + rows["made", "checked"] == 45
    assert rows["other", "checked"] == 6
    for before, after in zip(fitted.before, fitted.after, strict=True):
        assert (before.run, before.role, before.all.rows) == (after.run, after.role, after.all.rows)
        assert after.all.median < before.all.median
    # lean_cuda, of which no row is, keeps its constants and what is known of their errors.
    in_use = calibration_for(H200).calibration
    assert fitted.calibration.constants.lean_cuda == in_use.constants.lean_cuda
    kept = [run for run in in_use.runs if {*run.by_kernel} <= LEAN_CUDA]
    assert fitted.calibration.runs == (*kept, *fitted.after)
    assert kept
    with pytest.raises(UserError, match="made is among the runs to fit to and to check with"):
        calibrate([run], [run])


def test_the_worst_cells_come_first():
    run = measured(PROBLEMS[:4])
    wrong = replace(run.cells[3], latency_us=2 * run.cells[3].latency_us)
    run = replace(run, cells=(*run.cells[:3], wrong, *run.cells[4:]))
    [figures], cells = check_runs([run], TRUE, workers=1)
    assert cells[0].cell == wrong
    assert cells[0].error == pytest.approx(-0.5)
    assert figures.all.worst == pytest.approx(0.5)
    assert math.isclose(figures.all.median, 0, abs_tol=1e-9)
