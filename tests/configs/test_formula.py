"""The formula that applies timings of tuned problems to others."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leanbench.kernels.lean.configs import LeanCudaConfig, LeanTritonConfig

from leanbench.configs.formula import Coefficients, Point, Shape, Work, divide, fit, grid_of
from leanbench.core.decomposition import TileGrid, stream_k
from leanbench.core.problem import AttentionProblem

SMS = 132
TRUE = Coefficients(4.5, 3.0, 4.6e6, 4.2e4, 6e4, 1.0, 0.7, 1.2, 0.08, 0.4, 0.3)


class Unlimited:
    """A kernel that launches every requested grid, and merges four partials at a time."""

    def grid_limit(self, rows, head_dim, wanted):
        return wanted

    def merge_rounds(self, rows, head_dim, num_warps, partials):
        return -(-partials // 4)

    def implementation_of(self, config):
        return self


class Limited(Unlimited):
    def grid_limit(self, rows, head_dim, wanted):
        return min(wanted, 100)


ANY = Unlimited()


configs = st.builds(
    LeanTritonConfig,
    tile_tokens=st.sampled_from([64, 128, 256]),
    num_warps=st.just(4),
    num_stages=st.just(3),
    ctas_per_sm=st.integers(1, 4),
    min_tiles_per_cta=st.sampled_from([1, 2, 4, 8]),
    align_grid=st.booleans(),
)


@given(
    batch=st.integers(1, 9),
    kv_heads=st.integers(1, 9),
    context=st.integers(1, 5000),
    config=configs,
)
def test_work_is_what_the_schedule_does(batch, kv_heads, context, config):
    problem = AttentionProblem(batch, kv_heads, kv_heads, context, 64)
    tiles = TileGrid.of(problem, config.tile_tokens)
    schedule = stream_k(
        tiles, config.ctas_per_sm * SMS, config.min_tiles_per_cta, config.align_grid
    )
    shape = Shape.of(problem)
    assert grid_of(shape, config, SMS, ANY) == schedule.grid
    work = divide(shape, config, SMS, ANY)
    assert work.kv_bytes == problem.kv_bytes
    assert work.ctas_per_sm == -(-schedule.grid // SMS)
    segments_of: dict[int, int] = {}
    parts_of: dict[int, int] = {}
    longest = 0
    lean_tiles: dict[int, int] = {}
    for segment in schedule.segments:
        segments_of[segment.cta] = segments_of.get(segment.cta, 0) + 1
        parts_of[segment.output_tile] = parts_of.get(segment.output_tile, 0) + 1
        lean_tiles[segment.cta] = lean_tiles.get(segment.cta, 0) + segment.last - segment.first
    longest = max(lean_tiles.values())
    # Boundaries and partials follow from the shares alone, for any start of ranges: never too few.
    # Partials are counted as if all ranges had the shorter length; a longer one has at most twice
    # that.
    assert 0 <= work.boundaries - (max(segments_of.values()) - 1) <= 1
    assert max(parts_of.values()) - 1 <= work.partials <= 2 * max(parts_of.values())
    assert work.longest_bytes == longest * config.tile_tokens * 64 * 4
    assert work.excess_bytes >= 0


def test_a_grid_is_aligned_where_it_is_asked_for():
    shape = Shape.of(AttentionProblem(3, 24, 24, 4000, 64))
    config = LeanTritonConfig(64, 4, 3, 1, 1, True)
    assert grid_of(shape, config, SMS, ANY) == 72
    assert grid_of(shape, replace(config, align_grid=False), SMS, ANY) == SMS


@pytest.mark.parametrize(("cluster_size", "clusters"), [(1, 132), (2, 66), (4, 30), (8, 15)])
def test_a_cluster_is_one_run(cluster_size, clusters):
    """On an H200, clusters larger than pairs fit on 120 of 132 SMs."""
    config = LeanCudaConfig(
        128, 4, 3, 1, 1, False, cluster_size=cluster_size, chunk_tokens=32, tile_rows=8, copy="bulk"
    )
    # 40 LeanTiles per cluster: only the last output tile ends with a range.
    shape = Shape(kv_heads=1, context=128 * 40 * clusters, head_dim=64, rows=1)
    assert grid_of(shape, config, SMS, ANY) == clusters * cluster_size
    work = divide(shape, config, SMS, ANY)
    # Its CTAs share its bytes, and its partial is one.
    assert work.longest_bytes == 40 * 128 * 64 * 4 / cluster_size
    assert (work.partials, work.boundaries, work.ctas_per_sm) == (clusters - 1, 0, 1)
    assert work.rounds == -(-(clusters - 1) // 4)
    assert work.excess_bytes == 0


def test_two_ctas_of_a_pair_on_each_sm():
    config = LeanCudaConfig(
        128, 4, 3, 2, 1, False, cluster_size=2, chunk_tokens=32, tile_rows=8, copy="bulk"
    )
    work = divide(Shape(kv_heads=1, context=128 * 4000, head_dim=64, rows=1), config, SMS, ANY)
    assert grid_of(Shape(1, 128 * 4000, 64, 1), config, SMS, ANY) == 264
    assert work.ctas_per_sm == 2
    # 132 pairs: 40 of them have 31 LeanTiles, the others 30; eight warps process a chunk of 32
    # each.
    assert work.longest_bytes == -(-31 * 128 // 256) * 256 * 64 * 4 / 2


def test_the_grid_limit_holds():
    shape = Shape.of(AttentionProblem(1, 8, 8, 65536, 64))
    assert grid_of(shape, LeanTritonConfig(64, 4, 3, 4, 1, False), SMS, Limited()) == 100


def test_large_problems_take_the_bandwidth_small_ones_the_start():
    config = LeanTritonConfig(128, 4, 3, 1, 1, True)
    large = divide(Shape.of(AttentionProblem(8, 32, 32, 65536, 64)), config, SMS, ANY)
    assert TRUE.latency_us(large) == pytest.approx(large.kv_bytes / TRUE.gpu_bytes_per_us, rel=0.1)
    small = divide(Shape.of(AttentionProblem(1, 8, 8, 64, 64)), config, SMS, ANY)
    assert TRUE.start_us < TRUE.latency_us(small) < TRUE.start_us + 2


@given(
    heads=st.integers(1, 200),
    context=st.integers(1, 100_000),
    config=configs,
    name=st.sampled_from(
        ["start_us", "ramp_us", "boundary_us", "split_us", "partial_us", "round_us", "excess"]
    ),
)
def test_costs_only_add(heads, context, config, name):
    work = divide(Shape(heads, context, 64, 1), config, SMS, ANY)
    dearer = replace(TRUE, **{name: 2 * getattr(TRUE, name)})
    assert dearer.latency_us(work) >= TRUE.latency_us(work)


def test_arrays_give_what_numbers_give():
    works = points_of(TRUE)
    columns = Work(
        *(
            np.array([getattr(point.work, field.name) for point in works], float)
            for field in fields(Work)
        )
    )
    together = TRUE.latency_us(columns, np.minimum, np.maximum)
    assert together == pytest.approx([TRUE.latency_us(point.work) for point in works])


def points_of(coefficients: Coefficients, noise: float = 0.0, seed: int = 0) -> list[Point]:
    random = np.random.default_rng(seed)
    points = []
    for heads in (4, 8, 24, 56, 64, 200, 512):
        for context in (300, 1024, 5000, 16384, 90_000):
            for ctas_per_sm, align in ((1, True), (2, False), (2, True)):
                config = LeanTritonConfig(128, 4, 3, ctas_per_sm, 1, align)
                work = divide(Shape(heads, context, 64, 1), config, SMS, ANY)
                points.append(
                    Point(
                        work,
                        coefficients.latency_us(work) * (1 + noise * random.standard_normal()),
                        1.0,
                    )
                )
    return points


def test_a_fit_predicts_what_it_was_not_shown():
    points = points_of(TRUE, noise=0.01)
    shown, tuned = points[::2], points[1::2]
    fitted = fit(shown, 4.8)
    errors = [
        abs(fitted.latency_us(point.work) / TRUE.latency_us(point.work) - 1) for point in tuned
    ]
    assert np.median(errors) < 0.01
    assert max(errors) < 0.05


def test_a_fit_of_few_points_leans_on_the_others():
    few = points_of(replace(TRUE, start_us=6.0))[:6]
    leaning = fit(few, 4.8, TRUE)
    assert leaning.latency_us(few[0].work) == pytest.approx(few[0].latency_us, rel=0.05)
    # Six timings of small problems do not determine the bandwidth.
    assert leaning.gpu_bytes_per_us == pytest.approx(TRUE.gpu_bytes_per_us, rel=0.05)


def test_one_outlier_does_not_bend_a_fit():
    points = points_of(TRUE)
    points[10] = replace(points[10], latency_us=3 * points[10].latency_us)
    fitted = fit(points, 4.8)
    errors = [
        abs(fitted.latency_us(point.work) / TRUE.latency_us(point.work) - 1) for point in points
    ]
    assert np.median(errors) < 0.01
    assert all(value > 0 for value in astuple(fitted))
