import json
from dataclasses import replace

import pytest
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem
from leanbench.measure.options import MeasureOptions
from leanbench.run.cells import Cell, Grid, Sweep, expand


def test_kernels_of_a_problem_stand_together_and_repeats_go():
    grid = Grid(context=(1024, 2048))
    cells = expand(Sweep("s", (grid, grid), ("lean", "fa2", "lean")))
    expected = [(context, kernel) for context in (1024, 2048) for kernel in ("lean", "fa2")]
    assert [(cell.problem.context, cell.kernel) for cell in cells] == expected


def test_all_axes_are_combined():
    grid = Grid(
        context=(1024,),
        heads=((8, 8), (32, 8)),
        batch=(1, 4),
        head_dim=(64, 128),
        dtype=("fp16", "bf16"),
        q_len=(1, 4),
        page_size=(None, 16),
    )
    cells = expand(Sweep("s", (grid,), ("lean",)))
    assert len({cell.key for cell in cells}) == len(cells) == 64
    last = AttentionProblem(4, 32, 8, 1024, 128, "bf16", q_len=4, page_size=16)
    assert cells[-1].problem == last
    assert cells[-1].key.startswith("lean-b4-h32-8-n1024-d128-q4-p16-bf16-HND-default-")


def test_keys_of_warm_caches_and_ragged_batches():
    problem = AttentionProblem(1, 32, 8, 4096, 128)
    cold, warm = Cell(problem, "lean", "best", "cold"), Cell(problem, "lean", "best", "warm")
    assert cold.key == "lean-b1-h32-8-n4096-d128-fp16-HND-best-f77681c3"
    assert cold.key == Cell(problem, "lean", "best").key
    assert warm.key == "lean-b1-h32-8-n4096-d128-fp16-HND-best-warm-474d0385"
    options = MeasureOptions(cache="warm")
    sweep = Sweep("s", (Grid(context=(4096,)),), ("lean",), "best", measure=options)
    assert expand(sweep) == [warm]
    first = Cell(AttentionProblem(4, 8, 8, (100, 30, 20, 10), 64), "lean")
    second = Cell(AttentionProblem(4, 8, 8, (100, 20, 30, 10), 64), "lean")
    assert first.problem.label == second.problem.label
    assert first.key != second.key


def test_a_single_sequence_has_the_context_whatever_the_mean():
    grid = Grid(context=(4096,), batch=(1, 8), lengths=("mean-0.5", "uniform"))
    cells = expand(Sweep("s", (grid,), ("lean",)))
    kinds = [(cell.problem.batch, cell.problem.is_ragged) for cell in cells]
    assert sorted(kinds) == [(1, False), (8, False), (8, True)]
    ragged = next(cell.problem for cell in cells if cell.problem.is_ragged)
    assert ragged.max_context == 4096
    assert ragged.total_context == pytest.approx(8 * 2048, abs=8)


def test_lengths_and_capacities_of_a_grid():
    grid = Grid(context=(4096,), batch=(2,), lengths=("uniform", "65536+16x3", "1024x8"))
    problems = [cell.problem for cell in expand(Sweep("s", (grid,), ("lean",)))]
    found = [(problem.batch, problem.context) for problem in problems]
    assert found == [(2, 4096), (4, (65536, 16, 16, 16)), (8, 1024)]
    grid = Grid(context=(1024, 4096), lengths=("uniform", "3000+5"), capacity=(None, "2x", 8192))
    problems = [cell.problem for cell in expand(Sweep("s", (grid,), ("lean",)))]
    twice = [(1024, 2048), (4096, 8192), (3000, 6000)]
    found = [(problem.max_context, problem.cache_capacity) for problem in problems]
    assert found == [(1024, 1024), (4096, 4096), (3000, 3000), *twice, (1024, 8192), (3000, 8192)]


def test_too_many_cells_are_refused_before_they_are_made():
    with pytest.raises(UserError, match="has 300000000 cells, the limit is 100000"):
        expand(Sweep("s", (Grid(context=tuple(range(1, 10001)), batch=tuple(range(1, 10001))),)))


OVERRIDE = LeanTritonConfig(128, 4, 3, 2, 1, False)


def test_given_settings_make_other_cells_whatever_the_others_are_asked():
    problem = AttentionProblem(1, 32, 8, 4096, 128)
    overridden = Cell(problem, "lean", "best", override=OVERRIDE)
    assert overridden.key == "lean-b1-h32-8-n4096-d128-fp16-HND-given-880627af"
    assert overridden.key == Cell(problem, "lean", override=OVERRIDE).key
    others = [OVERRIDE, replace(OVERRIDE, align_grid=True), replace(OVERRIDE, tile_tokens=64)]
    assert len({Cell(problem, "lean", override=override).key for override in others}) == 3
    assert overridden.request == "given"
    assert Cell(problem, "lean", "heuristic").request == "heuristic"
    grids = (Grid(context=(4096,), heads=((32, 8),), page_size=(None,)),)
    sweep = Sweep("s", grids, ("lean", "fa2"), "best", overrides={"lean": OVERRIDE})
    assert expand(sweep) == [overridden, Cell(problem, "fa2", "best")]
    written = sweep.to_dict()
    assert json.loads(json.dumps(written)) == written
    assert written["config"] == {"lean": OVERRIDE.to_dict()}
    grid = written["grids"][0]
    assert (grid["heads"], grid["page_size"]) == ([[32, 8]], [None])
    assert "config" not in Sweep("s").to_dict()
