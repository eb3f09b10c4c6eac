"""Switches of builds for a few query tokens, on the CPU, against the fp64 reference; most are no
setting's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
from lean_on_cpu import COMPILER, Cpu, Mutation, Workspace
from leanbench.kernels.lean import cuda
from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_heuristic import cuda_config
from test_many_rows_on_cpu import MANY, failure_of, of_warpgroups

from leanbench.core.errors import UserError
from leanbench.core.problem import AttentionProblem

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

#: 52 rows, which end within a warp's.
FEW = AttentionProblem(1, 4, 1, 1100, 64, q_len=13)
BATCH = replace(FEW, batch=3, q_len=7, head_dim=128, dtype="bf16", context=515, sinks=True)


def in_cluster(cluster_size: int, groups: int) -> LeanCudaConfig:
    return cuda_config(64, 4 * groups, 2, 1, cluster_size, 64, "bulk", 64, align_grid=True)


def of_warps(cluster_size: int, min_tiles: int) -> LeanCudaConfig:
    return cuda_config(32, 4, 3, 1, cluster_size, 16, "bulk", min_tiles, align_grid=True)


class Trial(NamedTuple):
    #: Fields of the build.
    switches: dict[str, int]
    #: Problem, settings, SMs.
    launches: tuple[tuple[AttentionProblem, LeanCudaConfig, int], ...]


TRIALS = {
    # 3 to 12 splits, of equal and unequal lengths, with ranges that cross output tiles.
    "a merge reads again what is missing": Trial(
        {"reread_missing": 1},
        (
            (FEW, of_warpgroups(64, 64, align_grid=True), 12),
            (BATCH, of_warpgroups(64, 64), 10),
            (MANY, of_warpgroups(64), 20),
        ),
    ),
    "two CTAs merge half of the rows each": Trial(
        {"share_halves": 1},
        (
            (FEW, of_warpgroups(64, 64, align_grid=True), 2),
            (BATCH, of_warpgroups(64, 64, align_grid=True), 6),
            (replace(FEW, q_len=2), of_warpgroups(64, 64), 2),
        ),
    ),
    "and read them at once": Trial(
        {"share_halves": 2}, ((BATCH, of_warpgroups(64, 64, align_grid=True), 7),)
    ),
    # Clusters that have a whole output tile; more warpgroups than chunks.
    "pairs": Trial({}, ((FEW, in_cluster(2, 1), 132), (BATCH, in_cluster(2, 2), 132))),
    "clusters of 8": Trial(
        {},
        (
            (FEW, in_cluster(8, 2), 132),
            (BATCH, in_cluster(8, 1), 132),
            (replace(FEW, context=70, window_left=30), in_cluster(8, 2), 132),
        ),
    ),
    # A CTA's only part, and parts one after the other.
    "states over the ring": Trial(
        {"late_scratch": 1},
        (
            (replace(FEW, q_len=4), of_warps(8, 64), 132),
            (replace(BATCH, q_len=4), of_warps(1, 1), 7),
            (replace(MANY, q_len=4), of_warps(2, 1), 9),
        ),
    ),
}

#: Lines without which a launch of a trial is wrong.
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a unit that is late is used": (
        "a merge reads again what is missing",
        ("rows_output.cuh", "              owed |= late;\n", ""),
    ),
    "the other's half is not added": (
        "two CTAs merge half of the rows each",
        (
            "many_rows.cu",
            "            add_partial(part, slots, 1 - splits.mine, o, m, l, epoch, splits.mine);\n",
            "",
        ),
    ),
    "rows that nobody stores are waited for": (
        "two CTAs merge half of the rows each",
        ("rows_output.cuh", " || (only >= 0 && own_row() + 8 * half > last)", ""),
    ),
    "the other warpgroup's sums are not there": (
        "clusters of 8",
        (
            "rows_output.cuh",
            "    bar_sync(OF_CONSUMERS, CONSUMERS);\n    if (warpgroup() == 0)\n      add_sums",
            "    if (warpgroup() == 0)\n      add_sums",
        ),
    ),
    "sums lie over stages that are read": (
        "pairs",
        (
            "rows_output.cuh",
            "  bar_sync(OF_CONSUMERS, CONSUMERS);  // the ring has been read\n",
            "",
        ),
    ),
    "sums are read before they are there": (
        "pairs",
        ("rows_output.cuh", "  meet_cluster();\n  const RowWriter", "  const RowWriter"),
    ),
}


def failures(trial: Trial, cpu: Cpu, seeds: int) -> list[str]:
    workspace, build_of = Workspace(epoch=7), cuda.build_of

    def switched(*args) -> CudaBuild:
        return replace(build_of(*args), **trial.switches)

    with mock.patch.object(cuda, "build_of", switched):
        found = [
            failure_of(cpu, workspace, problem, config, sms, seed)
            for problem, config, sms in trial.launches
            for seed in range(seeds)
        ]
    return [failure for failure in found if failure is not None]


@pytest.mark.parametrize("name", TRIALS)
def test_a_switch_is_right(name, tmp_path):
    assert failures(TRIALS[name], Cpu(tmp_path), seeds=2) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_line_is_noticed(name, tmp_path):
    trial, mutation = MUTATIONS[name]
    assert failures(TRIALS[trial], Cpu(tmp_path, mutation), seeds=4)


def test_a_cluster_that_has_no_whole_output_tile_is_refused(tmp_path):
    switches: Mapping[str, int] = {}
    for problem, config, sms in (
        (FEW, replace(in_cluster(2, 1), min_tiles_per_cta=1), 132),
        (replace(FEW, batch=200), in_cluster(2, 1), 132),
    ):
        with pytest.raises(UserError, match="cluster_size 2 with tile_rows 64 takes a cluster"):
            failures(Trial(dict(switches), ((problem, config, sms),)), Cpu(tmp_path), 1)


@pytest.mark.parametrize(("cluster_size", "groups"), [(1, 2), (2, 4)])
def test_warps_that_no_cluster_shares_are_refused(cluster_size, groups):
    with pytest.raises(UserError, match="tile_rows 64 is of warpgroups, with num_warps 4"):
        in_cluster(cluster_size, groups)
