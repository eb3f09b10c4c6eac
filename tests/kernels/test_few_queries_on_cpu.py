"""Pairs of CTAs with whole output tiles of many_rows.cu, on the CPU, against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lean_on_cpu import Cpu, Mutation, Workspace, needs_compiler
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from test_many_rows_on_cpu import failure_of

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler

#: 52 rows, which end within a warp's, and 28, of which one CTA of a pair has more than half.
FEW = AttentionProblem(1, 4, 1, 1100, 64, q_len=13)
BATCH = replace(FEW, batch=3, q_len=7, head_dim=128, dtype="bf16", context=515, sinks=True)


def of_pairs(stages: int = 2) -> LeanCudaConfig:
    return cuda_config(64, 4, stages, 1, 2, 64, "bulk", 1, align_grid=True)


#: Problem, stages, SMs; including more output tiles than resident pairs.
CASES = {
    "rows within a warp's": (FEW, 2, 132),
    "sinks": (BATCH, 3, 2),
    # One CTA has a chunk more than the other, or the only one.
    "one chunk": (replace(FEW, context=40), 2, 132),
    "a window": (replace(FEW, window_left=130, softcap=2.0, batch=2), 2, 132),
    "pages": (replace(BATCH, page_size=16, sinks=False, q_len=16, context=300), 2, 132),
    "row tiles": (replace(FEW, q_len=40, alibi=True, causal=False, context=515), 2, 4),
}

#: Lines without which a launch is wrong, or ends in no order that a GPU allows.
MUTATIONS: dict[str, Mutation] = {
    "sums lie over stages that are read": (
        "rows_output.cuh",
        "  bar_sync(OF_CONSUMERS, CONSUMERS);  // the ring has been read\n",
        "",
    ),
    "sums are read before they are there": (
        "rows_output.cuh",
        "  meet_cluster();\n  const RowWriter",
        "  const RowWriter",
    ),
    "a pair's output is without its sink": (
        "rows_output.cuh",
        "float sum = SINKS ? ex2_approx_ftz(sink - high) : 0.0f;",
        "float sum = 0.0f;",
    ),
    "both CTAs mask as the first": (
        "rows_attend.cuh",
        "const int first = CLUSTER > 1 ? rank : 0;",
        "const int first = 0;",
    ),
}


def failures(name: str, cpu: Cpu, seeds: int) -> list[str]:
    problem, stages, sms = CASES[name]
    workspace = Workspace(epoch=7)
    found = [
        failure_of(cpu, workspace, problem, of_pairs(stages), sms, seed) for seed in range(seeds)
    ]
    return [failure for failure in found if failure is not None]


@pytest.mark.parametrize("name", CASES)
def test_a_pair_is_right(name):
    assert failures(name, Cpu(), seeds=2) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_line_is_noticed(name):
    cpu = Cpu(MUTATIONS[name])
    assert failures("sinks", cpu, seeds=4)


@pytest.mark.parametrize(
    "axes", [{"lengths_on": "device"}, {"leftpad": True}, {"q_lens": (13,)}], ids=str
)
def test_a_pair_takes_lengths_that_the_host_knows(axes):
    with pytest.raises(
        UserError, match=r"^cluster_size 2 with tile_rows 64 takes sequences of one length that"
    ):
        failure_of(Cpu(), Workspace(epoch=7), replace(FEW, **axes), of_pairs(), 132, 0)


@pytest.mark.parametrize(
    "setting",
    [{"cluster_size": 4}, {"num_warps": 8}, {"ctas_per_sm": 2}, {"copy": "async"}],
    ids=str,
)
def test_other_clusters_of_warpgroups_are_refused(setting):
    with pytest.raises(UserError, match=r"tile_rows 64 is .*, cluster_size 1 \(or 2 with tile_row"):
        replace(of_pairs(), **setting)
