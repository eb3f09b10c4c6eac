from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.decomposition import Schedule, TileGrid, fixed_split, one_cta_per_tile, stream_k
from leanbench.errors import UserError
from leanbench.gpu.catalogue import find
from leanbench.gpu.spec import GpuSpec
from leanbench.model import simulate as model
from leanbench.model.rates import cta_bytes_per_us, read_floor_us, resident_ctas, tile_bytes, tile_compute_us
from leanbench.model.simulate import Simulation, simulate
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig

H200 = find("h200")
A100 = find("a100")
CONFIG = KernelConfig(tile_tokens=128, num_warps=4, num_stages=3)


def heads(context: int | tuple[int, ...], q_heads: int = 56, batch: int = 1, head_dim: int = 64) -> AttentionProblem:
    return AttentionProblem(batch, q_heads, q_heads, context, head_dim)


def schedule_of(kind: str, problem: AttentionProblem, config: KernelConfig = CONFIG, spec: GpuSpec = H200) -> Schedule:
    tiles = TileGrid.of(problem, config.tile_tokens)
    if kind == "stream_k":
        return stream_k(tiles, spec.sms * resident_ctas(problem, config, spec))
    return one_cta_per_tile(tiles) if kind == "one_cta_per_tile" else fixed_split(tiles, 4)


def play(kind: str, problem: AttentionProblem, config: KernelConfig = CONFIG, spec: GpuSpec = H200) -> Simulation:
    return simulate(schedule_of(kind, problem, config, spec), problem, config, spec)


def splitting_us(kind: str, problem: AttentionProblem, spec: GpuSpec = H200) -> float:
    """The most that splitting costs any CTA: each further segment, each partial with its merge, and the LeanTile more
    than its even share, which it reads alone at the end."""
    schedule = schedule_of(kind, problem, spec=spec)
    segment_us = model.FILL_US + tile_compute_us(problem, CONFIG, spec) + model.WRITE_US
    merge_partial_us = model.merge_partial_us(problem.head_dim)
    parts = Counter(segment.output_tile for segment in schedule.segments)
    cost_us: dict[int, float] = defaultdict(float)
    for segment in schedule.segments:
        merge_us = model.ARRIVE_US + model.MERGE_US + parts[segment.output_tile] * merge_partial_us
        cost_us[segment.cta] += segment_us + (0 if segment.is_whole else merge_us)
    last_tile_us = tile_bytes(problem, CONFIG) / cta_bytes_per_us(problem, CONFIG, spec)
    return max(cost_us.values()) - segment_us + last_tile_us


contexts = st.integers(1, 20_000)
problems = st.builds(
    heads, contexts, q_heads=st.integers(1, 80), batch=st.integers(1, 4), head_dim=st.sampled_from([64, 128])
)
kinds = st.sampled_from(["one_cta_per_tile", "fixed_split", "stream_k"])
specs = st.sampled_from([H200, A100, find("l4"), find("b200")])


def test_one_cta_alone() -> None:
    """Launch, ramp, fill, its bytes at its own speed, the last tile's arithmetic, the output."""
    problem = heads(128 * 10, q_heads=1)
    result = play("one_cta_per_tile", problem)
    streaming_us = problem.kv_bytes / cta_bytes_per_us(problem, CONFIG, H200)
    expected = 0.6 + 1.6 + model.FILL_US + streaming_us + tile_compute_us(problem, CONFIG, H200) + model.WRITE_US
    assert result.latency_us == pytest.approx(expected)
    assert result.bandwidth_tb_s == pytest.approx(problem.kv_bytes / expected / 1e6)
    (span,) = result.ctas
    assert (span.cta, span.sm, span.start_us, span.end_us) == (0, 0, 0.6, pytest.approx(expected))


def test_ctas_share_the_bandwidth_equally() -> None:
    """264 equal CTAs ask for more than the DRAM has: all end together, a fill and a tile after the floor."""
    problem = heads(65_536, q_heads=264)
    result = play("one_cta_per_tile", problem)
    ends = {round(span.end_us, 6) for span in result.ctas}
    assert len(ends) == 1
    beside_us = model.FILL_US + tile_compute_us(problem, CONFIG, H200) + model.WRITE_US
    assert result.latency_us == pytest.approx(read_floor_us(problem.kv_bytes, H200) + beside_us)


def test_a_second_wave_waits_for_slots() -> None:
    config = KernelConfig(tile_tokens=128, num_warps=16, num_stages=3)
    problem = heads(4096, q_heads=H200.sms + 1)
    assert resident_ctas(problem, config, H200) == 1
    result = play("one_cta_per_tile", problem, config)
    assert result.slots == H200.sms
    *first, last = result.ctas
    assert {span.start_us for span in first} == {0.6}
    assert [span.sm for span in first] == list(range(H200.sms))
    assert last.start_us == min(span.end_us for span in first)
    assert last.sm == next(span.sm for span in first if span.end_us == last.start_us)


def test_ragged_batch_is_balanced_by_stream_k_only() -> None:
    ragged = AttentionProblem(4, 8, 8, (1000, 2000, 4000, 100_000), 64)
    floor_us = read_floor_us(ragged.kv_bytes, H200)
    assert play("stream_k", ragged).latency_us < 1.3 * floor_us
    assert play("one_cta_per_tile", ragged).latency_us > 8 * floor_us


def test_merge_costs_by_partials() -> None:
    """One output tile over 2 and over 60 CTAs, the same bytes for each CTA."""
    two, sixty = heads(256, q_heads=1), heads(7680, q_heads=1)
    difference = play("stream_k", sixty).latency_us - play("stream_k", two).latency_us
    # Sixty CTAs do not yet ask for more than the DRAM has.
    assert difference == pytest.approx(58 * model.merge_partial_us(64))


def test_a_merge_costs_by_the_numbers_that_one_cta_merges() -> None:
    """One CTA merges all four rows of a stream-K output tile; fixed_split's second launch has a CTA for each."""
    one, four = AttentionProblem(1, 1, 1, 2560, 128), AttentionProblem(1, 4, 1, 2560, 128)
    assert play("stream_k", one).latency_us < play("stream_k", four).latency_us
    difference = play("stream_k", four).latency_us - play("stream_k", one).latency_us
    assert difference == pytest.approx(20 * 3 * 128 * model.MERGE_NUMBER_US)
    assert play("fixed_split", four).latency_us == pytest.approx(play("fixed_split", one).latency_us, rel=0.01)


def test_second_launch_costs_and_is_not_there_for_one_split() -> None:
    problem = heads(4096)
    tiles = TileGrid.of(problem, 128)
    one = simulate(fixed_split(tiles, 1), problem, CONFIG, H200)
    assert one.latency_us == simulate(one_cta_per_tile(tiles), problem, CONFIG, H200).latency_us
    two = simulate(fixed_split(tiles, 2), problem, CONFIG, H200)
    assert two.latency_us > max(span.end_us for span in two.ctas) + model.MERGE_LAUNCH_US


def test_config_that_does_not_fit_says_so() -> None:
    with pytest.raises(UserError, match="do not fit the 99 KB of shared memory of a CTA on l4: lower num_stages"):
        play("stream_k", heads(1024), KernelConfig(256, 4, 4), find("l4"))


def test_ten_thousand_segments_in_well_under_a_second() -> None:
    problem = heads(131_072)
    schedule = fixed_split(TileGrid.of(problem, 128), 180)
    assert len(schedule.segments) > 9_000
    started = time.process_time()
    simulate(schedule, problem, CONFIG, H200)
    assert time.process_time() - started < 0.6


@given(kinds, problems, specs)
def test_bounds(kind: str, problem: AttentionProblem, spec: GpuSpec) -> None:
    config = KernelConfig(64, 4, 2)
    schedule = schedule_of(kind, problem, config, spec)
    result = simulate(schedule, problem, config, spec)
    assert result.latency_us > read_floor_us(problem.kv_bytes, spec)
    assert result.bandwidth_tb_s < spec.bandwidth_tb_s
    assert {span.cta for span in result.ctas} == {segment.cta for segment in schedule.segments}
    assert all(0.6 <= span.start_us < span.end_us <= result.latency_us for span in result.ctas)
    assert simulate(schedule, problem, config, spec) == result


@given(problems, st.integers(1, 4000))
def test_one_cta_per_tile_is_monotone_in_context(problem: AttentionProblem, more: int) -> None:
    longer = heads(problem.max_context + more, problem.q_heads, problem.batch, problem.head_dim)
    shorter_us = play("one_cta_per_tile", problem).latency_us
    assert play("one_cta_per_tile", longer).latency_us > shorter_us


@given(problems, st.integers(1, 4000))
def test_stream_k_is_monotone_in_context_but_for_the_merge(problem: AttentionProblem, more: int) -> None:
    """A longer context may fall into fewer partials, or into shares that need no second segment."""
    longer = heads(problem.max_context + more, problem.q_heads, problem.batch, problem.head_dim)
    saved_us = splitting_us("stream_k", problem) + 1e-6
    assert play("stream_k", longer).latency_us > play("stream_k", problem).latency_us - saved_us


@given(st.integers(1, 30), st.integers(1, 10), st.integers(1, 80), st.sampled_from([64, 128]))
def test_equal_splits_are_monotone_in_context(tiles: int, more: int, q_heads: int, head_dim: int) -> None:
    """Unequal ones need not be: with a short last split, the second wave starts earlier."""
    shorter, longer = (heads(4 * 128 * count, q_heads, head_dim=head_dim) for count in (tiles, tiles + more))
    assert play("fixed_split", longer).latency_us > play("fixed_split", shorter).latency_us


@given(problems, st.sampled_from([H200, A100]))
def test_stream_k_loses_to_one_cta_per_tile_by_the_merge_at_most(problem: AttentionProblem, spec: GpuSpec) -> None:
    unsplit_us = play("one_cta_per_tile", problem, spec=spec).latency_us
    allowed_us = splitting_us("stream_k", problem, spec)
    assert play("stream_k", problem, spec=spec).latency_us <= unsplit_us + allowed_us + 1e-6
