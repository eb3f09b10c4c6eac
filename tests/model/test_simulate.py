from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from call_counts import function_calls
from depth import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import (
    Schedule,
    Segment,
    TileGrid,
    fixed_split,
    one_cta_per_tile,
    stream_k,
)
from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.core.timeline import Span
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import calibration_for
from leanbench.model.constants import Constants
from leanbench.model.rates import Rates, floor_us, rates_for, resident_ctas
from leanbench.model.simulate import latency_us, simulate

H200 = find("h200")
A100 = find("a100")
LEAN = kernel("lean_triton")
CONFIG = TileConfig(tile_tokens=128, num_warps=4, num_stages=3)
#: All SMs are equally lucky, and memory is warm at once: what follows can be worked out by hand.
EVEN = Constants(sm_spread=0.0, warm_up_us=1e-6)


def heads(context, q_heads=56, batch=1, head_dim=64):
    return AttentionProblem(batch, q_heads, q_heads, context, head_dim)


def schedule_of(kind, problem, config=CONFIG, spec=H200):
    tiles = TileGrid.of(problem, config.tile_tokens)
    if kind == "stream_k":
        return stream_k(tiles, spec.sms * resident_ctas(problem, config, spec))
    return one_cta_per_tile(tiles) if kind == "one_cta_per_tile" else fixed_split(tiles, 4)


def play(kind, problem, config=CONFIG, spec=H200, constants: Constants | None = EVEN):
    schedule = schedule_of(kind, problem, config, spec)
    return simulate(schedule, problem, config, spec, constants=constants)


def rates_of(problem: AttentionProblem, spec: GpuSpec = H200) -> Rates:
    return rates_for(problem, CONFIG, spec, EVEN)


def alone_us(problem: AttentionProblem, read_bytes: float) -> float:
    """From the launch to the end of a CTA that has `read_bytes` to read and memory to itself."""
    rates = rates_of(problem)
    drain_us = rates.drain_us(rates.sm_bytes_per_us)
    return rates.first_byte_us + read_bytes / rates.demand(1) + drain_us


def splitting_us(kind: str, problem: AttentionProblem, spec: GpuSpec = H200) -> float:
    """Return the most that splitting costs a CTA: segments, merges, and a LeanTile more."""
    schedule, rates = schedule_of(kind, problem, spec=spec), rates_of(problem, spec)
    segment_us = EVEN.segment_us + rates.compute_us
    parts = Counter(segment.output_tile for segment in schedule.segments)
    cost_us: dict[int, float] = defaultdict(float)
    for segment in schedule.segments:
        merge_us = EVEN.merge_us + parts[segment.output_tile] * rates.merge.partial_us
        cost_us[segment.cta] += segment_us + (0 if segment.is_whole else merge_us)
    last_tile_us = rates.tile_bytes * rates.resident / rates.demand(rates.resident)
    return max(cost_us.values()) + last_tile_us


contexts = st.integers(1, 20_000)
problems = st.builds(
    heads,
    contexts,
    q_heads=st.integers(1, 80),
    batch=st.integers(1, 4),
    head_dim=st.sampled_from([64, 128]),
)
kinds = st.sampled_from(["one_cta_per_tile", "fixed_split", "stream_k"])
specs = st.sampled_from([H200, A100, find("l4"), find("b200")])


def test_one_cta_alone():
    """Launch, first byte, its bytes at its own speed, what is left to compute, the output."""
    problem = heads(128 * 10, q_heads=1)
    result = play("one_cta_per_tile", problem)
    expected = alone_us(problem, problem.kv_bytes)
    assert result.latency_us == pytest.approx(expected)
    assert result.bandwidth_tb_s == pytest.approx(problem.kv_bytes / expected / 1e6)
    (span,) = result.ctas
    assert (span.cta, span.sm, span.start_us, span.end_us) == (0, 0, 0.6, pytest.approx(expected))


def test_ctas_of_an_sm_share_its_port():
    """On a GPU of one SM whose port is slower than two CTAs together."""
    one_sm, narrow = replace(H200, sms=1), replace(EVEN, sm_bytes_per_clock=20)
    problem = heads(128 * 40, q_heads=2)
    assert 2 * rates_of(problem).cta_bytes_per_us > 20 * 1980
    result = play("one_cta_per_tile", problem, spec=one_sm, constants=narrow)
    # Nothing else waits, so what is left at the end is a LeanTile's loading at half the port's rate
    # or its arithmetic.
    drain_us = min(rates_of(problem).compute_us, 32_768 / (20 * 1980 / 2))
    expected = rates_of(problem).first_byte_us + problem.kv_bytes / (20 * 1980) + drain_us
    assert result.latency_us == pytest.approx(expected)
    # With room for one at a time they follow each other, the second without the launch.
    schedule = schedule_of("one_cta_per_tile", problem)
    after_another = simulate(schedule, problem, CONFIG, one_sm, resident=1, constants=EVEN)
    first_us = alone_us(problem, problem.kv_bytes / 2)
    second_us = first_us - rates_of(problem).first_byte_us + EVEN.segment_us
    assert after_another.latency_us == pytest.approx(first_us + second_us)


def test_ctas_share_the_bandwidth_equally():
    """264 equal CTAs ask for more than the DRAM has, so all end together."""
    problem = heads(65_536, q_heads=264)
    result = play("one_cta_per_tile", problem)
    ends = [span.end_us for span in result.ctas]
    # Where rounding lets one CTA of an SM end first, the other has the SM for itself.
    assert max(ends) - min(ends) < 0.1
    beside_us = EVEN.segment_us + rates_of(problem).compute_us
    assert result.latency_us == pytest.approx(
        floor_us(problem.kv_bytes, H200, EVEN) + beside_us, rel=1e-4
    )


def test_unequal_and_cold_sms_and_memory():
    problem = heads(65_536, q_heads=264)
    uneven = replace(EVEN, sm_spread=0.05)
    result = play("one_cta_per_tile", problem, constants=uneven)
    ends = [span.end_us for span in result.ctas]
    assert min(ends) == result.ctas[5].end_us
    assert max(ends) == result.ctas[0].end_us
    # The luckiest of six classes gets 5% more for all its time; the unluckiest catches up when
    # others have ended.
    even_us = play("one_cta_per_tile", problem).latency_us
    assert min(ends) == pytest.approx(even_us / 1.05, rel=0.01)
    assert even_us < max(ends) < even_us / 0.95
    problem = heads(65_536, q_heads=264)
    cold = replace(EVEN, warm_up_us=2.0)
    warm_us = play("one_cta_per_tile", problem).latency_us
    cold_us = play("one_cta_per_tile", problem, constants=cold).latency_us
    assert cold_us - warm_us == pytest.approx(2.0, rel=0.02)


def test_a_second_wave_waits_for_slots():
    problem = heads(4096, q_heads=H200.sms + 1)
    schedule = schedule_of("one_cta_per_tile", problem)
    result = simulate(schedule, problem, CONFIG, H200, resident=1, constants=EVEN)
    assert result.slots == H200.sms
    *first, last = result.ctas
    assert {span.start_us for span in first} == {0.6}
    assert [span.sm for span in first] == list(range(H200.sms))
    assert last.start_us == pytest.approx(min(span.end_us for span in first))
    assert last.sm == next(span.sm for span in first if span.end_us == pytest.approx(last.start_us))


def test_ragged_batch_is_balanced_by_stream_k_only():
    ragged = AttentionProblem(4, 8, 8, (1000, 2000, 4000, 100_000), 64)
    read_us = floor_us(ragged.kv_bytes, H200, EVEN)
    assert play("stream_k", ragged).latency_us < 1.3 * read_us
    assert play("one_cta_per_tile", ragged).latency_us > 8 * read_us


def test_a_merge_costs_by_partials_and_by_the_numbers_that_one_cta_merges():
    # Stream-K merges four rows in one CTA, fixed_split's second launch in four.
    single, four = AttentionProblem(1, 1, 1, 2560, 128), AttentionProblem(1, 4, 1, 2560, 128)
    difference = play("stream_k", four).latency_us - play("stream_k", single).latency_us
    # 20 partials of 3 rows more, each number read and emptied by 4 warps.
    assert difference == pytest.approx(20 * 3 * 128 * 2 * EVEN.merge_number_warp_us / 4)
    assert play("fixed_split", four).latency_us == pytest.approx(
        play("fixed_split", single).latency_us, rel=0.01
    )
    # One output tile over 2 and over 60 CTAs, the same bytes for each CTA.
    two, sixty = heads(256, q_heads=1), heads(7680, q_heads=1)
    difference = play("stream_k", sixty).latency_us - play("stream_k", two).latency_us
    # Sixty CTAs do not yet ask for more than the DRAM has.
    assert difference == pytest.approx(58 * rates_of(two).merge.partial_us)


def test_second_launch_costs_and_is_not_there_for_one_split():
    problem = heads(4096)
    tiles = TileGrid.of(problem, 128)
    single = simulate(fixed_split(tiles, 1), problem, CONFIG, H200, constants=EVEN)
    assert single.latency_us == play("one_cta_per_tile", problem).latency_us
    two = simulate(fixed_split(tiles, 2), problem, CONFIG, H200, constants=EVEN)
    assert two.latency_us > max(span.end_us for span in two.ctas) + EVEN.merge_launch_us


def test_configs_that_do_not_fit_and_constants_in_use():
    schedule, large = schedule_of("one_cta_per_tile", heads(1024)), TileConfig(256, 4, 4)
    with pytest.raises(UserError, match="fit the 99 KB of shared memory of a CTA on l4: lower num"):
        simulate(schedule, heads(1024), large, find("l4"))
    problem = heads(4096)
    used = play("stream_k", problem, constants=calibration_for(H200).constants)
    assert play("stream_k", problem, constants=None) == used


@pytest.mark.deep
def test_ten_thousand_segments_in_a_second():
    """Take 73 Python calls a segment, of 0.1 us with the lines between them."""
    problem = heads(131_072)
    schedule = fixed_split(TileGrid.of(problem, 128), 180)
    assert len(schedule.segments) > 9_000
    calls = function_calls(partial(simulate, schedule, problem, CONFIG, H200))
    assert calls < 110 * len(schedule.segments)


@given(kinds, problems, specs)
def test_bounds(kind, problem, spec):
    config = TileConfig(64, 4, 2)
    schedule = schedule_of(kind, problem, config, spec)
    result = simulate(schedule, problem, config, spec)
    assert result.latency_us > floor_us(problem.kv_bytes, spec, calibration_for(spec).constants)
    assert result.bandwidth_tb_s < spec.bandwidth_tb_s
    assert {span.cta for span in result.ctas} == {segment.cta for segment in schedule.segments}
    assert all(0.6 <= span.start_us < span.end_us <= result.latency_us for span in result.ctas)
    assert {span.sm for span in result.ctas} <= set(range(spec.sms))
    assert simulate(schedule, problem, config, spec) == result


@given(problems, st.integers(1, 4000))
def test_one_cta_per_tile_is_monotone_in_context(problem, more):
    longer = heads(problem.max_context + more, problem.q_heads, problem.batch, problem.head_dim)
    shorter_us = play("one_cta_per_tile", problem).latency_us
    assert play("one_cta_per_tile", longer).latency_us > shorter_us


@given(st.integers(1, 30), st.integers(1, 10), st.integers(1, 80), st.sampled_from([64, 128]))
def test_equal_splits_are_monotone_in_context(tiles, more, q_heads, head_dim):
    """Unequal ones need not be: with a short last split, the second wave starts earlier."""
    shorter = heads(4 * 128 * tiles, q_heads, head_dim=head_dim)
    longer = heads(4 * 128 * (tiles + more), q_heads, head_dim=head_dim)
    assert play("fixed_split", longer).latency_us > play("fixed_split", shorter).latency_us


@given(problems, st.sampled_from([H200, A100]))
def test_stream_k_loses_to_one_cta_per_tile_by_the_merge_at_most(problem, spec):
    unsplit_us = play("one_cta_per_tile", problem, spec=spec).latency_us
    allowed_us = splitting_us("stream_k", problem, spec)
    assert play("stream_k", problem, spec=spec).latency_us <= unsplit_us + allowed_us + 1e-6


@settings(max_examples=examples(15))
@given(
    batch=st.integers(16, 64),
    kv_heads=st.sampled_from([20, 32, 56]),
    context=st.integers(1024, 6000),
    head_dim=st.sampled_from([64, 128]),
    spec=st.sampled_from([H200, A100]),
)
def test_whole_output_tiles_may_be_played_as_one(batch, kv_heads, context, head_dim, spec):
    problem = heads(context, kv_heads, batch, head_dim)
    config: Any = LEAN.default_config(problem, spec)
    schedule: Any = LEAN.schedule(problem, config, spec)
    assume(len(schedule.segments) > 6 * len({segment.cta for segment in schedule.segments}))
    whole_us = simulate(schedule, problem, config, spec).latency_us
    assert latency_us(schedule, problem, config, spec) == pytest.approx(whole_us, rel=0.05)


@pytest.mark.parametrize(
    ("kv_heads", "context", "grid"), [(2048, 1024, 264), (2600, 5000, 396), (1024, 2048, 132)]
)
def test_many_whole_output_tiles_take_the_shortcut(kv_heads, context, grid):
    problem = heads(context, kv_heads)
    schedule = stream_k(TileGrid.of(problem, 128), grid)
    assert len(schedule.segments) > 6 * grid
    whole_us = simulate(schedule, problem, CONFIG, H200).latency_us
    quick_us = latency_us(schedule, problem, CONFIG, H200)
    assert quick_us != whole_us
    assert quick_us == pytest.approx(whole_us, rel=0.03)


@pytest.mark.parametrize("context", [16, 128, 1023])
def test_short_sequences_are_played_whole(context):
    problem = heads(context, 56, 64)
    config: Any = LEAN.default_config(problem, H200)
    schedule: Any = LEAN.schedule(problem, config, H200)
    whole_us = simulate(schedule, problem, config, H200).latency_us
    assert latency_us(schedule, problem, config, H200) == pytest.approx(whole_us, rel=1e-9)


def test_a_host_block_keeps_its_slot_while_it_waits() -> None:
    """With one slot per SM, the third CTA cannot start in the host block's."""
    problem = AttentionProblem(1, 2, 2, 1280, 64)
    segments = (Segment(0, 0, 1, 10, 10), Segment(1, 0, 0, 1, 10), Segment(2, 1, 0, 10, 10))
    spans: list[tuple[int, Span]] = []
    schedule = Schedule("stream_k", 3, segments)
    two = replace(H200, sms=2)
    result = simulate(schedule, problem, CONFIG, two, spans, resident=1, constants=EVEN)
    first, host, third = result.ctas
    assert [span.kind for cta, span in spans if cta == 1] == ["tiles", "wait", "reduction"]
    assert host.end_us > first.end_us
    # The other part's slot is free first.
    assert (third.sm, third.start_us) == (first.sm, pytest.approx(first.end_us))
