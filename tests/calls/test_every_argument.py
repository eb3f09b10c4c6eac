"""The grid of tests/gpu_only/test_every_argument_on_gpu.py without a GPU: it has every pair of
values, and a kernel that is right passes it.
"""

from __future__ import annotations

import pytest
import torch
from argument_calls import draw_call, run_call
from argument_grid import COMPILED, DRAWN, all_pairs, calls_of, go_together, pairs, pairwise_rows
from argument_reference import failure

from leanbench.attention import lean_attn_with_kvcache


def test_every_pair_of_values_is_in_a_row_and_no_other():
    rows = pairwise_rows(COMPILED)
    covered = set().union(*map(pairs, rows))
    assert covered == all_pairs(COMPILED)
    assert all(go_together(*pair) for pair in covered)
    assert len(rows) < 200


@pytest.mark.deep
def test_drawn_values_meet_every_other():
    calls = [call for row in pairwise_rows(COMPILED) for call in calls_of(row, 60, 0)]
    assert all_pairs({**COMPILED, **DRAWN}) <= set().union(*map(pairs, calls))


@pytest.mark.usefixtures("prepared_for")
@pytest.mark.parametrize("part", range(4))
def test_a_kernel_that_is_right_passes(part):
    for number, row in enumerate(pairwise_rows(COMPILED, seed=part)[part::16]):
        small = {**row, "capacity": 40, "q_len": min(row["q_len"], 5)}
        (call,) = calls_of(small, 1, part)
        drawn = draw_call(call, number, "cpu")
        out, lse = run_call(drawn, lean_attn_with_kvcache)
        assert failure(drawn, out, lse) is None, call


@pytest.mark.usefixtures("prepared_for")
def test_what_is_wrong_does_not_pass():
    row = next(
        row
        for seed in range(9)
        for row in pairwise_rows(COMPILED, seed)
        if row["append"] == "q_len" and row["fp8"] is None and not row["rotary"]
    )
    (call,) = calls_of({**row, "dtype": torch.float16, "capacity": 40, "q_len": 2}, 1, 0)
    mild = {"sharpness": 1.0, "softmax_scale": None, "unused": "random", "return_softmax_lse": True}
    drawn = draw_call({**call, **mild}, 0, "cpu")
    out, lse = run_call(drawn, lean_attn_with_kvcache)
    assert lse is not None
    assert failure(drawn, out, lse) is None
    assert "error" in str(failure(drawn, out + 0.1, lse))
    assert "error" in str(failure(drawn, out * float("nan"), lse))
    assert "LSE error" in str(failure(drawn, out, lse + 0.1))
    first, place = drawn.cached[1], drawn.places[1]
    cache = drawn.arguments["v_cache"].flatten(0, 1)
    for at, sentence in (
        (first, "a cache does not have what was appended"),
        (first + drawn.new_lens[1], "a cache was changed where nothing is appended"),
    ):
        before = cache[place[at]].clone()
        cache[place[at]] += 1
        assert failure(drawn, out, lse) == sentence
        cache[place[at]] = before
    assert failure(drawn, out, lse) is None
