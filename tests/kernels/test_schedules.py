"""The kernels' index arithmetic matches leanbench.core.decomposition: the LeanTiles of each CTA,
observed inside the kernels.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import replace

import pytest
from depth import diagonal, label
from leanbench.kernels.fixed_split.configs import FixedSplitTritonConfig
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, TileGrid, fixed_split, one_cta_per_tile, stream_k
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="looks inside kernels, which only the interpreter allows",
)

TILE_TOKENS = 16
LEAN = LeanTritonConfig(TILE_TOKENS, 4, 2, ctas_per_sm=1, min_tiles_per_cta=1, align_grid=False)
PROBLEMS = [
    AttentionProblem(1, 3, 3, 100, 64),
    AttentionProblem(2, 4, 2, 77, 64),
    AttentionProblem(1, 40, 1, 90, 64),
    AttentionProblem(1, 70, 1, 90, 64),
    AttentionProblem(3, 4, 2, (1, 130, 48), 64),
    AttentionProblem(5, 2, 1, (16, 1, 1, 75, 33), 64),
    AttentionProblem(1, 9, 1, 77, 64, q_len=9, page_size=16),
    AttentionProblem(3, 4, 2, (3, 130, 48), 64, q_len=5, page_size=64),
]


def walks(
    monkeypatch: pytest.MonkeyPatch, family: str, problem: AttentionProblem, **prepare_arguments
) -> list:
    """Return every call of the LeanTile loop, in order.

    A call is (CTA, sequence, KV head, first LeanTile, end).
    """
    import triton.language as tl

    module = importlib.import_module(f"leanbench.kernels.{family}.triton")
    fa2 = importlib.import_module("leanbench.kernels.fa2.triton")
    loop = module.lean_tiles
    inputs = make_inputs(problem, "cpu")
    seen = []

    def number(value) -> int:
        return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)

    parameters = inspect.signature(loop.fn)

    def spy(*arguments):
        named = parameters.bind(*arguments).arguments
        where = [number(named[name]) for name in ("sequence", "kv_head", "first", "last")]
        seen.append((number(tl.program_id(0)), *where))
        return loop(*arguments)

    monkeypatch.setattr(module, "lean_tiles", spy)
    monkeypatch.setattr(fa2, "lean_tiles", spy)
    module.prepare(inputs, **prepare_arguments)()
    return seen


def expected(schedule: Schedule, problem: AttentionProblem) -> list:
    tiles = TileGrid.of(problem, TILE_TOKENS)
    row_tiles = tiles.per_sequence // problem.kv_heads
    walked = []
    for s in schedule.segments:
        sequence, place = divmod(s.output_tile, tiles.per_sequence)
        walked.append((s.cta, sequence, place // row_tiles, s.first, s.last))
    return walked


def assert_walks(monkeypatch, family, problem, schedule, **arguments) -> None:
    assert walks(monkeypatch, family, problem, **arguments) == expected(schedule, problem)


@pytest.mark.parametrize(
    ("problem", "sms", "min_tiles"), diagonal(PROBLEMS, [1, 2, 5, 9, 40], [1, 3], keep=6), ids=label
)
def test_lean(monkeypatch, problem, sms, min_tiles):
    schedule = stream_k(TileGrid.of(problem, TILE_TOKENS), sms, min_tiles)
    config = replace(LEAN, min_tiles_per_cta=min_tiles)
    assert_walks(monkeypatch, "lean", problem, schedule, config=config, sms=sms)


@pytest.mark.parametrize("sms", [5, 9, 40])
def test_lean_aligned(monkeypatch, sms):
    schedule = stream_k(TileGrid.of(PROBLEMS[1], TILE_TOKENS), sms, aligned=True)
    config = replace(LEAN, align_grid=True)
    assert_walks(monkeypatch, "lean", PROBLEMS[1], schedule, config=config, sms=sms)


@pytest.mark.deep
def test_lean_over_more_sequences_than_one_step_adds_up(monkeypatch):
    contexts = tuple(1 + 7 * b % 40 for b in range(150))
    problem = AttentionProblem(150, 1, 1, contexts, 64)
    schedule = stream_k(TileGrid.of(problem, TILE_TOKENS), 11)
    assert_walks(monkeypatch, "lean", problem, schedule, config=LEAN, sms=11)


@pytest.mark.parametrize("problem", PROBLEMS, ids=label)
def test_fa2(monkeypatch, problem):
    schedule = one_cta_per_tile(TileGrid.of(problem, TILE_TOKENS))
    assert_walks(monkeypatch, "fa2", problem, schedule, config=TileConfig(TILE_TOKENS, 4, 2))


@pytest.mark.parametrize(("problem", "splits"), diagonal(PROBLEMS, [1, 2, 3, 8], keep=3), ids=label)
def test_fixed_split(monkeypatch, problem, splits):
    schedule = fixed_split(TileGrid.of(problem, TILE_TOKENS), splits)
    config = FixedSplitTritonConfig(TILE_TOKENS, 4, 2, splits=splits)
    assert_walks(monkeypatch, "fixed_split", problem, schedule, config=config)
