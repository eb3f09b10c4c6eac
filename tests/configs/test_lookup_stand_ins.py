"""Fallback families and GPUs where no configs are tuned."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from leanbench.kernels.lean.configs import LeanTritonConfig
from tuned_examples import (
    FROM,
    H200,
    HEURISTIC,
    LARGE,
    LEAN,
    PROBLEM,
    WIDE,
    build,
    candidate,
    family,
    problem_of,
    tuned,
)

from leanbench.configs.lookup import Choice, choose
from leanbench.configs.store import save_families
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


@pytest.fixture(autouse=True)
def _home(home):
    """Start every test without tuned settings."""


def test_dtype_and_layout_stand_in_for_each_other():
    save_families(H200, [family(problems=[tuned()])])
    bf16 = choose(LEAN, replace(PROBLEM, dtype="bf16", kv_layout="NHD"), H200)
    instead = "dtype fp16 for bf16, layout HND for NHD"
    assert bf16 == Choice(
        LARGE,
        "tuned",
        f"{FROM}, yours, {instead}: timed at 8 x 4096 tokens, 10.0% faster than the heuristic",
    )
    # The user's own comes first, then the one that differs less.
    save_families(H200, [family(large_us=8.0, dtype="bf16")])
    assert (
        "layout HND for NHD: predicted 20.0%"
        in choose(LEAN, replace(PROBLEM, dtype="bf16", kv_layout="NHD"), H200).why
    )
    save_families(H200, [family(large_us=7.0, dtype="bf16", kv_layout="NHD")])
    assert (
        "yours: predicted 30.0%"
        in choose(LEAN, replace(PROBLEM, dtype="bf16", kv_layout="NHD"), H200).why
    )


@pytest.mark.parametrize(
    ("tuned_groups", "wanted", "stand_in"),
    [
        ([4], 8, 4),
        ([4], 2, 4),
        ([4], 3, 4),
        ([2, 8], 5, 8),
        ([3, 16], 8, 16),
        # A ratio above 2, other rows of an output tile, or an invalid group.
        ([4], 9, None),
        ([4], 1, None),
        ([1], 2, None),
        ([16], 20, None),
        ([32], 20, 32),
    ],
)
def test_the_nearest_group_size_stands_in(tuned_groups, wanted, stand_in):
    save_families(H200, [family(group_size=group_size) for group_size in tuned_groups])
    why = choose(LEAN, problem_of(wanted), H200).why
    if stand_in is None:
        assert why.startswith("nothing is tuned that fits")
    else:
        assert f"yours, group size {stand_in} for {wanted}: " in why


def test_another_head_dim_does_not():
    save_families(H200, [family()])
    assert choose(LEAN, problem_of(4, 64), H200).why.startswith(
        "nothing is tuned that fits head_dim 64"
    )


def test_times_of_another_group_size_are_not_taken_for_ones_own():
    save_families(H200, [family(10.0, 11.0, group_size=8, problems=[tuned(4096)])])
    choice = choose(LEAN, PROBLEM, H200)
    assert choice.how == "heuristic"
    assert "predicted at least" in choice.why
    of_cuda = choose(kernel("lean_cuda"), PROBLEM, H200)
    assert of_cuda.why.endswith(": times of another group size are not carried over")


def test_measured_before_predicted_whatever_the_rank(ship):
    save_families(H200, [family(large_us=5.0, source="predicted")])
    assert choose(LEAN, PROBLEM, H200).why.startswith(
        "predicted 2026-11-21 on NVIDIA H200, yours: predicted 50.0%"
    )
    save_families(H200, [family(dtype="bf16")])
    assert choose(LEAN, PROBLEM, H200).why.startswith(
        f"{FROM}, yours, dtype bf16 for fp16: predicted 10.0%"
    )


def test_the_nearest_gpu_stands_in_and_it_is_said_once(ship):
    h100 = find("h100-sxm")
    ship(family(), name="h200")
    ship(family(large_us=5.0), name="a100-80gb")
    with pytest.warns(
        UserWarning,
        match="NVIDIA H100 80GB HBM3, those of NVIDIA H200 .shipped. are used in Triton and the"
        " heuristic's in CUDA",
    ) as warned:
        choice = choose(LEAN, PROBLEM, h100)
    assert choice == Choice(
        LARGE, "tuned", f"{FROM}, shipped: predicted 10.0% faster than the heuristic here"
    )
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(LEAN, replace(PROBLEM, batch=3), h100).how == "tuned"
        assert choose(LEAN, replace(PROBLEM, dtype="bf16"), h100).how == "tuned"
    # Another architecture is no fallback.
    assert choose(LEAN, PROBLEM, find("b200")).why.startswith("nothing is tuned")


def test_the_nearest_of_several_gpus(ship):
    for name in ("h200", "gh200", "h100-pcie"):
        ship(family(), name=name)
    # 3.9 TB/s is within 10% of GH200's 4.0, and the L2 is equal, so this is the same GPU.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "on NVIDIA GH200 480GB, shipped" in choose(LEAN, PROBLEM, find("h100-nvl")).why
    with pytest.warns(UserWarning, match="those of NVIDIA GH200"):
        assert "on NVIDIA GH200" in choose(LEAN, PROBLEM, find("h100-sxm")).why


def test_of_another_gpu_nothing_predicted_and_no_times(ship):
    h100 = find("h100-sxm")
    ship(family(source="predicted"))
    assert choose(LEAN, PROBLEM, h100).why.startswith("nothing is tuned")
    ship(family(10.0, 11.0, problems=[tuned(4096)]))
    with pytest.warns(UserWarning, match="no configs are tuned for NVIDIA H100"):
        assert choose(LEAN, PROBLEM, h100).how == "heuristic"
    assert choose(kernel("lean_cuda"), PROBLEM, h100) == Choice(
        kernel("lean_cuda").default_config(PROBLEM, h100),
        "heuristic",
        f"{FROM}, shipped: times of another GPU are not carried over",
    )


def test_the_sms_and_the_memory_of_the_gpu_that_is_here_count(ship):
    """A memory-bound build wins on a slower GPU only in proportion to its bandwidth."""
    reads = build(1e-6, gpu_bytes_per_us=4.8e6)
    ship(family(builds=[build(12.0), reads]))
    us_on_h200 = PROBLEM.kv_bytes / 4.8e6
    assert us_on_h200 == pytest.approx(3.495, abs=1e-3)
    on_h200 = choose(LEAN, PROBLEM, H200)
    assert f"predicted {1 - us_on_h200 / 12.0:.1%} faster" in on_h200.why
    h100 = find("h100-sxm")
    with pytest.warns(UserWarning, match="those of NVIDIA H200"):
        assert (
            f"predicted {1 - us_on_h200 * 4.8 / 3.35 / 12.0:.1%} faster"
            in choose(LEAN, PROBLEM, h100).why
        )


def test_what_does_not_fit_the_gpu_that_is_here_is_passed_over(ship):
    """An L4 has 100 KB of shared memory on an SM, an A100 164."""
    ship(family(candidates=[candidate(HEURISTIC, 0), candidate(LARGE, 1)]), name="a100-80gb")
    l4 = find("l4")
    small = LEAN.default_config(PROBLEM, l4)
    assert small is not None
    fits, too_large = (
        candidate(WIDE, 1, shared_bytes=90_000),
        candidate(LARGE, 2, shared_bytes=110_000),
    )
    candidates = [candidate(small, 0), fits, too_large]
    ship(
        family(
            candidates=candidates, builds=[build(10.0), build(9.0), build(5.0)], shortlist=[1, 2]
        ),
        name="a100-80gb",
    )
    with pytest.warns(UserWarning, match="those of NVIDIA A100"):
        assert choose(LEAN, PROBLEM, l4).config == WIDE
    # Two of them to an SM do not fit either.
    twice = candidate(replace(WIDE, ctas_per_sm=2), 1, shared_bytes=90_000)
    ship(
        family(
            candidates=[candidate(small, 0), twice], builds=[build(10.0), build(9.0)], shortlist=[1]
        ),
        name="a100-80gb",
    )
    assert choose(LEAN, PROBLEM, l4).how == "heuristic"
    # For an uncompiled candidate, the kernels' estimate decides: 5 stages of 128 tokens are 256 KB.
    unknown = candidate(LeanTritonConfig(128, 4, 5, 1, 1, False), 1, shared_bytes=None)
    ship(
        family(candidates=[candidate(small, 0), unknown], builds=[build(10.0), build(9.0)]),
        name="a100-80gb",
    )
    assert choose(LEAN, PROBLEM, l4).how == "heuristic"
