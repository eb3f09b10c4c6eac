"""The model against what was measured: this project's kernels, each with its best config, on an H200.

Medians in microseconds, fp16, HND. The model's constants were fitted to these figures, so the errors are in-sample.
"""

from __future__ import annotations

import statistics
from itertools import combinations

import pytest

from leanbench.gpu.catalogue import find
from leanbench.model import KNOWN_ERROR
from leanbench.model.cell import predict_cell
from leanbench.problem import AttentionProblem
from leanbench.registry import kernel

KERNELS = ("lean", "fa2", "fixed_split")


def mha(context: int) -> AttentionProblem:
    return AttentionProblem(1, 56, 56, context * 1024, 64)


def gqa(context: int, batch: int = 1) -> AttentionProblem:
    return AttentionProblem(batch, 32, 8, context * 1024, 128)


MEASURED_US = {
    mha(1): (8.8, 9.6, 10.0),
    mha(2): (12.5, 15.3, 13.2),
    mha(4): (19.1, 26.6, 20.0),
    mha(8): (31.9, 49.4, 32.6),
    mha(16): (57.7, 95.2, 58.4),
    mha(32): (108.1, 186.0, 109.2),
    mha(64): (209.7, 367.8, 209.2),
    mha(128): (409.1, 731.1, 410.0),
    mha(256): (810.9, 1457.2, 809.3),
    mha(512): (1607, 2909, 1609),
    gqa(4): (11.9, 43, 10.8),
    gqa(32): (38.6, 323, 37.4),
    gqa(8, batch=8): (68.1, 84.8, 66.7),
}


@pytest.fixture(scope="module")
def predicted_us() -> dict[AttentionProblem, list[float]]:
    spec = find("h200")
    return {
        problem: [predict_cell(problem, kernel(name), "best", spec)["latency_us"] for name in KERNELS]
        for problem in MEASURED_US
    }


@pytest.mark.parametrize(("index", "median", "worst"), [(0, 0.025, 0.07), (1, 0.01, 0.11), (2, 0.025, 0.08)])
def test_error_of_a_kernel(predicted_us, index, median, worst):
    errors = [abs(predicted_us[problem][index] / us[index] - 1) for problem, us in MEASURED_US.items()]
    assert statistics.median(errors) < median
    assert max(errors) < worst


def test_error_over_all(predicted_us):
    errors = [
        abs(predicted / measured - 1)
        for problem, us in MEASURED_US.items()
        for predicted, measured in zip(predicted_us[problem], us, strict=True)
    ]
    assert f"the {len(errors)} H200 medians it was fitted to" in KNOWN_ERROR
    assert statistics.median(errors) < 0.015
    assert f"{statistics.median(errors):.1%} median, {max(errors):.1%} worst" in KNOWN_ERROR


def test_order_of_the_kernels_where_they_differ_by_more_than_a_twentieth(predicted_us):
    compared = 0
    for problem, us in MEASURED_US.items():
        for one, other in combinations(range(len(KERNELS)), 2):
            if abs(us[one] / us[other] - 1) > 0.05:
                compared += 1
                predicted = predicted_us[problem]
                assert (predicted[one] < predicted[other]) == (us[one] < us[other]), (problem.label, one, other)
    assert compared > 25
