"""Theoretical warp occupancy, against values worked out by hand from the rules of allocation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.errors import UserError
from leanbench.core.kernel import LaunchResources
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.gpu.occupancy import Occupancy, theoretical_occupancy

H200, A10G = find("h200"), find("a10g")


def kernel(num_warps: int, registers: int, shared_bytes: int = 0) -> LaunchResources:
    return LaunchResources("kernel", 100, num_warps, registers, shared_bytes, 0)


@pytest.mark.parametrize(
    ("gpu", "resources", "expected"),
    [
        # 168 x 32 = 5376 registers a warp, 3 of them in a quarter's 16384: 12 warps, 3 CTAs.
        # 71680 + 1024 bytes: 3 in 233472 too.
        (H200, kernel(4, 168, 71680), Occupancy(3, 12, 12 / 64)),
        # 189 x 32 = 6048, given as 6144: 2 in a quarter, 2 CTAs; 206848 + 1024 bytes fit once.
        (H200, kernel(4, 189, 206848), Occupancy(1, 4, 4 / 64)),
        # 32 x 32 = 1024: 16 in a quarter, 64 warps, as many as there may be.
        (H200, kernel(4, 32, 1024), Occupancy(16, 64, 1.0)),
        # 33 x 32 = 1056, given as 1280: 12 in a quarter (15 without the rounding).
        (H200, kernel(8, 33), Occupancy(6, 48, 0.75)),
        # 80 x 32 = 2560: 6 in a quarter makes 24, where 65536 of one piece would hold 25.
        (H200, kernel(1, 80), Occupancy(24, 24, 24 / 64)),
        # 16 CTAs of one warp, of 48 warps.
        (A10G, kernel(1, 16), Occupancy(16, 16, 16 / 48)),
        # 48 warps hold 3 CTAs of 16; 40 x 32 = 1280 registers: 12 in a quarter, 48 too.
        (A10G, kernel(16, 40), Occupancy(3, 48, 1.0)),
        # 33109 + 1024 bytes fit 102400 three times, given as 34176 only twice.
        (A10G, kernel(4, 16, 33109), Occupancy(2, 8, 8 / 48)),
        # 32 warps of 128 x 32 = 4096 registers: 4 in a quarter, half of one CTA.
        (H200, kernel(32, 128), Occupancy(0, 0, 0.0)),
    ],
)
def test_by_hand(gpu, resources, expected):
    assert theoretical_occupancy(resources, gpu) == expected


#: Warps and CTAs of an SM. 8.7, 10.3 and 12.1 are not listed: like the nearest lower one.
LIMITS = {
    (64, 32): [(8, 0), (9, 0), (10, 0), (10, 3)],
    (48, 16): [(8, 6), (8, 7)],
    (48, 24): [(8, 9), (12, 0), (12, 1)],
}


@pytest.mark.parametrize(("warps", "ctas"), LIMITS)
def test_limits_of_each_compute_capability(warps, ctas):
    for capability in LIMITS[warps, ctas]:
        gpu = replace(H200, compute_capability=capability)
        of_one = theoretical_occupancy(kernel(1, 16), gpu)
        assert (of_one.ctas_per_sm, of_one.share) == (ctas, ctas / warps), capability
        assert theoretical_occupancy(kernel(4, 16), gpu).warps_per_sm == warps, capability


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_an_unknown_generation_is_not_guessed(capability):
    with pytest.raises(
        UserError, match=rf"compute capability {capability[0]}\.{capability[1]} \(NVIDIA H200\)"
    ):
        theoretical_occupancy(kernel(4, 32), replace(H200, compute_capability=capability))


@given(
    gpu=st.sampled_from(CATALOGUE),
    warps=st.sampled_from([1, 2, 4, 8, 16]),
    registers=st.integers(1, 255),
    shared_bytes=st.integers(0, 99 * 1024),
)
def test_what_is_said_fits_and_one_more_does_not(gpu, warps, registers, shared_bytes):
    occupancy = theoretical_occupancy(kernel(warps, registers, shared_bytes), gpu)
    registers_of_cta = warps * registers * 32
    assert occupancy.ctas_per_sm * registers_of_cta <= gpu.registers_per_sm
    assert occupancy.ctas_per_sm * (shared_bytes + 1024) <= gpu.shared_kb_per_sm * 1024
    assert 0 <= occupancy.share <= 1
    if theoretical_occupancy(kernel(warps, registers, 0), gpu).ctas_per_sm > occupancy.ctas_per_sm:
        one_more = (occupancy.ctas_per_sm + 1) * (shared_bytes + 1024 + 127)
        assert one_more > gpu.shared_kb_per_sm * 1024
    more = theoretical_occupancy(kernel(warps, min(255, registers + 8), shared_bytes + 512), gpu)
    assert more.ctas_per_sm <= occupancy.ctas_per_sm
