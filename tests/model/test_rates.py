import math
from dataclasses import replace

import pytest

from leanbench.core.config import TileConfig
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.model.constants import Constants
from leanbench.model.rates import (
    cta_bytes_per_us,
    floor_us,
    merge_partial_us,
    rates_for,
    resident_ctas,
    sm_bytes_per_us,
    tile_compute_us,
)

H200 = find("h200")
PROBLEM = AttentionProblem(batch=1, q_heads=32, kv_heads=8, context=4096, head_dim=128)
#: Round figures, so that what follows from them can be worked out by hand.
COSTS = Constants(
    launch_us=0.6,
    first_read_us=0.4,
    warm_up_us=1.0,
    bandwidth_share=0.98,
    dram_latency_us=0.65,
    tile_us=0.5,
    token_warp_us=0.004,
    warp_bytes_per_us=32_768,
    row_share=0.5,
    sm_bytes_per_clock=32,
    merge_partial_us=0.01,
    merge_number_warp_us=0.001,
)


@pytest.mark.parametrize("spec", CATALOGUE, ids=[spec.name for spec in CATALOGUE])
def test_bandwidth_stays_below_the_datasheet_and_is_within_reach_of_the_sms(spec):
    read = 10 * 10**9
    assert 0.85 < read / floor_us(read, spec, COSTS) / 1e6 / spec.bandwidth_tb_s < 1
    assert spec.sms * sm_bytes_per_us(spec, COSTS) > spec.bandwidth_tb_s * 1e6


def test_the_warm_up_of_the_read_floor_moves_as_many_bytes_in_steps():
    # Bytes of a bandwidth that rises as 1 - exp(-t / 1 us), by hand for t = 2 us.
    streamed_us = 2 - (1 - math.exp(-2))
    assert floor_us(round(streamed_us * 0.98 * 4.8e6), H200, COSTS) == pytest.approx(
        0.6 + 0.4 + 2, rel=1e-6
    )
    # Of a large read all that is left of the warm-up is its time constant.
    assert floor_us(10**9, H200, COSTS) == pytest.approx(1.0 + 1.0 + 10**9 / (0.98 * 4.8e6))
    rates = rates_for(PROBLEM, TileConfig(64, 4, 3), H200, COSTS)
    begin, moved = rates.first_byte_us, 0.0
    for end in rates.warm_up_ends():
        moved += rates.memory_bytes_per_us((begin + end) / 2) * (end - begin)
        begin = end
    assert moved / rates.gpu_bytes_per_us == pytest.approx(4 - (1 - math.exp(-4)))
    assert rates.memory_bytes_per_us(begin) == rates.gpu_bytes_per_us
    assert rates.memory_bytes_per_us(0) < 0.2 * rates.gpu_bytes_per_us


def test_arithmetic_of_a_tile_by_hand():
    config = TileConfig(tile_tokens=64, num_warps=4, num_stages=1)
    # 0.5 + 64 x 0.004 / 4 + 32,768 bytes / (4 x 32,768); one stage waits 0.65 us for every tile.
    assert tile_compute_us(PROBLEM, config, H200, COSTS) == pytest.approx(0.814)
    assert cta_bytes_per_us(PROBLEM, config, H200, COSTS) == pytest.approx(32_768 / 1.464)
    # 32 rows: half as much again for tokens and bytes.
    mqa = replace(PROBLEM, kv_heads=1)
    assert tile_compute_us(mqa, config, H200, COSTS) == pytest.approx(0.5 + 1.5 * 0.314)
    # Fewer clocks a microsecond, more microseconds.
    slower = replace(H200, boost_clock_mhz=990)
    assert tile_compute_us(PROBLEM, config, slower, COSTS) == pytest.approx(1.628)


def test_stages_hide_the_latency_until_arithmetic_limits():
    problem = replace(PROBLEM, head_dim=64)
    quick = replace(COSTS, tile_us=0.2)

    def rate(num_stages: int, num_warps: int = 4) -> float:
        return cta_bytes_per_us(problem, TileConfig(64, num_warps, num_stages), H200, quick)

    assert rate(1) < rate(2) < rate(3) == rate(4)
    assert rate(2) == pytest.approx(16_384 / 0.65)
    assert rate(3) == pytest.approx(16_384 / 0.389)
    assert rate(3, num_warps=2) < rate(3) == rate(3, num_warps=8)


def test_demand_luck_and_drain_of_an_sm():
    rates = rates_for(PROBLEM, TileConfig(64, 4, 3), H200, COSTS)
    assert rates.demand(1) == pytest.approx(32_768 / 0.814)
    assert rates.demand(2) == rates.demand(3) == 32 * 1980
    rates = rates_for(PROBLEM, TileConfig(64, 4, 3), H200, COSTS)
    assert rates.drain_us(reach=20_000) == rates.compute_us == pytest.approx(0.814)
    assert rates.drain_us(reach=65_536) == pytest.approx(0.5)
    rates = rates_for(PROBLEM, TileConfig(64, 4, 3), H200, replace(COSTS, sm_spread=0.1))
    weights = [rates.weight(sm) for sm in range(132)]
    assert (min(weights), max(weights)) == pytest.approx((0.9, 1.1))
    assert sum(weights) / 132 == pytest.approx(1)


def test_merge_costs_by_numbers_and_warps():
    assert merge_partial_us(COSTS, numbers=512, warps=4) == pytest.approx(0.138)
    # A stream-K merge reads the rows of the group (4 x 128 here) and empties their slots.
    rates = rates_for(PROBLEM, TileConfig(64, 8, 3), H200, COSTS)
    assert rates.merge.partial_us == pytest.approx(0.138)


@pytest.mark.parametrize(
    ("config", "head_dim", "resident"),
    [
        (TileConfig(128, 4, 2), 64, 4),  # 44 KB of 228, 16,384 of 65,536 registers
        (TileConfig(128, 4, 3), 128, 1),  # 140 KB
        (TileConfig(64, 4, 3), 128, 3),  # 76 KB
        (TileConfig(64, 4, 3), 80, 3),  # padded to 128
        (TileConfig(64, 8, 2), 64, 2),  # 32,768 registers
        (TileConfig(64, 4, 2), 256, 2),  # 76 KB, all 255 registers of a thread
        (TileConfig(256, 8, 3), 128, 0),  # 268 KB
    ],
)
def test_resident_ctas(config, head_dim, resident):
    problem = replace(PROBLEM, head_dim=head_dim)
    assert resident_ctas(problem, config, H200) == resident
    assert rates_for(problem, config, H200, COSTS, resident=5).resident == 5


def test_smaller_shared_memory_holds_fewer():
    for gpu, ctas in (("h200", 3), ("a100", 2), ("l4", 1)):
        assert resident_ctas(PROBLEM, TileConfig(64, 4, 3), find(gpu)) == ctas


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_constant_that_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match="tile_us is"):
        Constants(tile_us=value)
    with pytest.raises(ValueError, match=r"bandwidth_share is 0"):
        Constants(bandwidth_share=0.0)
