from __future__ import annotations

from dataclasses import replace

import pytest

from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.gpu.spec import GpuSpec
from leanbench.model.rates import cta_bytes_per_us, read_floor_us, resident_ctas, sm_bytes_per_us, tile_compute_us
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig

H200 = find("h200")
PROBLEM = AttentionProblem(batch=1, q_heads=32, kv_heads=8, context=4096, head_dim=128)


@pytest.mark.parametrize(
    ("kv_bytes", "measured_us"),
    [
        (6_291_456, 3.42),
        (14_680_064, 5.27),
        (16_777_216, 5.81),
        (58_720_256, 15.36),
        (67_108_864, 17.03),
        (134_217_728, 32.07),
        (268_435_456, 61.08),
        (536_870_912, 119.3),
        (2_147_483_648, 468.27),
    ],
)
def test_read_floor_of_the_h200(kv_bytes: int, measured_us: float) -> None:
    assert read_floor_us(kv_bytes, H200) == pytest.approx(measured_us, rel=0.05)


@pytest.mark.parametrize("spec", CATALOGUE, ids=[spec.name for spec in CATALOGUE])
def test_bandwidth_stays_below_the_datasheet_and_is_within_reach_of_the_sms(spec: GpuSpec) -> None:
    kv_bytes = 10 * 10**9
    assert 0.85 < kv_bytes / read_floor_us(kv_bytes, spec) / 1e6 / spec.bandwidth_tb_s < 1
    assert spec.sms * sm_bytes_per_us(spec) > spec.bandwidth_tb_s * 1e6


def test_read_floor_at_zero_bytes_is_launch_and_ramp() -> None:
    assert read_floor_us(0, H200) == pytest.approx(2.2)


def test_one_stage_waits_for_every_tile() -> None:
    config = KernelConfig(tile_tokens=64, num_warps=4, num_stages=1)
    # 32 KB every 0.65 us of latency and 0.23 + 64 x 0.0022 / 4 + 32,768 / 62,400 us of arithmetic.
    assert tile_compute_us(PROBLEM, config, H200) == pytest.approx(0.79033, rel=1e-4)
    assert cta_bytes_per_us(PROBLEM, config, H200) == pytest.approx(32_768 / 1.44033, rel=1e-4)


def test_stages_hide_the_latency_until_arithmetic_limits() -> None:
    problem = replace(PROBLEM, head_dim=64)

    def rate(num_stages: int, num_warps: int = 4) -> float:
        return cta_bytes_per_us(problem, KernelConfig(64, num_warps, num_stages), H200)

    assert rate(1) < rate(2) < rate(3) == rate(4)
    assert rate(2) == pytest.approx(16_384 / 0.65)
    assert rate(3) == pytest.approx(16_384 / 0.52776, rel=1e-4)
    assert rate(3, num_warps=2) < rate(3) == rate(3, num_warps=8)


@pytest.mark.parametrize(
    ("head_dim", "config", "measured_gb_s"),
    [(64, KernelConfig(256, 4, 4), 46.1), (128, KernelConfig(256, 4, 2), 52.6)],
)
def test_one_cta_on_an_sm(head_dim: int, config: KernelConfig, measured_gb_s: float) -> None:
    """fa2 on an H200: 56 CTAs at head_dim 64 and 512k, 8 at 128 and 32k, K and V over latency and CTAs."""
    rate = cta_bytes_per_us(replace(PROBLEM, head_dim=head_dim), config, H200)
    assert rate / 1e3 == pytest.approx(measured_gb_s, rel=0.02)
    assert rate < sm_bytes_per_us(H200)


@pytest.mark.parametrize(
    ("config", "head_dim", "resident"),
    [
        (KernelConfig(128, 4, 2), 64, 4),  # 44 KB of 228, 16,384 of 65,536 registers
        (KernelConfig(128, 4, 3), 128, 1),  # 140 KB
        (KernelConfig(64, 4, 3), 128, 3),  # 76 KB
        (KernelConfig(64, 4, 3), 80, 3),  # padded to 128
        (KernelConfig(64, 8, 2), 64, 2),  # 32,768 registers
        (KernelConfig(64, 4, 2), 256, 2),  # 76 KB, all 255 registers of a thread
        (KernelConfig(256, 8, 3), 128, 0),  # 268 KB
    ],
)
def test_resident_ctas(config: KernelConfig, head_dim: int, resident: int) -> None:
    assert resident_ctas(replace(PROBLEM, head_dim=head_dim), config, H200) == resident


def test_smaller_shared_memory_holds_fewer() -> None:
    config = KernelConfig(64, 4, 3)
    assert [resident_ctas(PROBLEM, config, find(name)) for name in ("h200", "a100", "l4")] == [3, 2, 1]
