"""The grid of tests/gpu_only/test_every_argument_on_gpu.py without a GPU: it has every pair of
values, and a kernel that is right passes it.
"""

from __future__ import annotations

import pytest
from argument_grid import (
    COMPILED,
    DRAWN,
    all_pairs,
    calls_of,
    draw_call,
    failure,
    go_together,
    pairs,
    pairwise_rows,
    run_call,
)
from every_kind import take_every_kind

from leanbench.attention import lean_attn_with_kvcache


def test_every_pair_of_values_is_in_a_row_and_no_other():
    rows = pairwise_rows(COMPILED)
    covered = set().union(*map(pairs, rows))
    assert covered == all_pairs(COMPILED)
    assert all(go_together(*pair) for pair in covered)
    assert len(rows) < 200


def test_drawn_values_meet_every_other():
    calls = [call for row in pairwise_rows(COMPILED) for call in calls_of(row, 60, 0)]
    assert all_pairs({**COMPILED, **DRAWN}) <= set().union(*map(pairs, calls))


@pytest.mark.parametrize("part", range(4))
def test_a_kernel_that_is_right_passes(part, monkeypatch):
    take_every_kind(monkeypatch)
    for number, row in enumerate(pairwise_rows(COMPILED, seed=part)[part::16]):
        small = {**row, "capacity": 40, "q_len": min(row["q_len"], 5)}
        (call,) = calls_of(small, 1, part)
        drawn = draw_call(call, number, "cpu")
        out, lse = run_call(drawn, lean_attn_with_kvcache)
        assert failure(drawn, out, lse) is None, call
