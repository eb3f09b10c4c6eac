"""Problems that a sweep draws: the same for a seed, from the stated values, and small enough."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from leanbench.core.errors import InvalidValue, OptionWithoutEffect, Reason, UserError
from leanbench.core.llm.model import models
from leanbench.core.memory import needed_bytes
from leanbench.core.problem import AttentionProblem
from leanbench.run.cells import expand
from leanbench.run.draw import MOST_BYTES, Draw
from leanbench.run.sweep_file import load_sweep, requested_sweep

SERVING = load_sweep("serving")


def drawn(**given: tuple[object, ...]) -> Draw:
    return Draw.of(20, 1, given)


def serving(seed: int, count: int = 320) -> list[AttentionProblem]:
    assert SERVING.draw is not None
    return list(replace(SERVING.draw, seed=seed, count=count).problems())


def test_a_seed_draws_the_same_problems_in_every_process_and_version():
    assert [problem.label for problem in serving(1, 3)] == [
        "b4 h32 nragged1603x3338 d128 p64 c8192 bf16 NHD",
        "b3 h20/4 n4099+16x2 d128 p64 c16384 bf16 HND sinks",
        "b48 h8 nragged3123x65276 d256 c8192 fp16 HND",
    ]
    assert serving(1, 40) == serving(1)[:40]
    assert not {*serving(1, 40)} & {*serving(2, 40)}


def test_serving_draws_what_it_states():
    problems = serving(1)
    assert len({*problems}) == 320
    assert all(problem.lengths_on == "device" for problem in problems)
    shapes = {
        model.shape(tp)
        for model in models().values()
        for tp in (1, 2, 4, 8)
        if model.main_layer.divides(tp)
    }
    for problem in problems:
        assert needed_bytes(problem) <= MOST_BYTES
        assert problem.max_context <= problem.cache_capacity
        assert 4096 <= problem.cache_capacity <= 256 * 1024
        assert (problem.q_heads, problem.kv_heads, problem.head_dim) in shapes
    for axis in ("kv_layout", "page_size", "dtype", "kv_dtype"):
        assert min(Counter(getattr(problem, axis) for problem in problems).values()) > 60
    # Values that stand several times are drawn as often.
    weighed = ("kv_dtype", "same", 3 / 4), ("q_len", 1, 5 / 6), ("sinks", False, 6 / 7)
    for axis, usual, share in weighed:
        drawn_share = sum(getattr(problem, axis) == usual for problem in problems) / 320
        assert abs(drawn_share - share) < 0.06
    assert {problem.head_dim for problem in problems} == {64, 80, 96, 128, 256}
    fills = sorted(problem.max_context / problem.cache_capacity for problem in problems)
    assert fills[0] < 0.01
    assert fills[-1] > 0.9
    # Log-uniform from 1% to 100%, but for lengths that a trace keeps short.
    assert 0.03 < fills[160] < 0.12


def test_values_of_an_axis_and_shares_of_the_capacity_are_drawn():
    draw = drawn(context=(100, 200), heads=((8, 8), (8, 2)), lengths=("uniform", "30+5"))
    problems = list(draw.problems())
    drawn_pairs = {(problem.batch, problem.context) for problem in problems}
    assert drawn_pairs == {(1, 100), (1, 200), (2, (30, 5))}
    assert {problem.kv_heads for problem in problems} == {8, 2}
    assert {problem.head_dim for problem in problems} == {128}
    draw = Draw.of(50, 1, {"capacity": (1000,), "batch": (2,)}, (0.5, 0.5))
    assert {problem.context for problem in draw.problems()} == {500}
    assert {problem.capacity for problem in draw.problems()} == {1000}


def test_what_cannot_be_is_drawn_again():
    draw = drawn(model=("qwen2.5-7b",), tp=(1, 8), context=(64,), capacity=(None, 32))
    # 28 query heads are not shared out to 8 GPUs, and 64 tokens have no room in 32.
    assert {(problem.q_heads, problem.capacity) for problem in draw.problems()} == {(28, None)}
    with pytest.raises(UserError, match="tp 8 conflicts with query/KV heads 28/4"):
        list(drawn(model=("qwen2.5-7b",), tp=(8,)).problems())
    with pytest.raises(UserError, match="none of 1000 drawn problems fits 120 GB: draw smaller"):
        list(drawn(context=(2**20,), batch=(256,)).problems())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"context": (64,), "capacity": (128,)}, "fill draws the context from the capacity"),
        ({}, "fill is a share of the capacity in tokens, and a capacity is exact: give capacity"),
        ({"capacity": (4096, "4x")}, "fill is a share of .*, and a capacity is 4x: give capacity"),
    ],
)
def test_a_fill_needs_capacities_and_no_contexts(given, sentence):
    with pytest.raises(UserError, match=sentence):
        Draw.of(1, 1, given, (0.1, 1.0))
    for capacity in ("exact", "4x", "exact,4k"):
        with pytest.raises(UserError, match=r"in tokens, and a capacity is (exact|4x): give cap"):
            requested_sweep("serving", {"capacity": capacity}, "lean", None, None, (), 3)


CAPPED = 'name = "x"\nkernels = ["lean", "fa2"]\n[draw]\ncount = 5\nbatch = 1\nheads = "32/8"\n'


@pytest.mark.parametrize(
    ("file", "axes", "contexts"),
    [
        ('capacity = "4k"', {}, {1024, 4096}),
        ('capacity = "4k"', {"context": "2k"}, {2048}),
        ('capacity = "4k"', {"capacity": "16k"}, {1024, 4096, 16384}),
        ('capacity = "4k"', {"capacity": "exact"}, {1024, 4096, 16384}),
        ('capacity = "4k"\ncontext = "16k"', {"capacity": "16k"}, {16384}),
        ('capacity = "4k"\ncontext = "16k"', {"context": "1k"}, {1024}),
    ],
)
def test_contexts_that_nobody_gave_are_those_a_capacity_holds(tmp_path, file, axes, contexts):
    path = tmp_path / "x.toml"
    path.write_text(CAPPED + file)
    sweep = requested_sweep(str(path), axes, None, None, None, (), 40)
    assert {cell.problem.context for cell in expand(sweep)} == contexts


def test_contexts_and_lengths_above_every_capacity_are_refused(tmp_path):
    for axes, words in (
        ({"context": "1m"}, "context 1048576 is .* drawn, 262144 tokens: "),
        ({"context": "1k,4k", "capacity": "1k"}, "context 4096 is .* drawn, 1024 tokens: "),
    ):
        with pytest.raises(UserError, match=words):
            requested_sweep("serving", axes, "lean", None, None, (), 40)
    path = tmp_path / "x.toml"
    path.write_text(CAPPED + 'capacity = "4k"\ncontext = "16k"')
    with pytest.raises(UserError, match="context 16384 is above the largest capacity that is"):
        requested_sweep(str(path), {}, None, None)
    path.write_text(CAPPED + 'capacity = "4k"')
    assert len(expand(requested_sweep(str(path), {}, None, None))) == 4
    fitting = drawn(lengths=("50+5",), capacity=(64,)).problems()
    assert {problem.context for problem in fitting} == {(50, 5)}
    with pytest.raises(UserError, match="context 65 is above the largest capacity that is"):
        drawn(lengths=("65+5", "50+5"), capacity=(32, 64)).check_capacities()


def test_heads_of_flags_take_the_place_of_models():
    axes = {"heads": "32/8,8", "capacity": "4k"}
    sweep = requested_sweep("serving", axes, "lean", None, None, (), 20)
    problems = [cell.problem for cell in expand(sweep)]
    assert {(problem.q_heads, problem.kv_heads) for problem in problems} == {(32, 8), (8, 8)}
    assert {problem.head_dim for problem in problems} == {128}
    assert {problem.lengths_on for problem in problems} == {"device"}
    of_grids = expand(requested_sweep("models", {"heads": "32/8", "head_dim": "64"}, "lean", None))
    shapes = {(cell.problem.q_heads, cell.problem.head_dim) for cell in of_grids}
    assert shapes == {(32, 64)}
    with pytest.raises(OptionWithoutEffect) as error:
        requested_sweep("serving", {"head_dim": "64"}, "lean", None)
    assert (error.value.option, error.value.needs) == ("--head-dim 64", "--heads")
    with pytest.raises(UserError, match="tp splits the heads of models"):
        requested_sweep("serving", {"heads": "8", "tp": "2"}, "lean", None)


def test_flags_change_the_draw():
    sweep = requested_sweep("serving", {"batch": "2"}, "lean", None, None, (), 5, 7)
    assert sweep.draw is not None
    assert (sweep.draw.count, sweep.draw.seed) == (5, 7)
    cells = expand(sweep)
    assert len(cells) == 5
    assert {cell.problem.batch for cell in cells} == {2}
    of_context = requested_sweep("serving", {"context": "1k", "lengths": "uniform"}, "lean", None)
    assert {cell.problem.max_context for cell in expand(of_context)} == {1024}
    assert json.loads(json.dumps(sweep.to_dict())) == sweep.to_dict()
    assert sweep.to_dict()["draw"]["batch"] == [2]


def test_problems_of_a_grid_are_drawn():
    def drawn(count: int | None, seed: int | None = None) -> list[AttentionProblem]:
        sweep = requested_sweep("paper-500", {}, "lean,fa2", None, None, (), count, seed)
        cells = expand(sweep)
        assert [cell.kernel for cell in cells] == ["lean", "fa2"] * (len(cells) // 2)
        return [cell.problem for cell in cells[::2]]

    every, ten, hundred, others = drawn(None), drawn(10, 7), drawn(100, 7), drawn(100, 8)
    assert (len(every), len(ten), len(hundred)) == (550, 10, 100)
    assert set(ten) < set(hundred) < set(every)
    assert hundred == [problem for problem in every if problem in set(hundred)]
    assert hundred == drawn(100, 7) != others
    assert drawn(550, 3) == every
    # No part of the grid is left out: 100 of 550 in each half, give or take.
    assert 35 < sum(problem in set(every[:275]) for problem in hundred) < 65
    sweep = requested_sweep("paper-500", {}, "lean", None, None, (), 10, 7).to_dict()
    assert sweep["sample"] == {"count": 10, "seed": 7}
    with pytest.raises(InvalidValue) as error:
        drawn(551)
    assert (error.value.value, error.value.limit) == (551, 550)


@pytest.mark.parametrize(
    ("file", "count", "seed", "reason", "limit"),
    [
        ("smoke", 0, None, Reason.BELOW_MINIMUM, 1),
        ("serving", 10001, None, Reason.ABOVE_MAXIMUM, 10000),
        ("serving", 5, 2**63, Reason.ABOVE_MAXIMUM, 2**63 - 1),
        ("serving", None, -1, Reason.BELOW_MINIMUM, 0),
    ],
)
def test_counts_and_seeds_out_of_range(file, count, seed, reason, limit):
    with pytest.raises(InvalidValue) as error:
        requested_sweep(file, {}, None, None, None, (), count, seed)
    assert (error.value.reason, error.value.limit) == (reason, limit)
    with pytest.raises(OptionWithoutEffect) as useless:
        requested_sweep("smoke", {}, None, None, None, (), None, 5)
    assert (useless.value.option, useless.value.needs) == ("--seed 5", "--draw")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("seed = 1", "line 2: the key 'count' is missing, add for example count = 300"),
        ("count = 0", "line 3, key 'count': 0 is invalid: write a whole number from 1 to 10000"),
        ("count = true", "line 3, key 'count': true is invalid: write a whole number from 1 to"),
        ("count = 1\nseed = 9223372036854775808", "line 4, key 'seed': 9223372036854775808 is inv"),
        ("count = 1\nbatsh = 4", "line 4: there is no key 'batsh', did you mean 'batch'?"),
        ('count = 1\ncapacity = "4k"\nfill = "1%"', "line 5, key 'fill': '1%' is invalid: "),
        ('count = 1\nfill = ["9%", "1%"]', "line 4, key 'fill': ['9%', '1%'] starts above its end"),
        ('count = 1\nfill = ["0%", "1%"]', "line 4, key 'fill': fill '0%' is not above 0"),
    ],
)
def test_a_wrong_table_is_one_sentence(table: str, sentence: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\n[draw]\n{table}\n')
    with pytest.raises(UserError) as error:
        load_sweep(str(path))
    assert str(error.value).startswith(f"{path}, {sentence}")


def test_a_file_with_a_draw_may_have_grids_beside_it(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nkernels = "lean"\nhead_dim = 64\n[draw]\ncount = 2\ncontext = "1k,2k,3k"\n'
        "[[grid]]\nbatch = 2\ncontext = 77\n"
    )
    problems = [cell.problem for cell in expand(load_sweep(str(path)))]
    assert (problems[0].batch, problems[0].context) == (2, 77)
    assert len(problems) == 3
    assert {problem.head_dim for problem in problems} == {64}


def test_a_draw_has_as_many_different_problems_as_it_says():
    shipped = load_sweep("chosen").draw
    assert shipped is not None
    for seed in range(3):
        chosen = list(replace(shipped, seed=seed).problems())
        assert len(set(chosen)) == len(chosen) == 24
    few = Draw.of(50, 1, {"capacity": (1000,), "batch": (2, 4), "context": (500,)}, None)
    assert {problem.batch for problem in few.problems()} == {2, 4}
    assert len(list(few.problems())) == 2
