"""Order of launches while little is known."""

from __future__ import annotations

import math
from dataclasses import replace

from leanbench.kernels.lean.configs import LeanConfig, LeanCudaConfig, LeanTritonConfig

from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.tune.order import first, promising

TARGET = (kernel("lean"), find("h200"))
PROBLEM = AttentionProblem(1, 32, 8, 16384, 128)
TRITON = [LeanTritonConfig(tokens, 4, 3, 1, 1, True) for tokens in (64, 128, 256)]


def cuda(cluster_size: int, min_tiles: int = 1) -> LeanConfig:
    return LeanCudaConfig(
        128,
        4,
        3,
        1,
        min_tiles,
        True,
        chunk_tokens=32,
        tile_rows=8,
        cluster_size=cluster_size,
        copy="bulk",
    )


def test_what_the_model_knows_takes_turns_with_one_of_each_other_build():
    # 1024 LeanTiles on 132 SMs: with at least 64 of them per range most SMs idle, so that grid is
    # the last of its build.
    others = [cuda(1, 64), cuda(1), cuda(2)]
    launches = [*others, *TRITON]
    ranked: list[LeanConfig] = []

    def rank(configs):
        ranked.extend(configs)
        return [3.0, 1.0, 2.0]

    assert first(PROBLEM, launches, rank, TARGET, begin=0) == [4, 1, 5, 2, 3, 0]
    assert ranked == TRITON
    # The next problem starts with the next build, modulo their number.
    assert first(PROBLEM, launches, rank, TARGET, begin=1) == [4, 2, 5, 1, 3, 0]
    assert first(PROBLEM, launches, rank, TARGET, begin=2) == [4, 1, 5, 2, 3, 0]


def test_either_may_be_alone():
    def nothing_to_rank(configs):
        raise AssertionError(configs)

    assert first(PROBLEM, [cuda(1), cuda(2)], nothing_to_rank, TARGET, begin=1) == [1, 0]
    assert first(PROBLEM, TRITON, lambda configs: [2.0, 3.0, 1.0], TARGET, begin=1) == [2, 0, 1]


def test_each_implementation_has_its_share_of_the_promising():
    launches = [
        *(cuda(1, least) for least in range(1, 9)),
        *(replace(TRITON[0], num_stages=n) for n in range(1, 9)),
    ]
    predicted_us = [float(number) for number in range(1, 17)]
    # A quarter of 8 each in turn, then the others only by prediction.
    assert promising(launches, predicted_us, 8) == [0, 8, 1, 9, 2, 3, 4, 5]
    assert promising(launches[:8], predicted_us[:8], 4) == [0, 1, 2, 3]


def test_a_few_whose_builds_have_no_coefficients_come_beside():
    launches = [replace(TRITON[0], num_stages=stages) for stages in range(1, 9)]
    assert len({config.build_key for config in launches}) == 8
    predicted_us = [math.inf, 2.0, math.inf, 1.0, math.inf, 4.0, 3.0, math.inf]
    assert promising(launches, predicted_us, 3) == [3, 1, 6, 0, 2]
    # No unknown ones remain if all are known, or all are included already.
    assert promising(launches, [float(number) for number in range(8)], 3) == [0, 1, 2]
    assert promising(launches[:1], [math.inf], 3) == [0]
