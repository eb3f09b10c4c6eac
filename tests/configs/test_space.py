"""Families, candidates and their exclusion after compiling."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from leanbench.kernels.lean.configs import BuildKey, LeanConfig, LeanCudaConfig, LeanTritonConfig

from leanbench.compile.build import Build
from leanbench.configs.formula import Shape, grid_of
from leanbench.configs.space import (
    Candidate,
    FamilyKey,
    candidates,
    default_families,
    distinct,
    heuristics,
    jobs,
    why_left_out,
)
from leanbench.core.kernel import LaunchResources
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import CATALOGUE, find
from leanbench.tune.problems import problems

LEAN = kernel("lean")
H200 = find("h200")
FAMILY = FamilyKey(128, 8)


def built(config: LeanConfig, registers=128, shared_kb=60, spilled=0, failure=None) -> Build:
    taken = LaunchResources(
        "lean_kernel", 132, config.num_warps, registers, shared_kb * 1024, spilled
    )
    job = jobs(LEAN, FAMILY, H200)[config.build_key]
    return Build(job, () if failure else (taken,), failure)


def test_families_are_all_combinations():
    assert [family.label for family in default_families((64,), (1, 4), ("fp16", "bf16"))] == [
        "d64 MHA fp16 HND",
        "d64 group 4 fp16 HND",
        "d64 MHA bf16 HND",
        "d64 group 4 bf16 HND",
    ]


@pytest.mark.parametrize("tiles", [1, 4, 8, 12, 20, 56, 96, 200, 512])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_family_makes_problems_of_so_many_output_tiles(tiles, group):
    problem = FamilyKey(64, group).problem(tiles, 1000)
    assert problem.batch * problem.kv_heads == tiles
    assert problem.group_size == group


def test_grids_share_a_build_and_registers_part_them():
    config = LeanTritonConfig(128, 4, 3, 1, 1, True)
    assert config.build_key == LeanTritonConfig(128, 4, 3, 2, 8, False).build_key
    assert config.build_key != LeanTritonConfig(128, 4, 3, 3, 1, True).build_key
    assert config.build_key != LeanTritonConfig(128, 4, 2, 1, 1, True).build_key


def test_what_a_cuda_build_is_parted_by():
    cuda_config = LeanCudaConfig(
        128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=2, copy="bulk"
    )
    # LeanTile and grid are arguments of the launch.
    other_grid = replace(cuda_config, tile_tokens=256, min_tiles_per_cta=4, align_grid=False)
    assert cuda_config.build_key == other_grid.build_key
    others = [
        replace(cuda_config, **{name: value})
        for name, value in (
            ("num_warps", 8),
            ("num_stages", 2),
            ("ctas_per_sm", 2),
            ("chunk_tokens", 16),
            ("cluster_size", 4),
            ("copy", "async"),
        )
    ]
    triton = LeanTritonConfig(128, 4, 3, 1, 1, True)
    assert len({config.build_key for config in (cuda_config, *others, triton)}) == 8


def test_launches_of_other_lean_tiles_are_others():
    cuda_config = LeanCudaConfig(
        128, 4, 3, 1, 1, True, chunk_tokens=32, tile_rows=8, cluster_size=1, copy="bulk"
    )
    # 8 output tiles with at most 16 CTAs each: both grids are 128.
    pairs = [
        Candidate(config, config.build_key)
        for config in (cuda_config, replace(cuda_config, tile_tokens=64))
    ]
    problem = FAMILY.problem(8, 4096)
    assert [grid_of(Shape.of(problem), pair.config, H200.sms, LEAN) for pair in pairs] == [128, 128]
    assert distinct(pairs, problem, LEAN, H200) == pairs
    assert distinct([pairs[0], pairs[0]], problem, LEAN, H200) == pairs[:1]


def test_heuristics_are_the_kernels_own_first_and_what_it_takes():
    triton, cuda = kernel("lean_triton"), kernel("lean_cuda")
    problem = FAMILY.problem(8, 4096)
    own = [config.default_config(problem, H200) for config in (cuda, triton)]
    assert [config.implementation for config in own if config] == ["cuda", "triton"]
    assert heuristics(LEAN, problem, H200) == own
    assert heuristics(triton, problem, H200) == own[1:]
    assert heuristics(cuda, problem, H200) == own[:1]
    # Triton leads on an Ampere GPU.
    a100 = find("a100")
    assert heuristics(LEAN, problem, a100) == [
        config.default_config(problem, a100) for config in (triton, cuda)
    ]


def test_there_is_one_job_for_each_build():
    builds = jobs(LEAN, FAMILY, H200)
    space = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)
    assert set(builds) == {config.build_key for config in space}
    configs: dict[BuildKey, Any] = {key: job.config for key, job in builds.items()}
    assert all(config.build_key == key for key, config in configs.items())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        ({"failure": "ValueError: no"}, "does not compile: ValueError: no"),
        ({"shared_kb": 230}, "takes 230 KB of shared memory, a CTA has 227 KB"),
        ({"shared_kb": 120}, "2 CTAs to an SM were asked for, 1 fit"),
        ({"registers": 255, "shared_kb": 20}, None),
        # Slow, not impossible.
        ({"registers": 255, "spilled": 186}, None),
        ({}, None),
    ],
)
def test_what_a_build_takes_rules_it_out(build, says):
    config = LeanTritonConfig(64, 4, 3, 2, 1, True)
    assert why_left_out(built(config, **build), config, H200) == says


def test_candidates_are_those_that_compiling_leaves():
    space = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)
    builds = {
        config.build_key: built(config, shared_kb=230 if config.tile_tokens == 256 else 60)
        for config in space
    }
    able, left_out = candidates(LEAN, FAMILY, H200, builds)
    assert {candidate.config for candidate in able}.isdisjoint(left_out)
    assert len(able) + len(left_out) == len(space)
    assert {config.tile_tokens for config in left_out if "230 KB" in left_out[config]} == {256}


def test_equal_launches_are_timed_once():
    problem = FAMILY.problem(8, 128)
    # 16 LeanTiles: none of these grids can have more CTAs.
    same = [LeanTritonConfig(64, 4, 3, ctas, 1, False) for ctas in (1, 2)]
    different = LeanTritonConfig(64, 4, 3, 1, 2, False)
    launches = distinct(
        [Candidate(config, config.build_key) for config in [*same, different]], problem, LEAN, H200
    )
    assert [candidate.config for candidate in launches] == [same[0], different]


@pytest.mark.parametrize("gpu", [gpu.name for gpu in CATALOGUE])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_gpu_has_something_to_try(gpu, head_dim):
    spec = find(gpu)
    assert LEAN.tuning_space(FamilyKey(head_dim, 8).problem(8, 4096), spec)


def test_problems_cover_the_range_from_the_first_on():
    drawn = list(islice(problems(FamilyKey(64, 4), H200), 24))
    assert len(set(drawn)) == 24
    tiles = [problem.batch * problem.kv_heads for problem in drawn]
    sizes = [problem.kv_bytes for problem in drawn]
    assert tiles[:4] == [8, 8, 8, 8]
    assert min(tiles) <= 8
    assert max(tiles[:6]) == max(tiles) == 512
    assert min(sizes) < 5e6
    assert 400e6 < max(sizes) < 1e9
    assert any(problem.max_context % 1024 for problem in drawn)


def test_problems_stay_below_a_size():
    assert all(
        problem.kv_bytes <= 50e6 for problem in islice(problems(FamilyKey(64, 4), H200, 50e6), 40)
    )
