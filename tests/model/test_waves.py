"""The shortcuts of `latency_us` against the whole play."""

from __future__ import annotations

import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, TileGrid, fixed_split, one_cta_per_tile, stream_k
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.model.constants import Constants
from leanbench.model.engine import work_of
from leanbench.model.simulate import latency_us, simulate
from leanbench.model.waves import are_alike

H200 = find("h200")
CONFIG = TileConfig(tile_tokens=128, num_warps=4, num_stages=3)
COSTS = Constants()
#: All SMs are equally lucky: those with equal work end at once.
EVEN = Constants(sm_spread=0.0)
#: Equal CTAs are played in the same order together as one by one; what is left is rounding.
ROUNDING = 1e-9


def both(
    schedule: Schedule,
    problem: AttentionProblem,
    spec: GpuSpec = H200,
    resident: int | None = None,
    constants: Constants = COSTS,
) -> tuple[float, float]:
    whole = simulate(
        schedule, problem, CONFIG, spec, resident=resident, constants=constants
    ).latency_us
    return latency_us(
        schedule, problem, CONFIG, spec, resident=resident, constants=constants
    ), whole


@given(
    st.integers(1, 1500),
    st.integers(1, 40),
    st.sampled_from([64, 128]),
    st.sampled_from([H200, find("a100"), find("b200")]),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([COSTS, EVEN]),
)
# The SMs that have read first are not the first to end.
@example(149, 1, 128, find("b200"), None, COSTS)
# All SMs end at once, and each takes one of the CTAs that are left, not some SMs two.
@example(396, 8, 64, H200, 2, EVEN)
@settings(max_examples=examples(25), deadline=None)
def test_equal_ctas_together(
    heads: int, tiles: int, head_dim: int, spec: GpuSpec, resident: int | None, constants: Constants
) -> None:
    problem = AttentionProblem(1, heads, heads, tiles * 128, head_dim)
    schedule = one_cta_per_tile(TileGrid.of(problem, 128))
    assert are_alike(work_of(schedule, problem, 128), merge_launch=False)
    quick, whole = both(schedule, problem, spec, resident, constants)
    assert quick == pytest.approx(whole, rel=ROUNDING)


@pytest.mark.parametrize(("heads", "splits"), [(7, 4), (56, 7), (132, 2), (100, 8)])
def test_equal_splits_together(heads: int, splits: int) -> None:
    problem = AttentionProblem(1, heads, heads, splits * 1024, 64)
    schedule = fixed_split(TileGrid.of(problem, 128), splits)
    assert are_alike(work_of(schedule, problem, 128), merge_launch=True)
    quick, whole = both(schedule, problem)
    assert quick == pytest.approx(whole, rel=ROUNDING)


def test_unequal_ones_are_played_one_by_one() -> None:
    short_last = AttentionProblem(1, 56, 56, 65_536, 64)
    schedule = fixed_split(TileGrid.of(short_last, 128), 7)
    assert not are_alike(work_of(schedule, short_last, 128), merge_launch=True)
    ragged = AttentionProblem(2, 8, 8, (1000, 2000), 64)
    assert not are_alike(
        work_of(one_cta_per_tile(TileGrid.of(ragged, 128)), ragged, 128), merge_launch=False
    )
    # A CTA of stream-K may wait for another's partial.
    split = stream_k(TileGrid.of(AttentionProblem(1, 1, 1, 1024, 64), 128), 8)
    assert not are_alike(
        work_of(split, AttentionProblem(1, 1, 1, 1024, 64), 128), merge_launch=False
    )


@pytest.mark.parametrize(
    ("heads", "context", "grid"), [(2048, 1024, 264), (2600, 5000, 396), (1024, 2048, 132)]
)
def test_many_whole_tiles_in_one(heads: int, context: int, grid: int) -> None:
    problem = AttentionProblem(1, heads, heads, context, 64)
    schedule = stream_k(TileGrid.of(problem, 128), grid)
    assert len(schedule.segments) > 6 * grid
    quick, whole = both(schedule, problem)
    assert quick != whole
    assert quick == pytest.approx(whole, rel=0.03)
