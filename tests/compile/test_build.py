"""Compiling for GPUs that are not here, in processes of its own: this one's Triton may be the
interpreter.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from leanbench.kernels.lean.configs import LeanTritonConfig
from leanbench.kernels.lean.triton_kernel import LeanTriton

from leanbench.compile.build import Job, build_all, process_pool
from leanbench.compile.triton_target import triton_target
from leanbench.core.config import TileConfig
from leanbench.core.errors import UserError
from leanbench.core.inputs import shape_only
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.gpu.occupancy import theoretical_occupancy

PROBLEM = AttentionProblem(1, 32, 8, 4096, 128)
RAGGED = AttentionProblem(2, 64, 8, (100, 4000), 128)
CONFIG = LeanTritonConfig(64, 4, 3, 1, 1, True)
H200 = find("h200")


@pytest.fixture(scope="module")
def pool():
    with process_pool(2) as pool:
        yield pool


def test_resources_of_each_kernel(pool):
    names = ("lean_triton", "fa2_triton", "fixed_split_triton")
    configs = {name: kernel(name).default_config(PROBLEM, H200) for name in names}
    jobs = [Job(name, PROBLEM, config) for name, config in configs.items() if config is not None]
    builds = build_all(jobs, (9, 0), pool)
    launches = [[resources.launch for resources in built.resources] for built in builds]
    assert launches == [["lean_kernel"], ["fa2_kernel"], ["split_kernel", "merge_kernel"]]
    for job, built in zip(jobs, builds, strict=True):
        first, config = built.resources[0], job.config
        assert isinstance(config, TileConfig)
        assert first.num_warps == config.num_warps
        # K and V stages in flight, and less than the reserve beside them.
        stages_kb = (config.num_stages - 1) * 2 * config.tile_tokens * 128 * 2 / 1024
        assert stages_kb <= first.shared_bytes / 1024 <= stages_kb + 12
        assert 40 <= first.registers_per_thread <= 255


def test_one_kernel_is_built_by_the_compiler_of_each_config(pool):
    cuda = kernel("lean_cuda").default_config(PROBLEM, H200)
    assert cuda is not None
    assert cuda.implementation == "cuda"
    builds = build_all([Job(name, PROBLEM, cuda) for name in ("lean", "lean_cuda")], (9, 0), pool)
    (triton,) = build_all([Job("lean", PROBLEM, CONFIG)], (9, 0), pool)
    assert triton.resources[0].launch == "lean_kernel"
    assert builds[0].resources == builds[1].resources
    (taken,) = builds[0].resources
    assert (taken.launch, taken.num_warps, taken.spilled_registers) == (
        "lean_cuda",
        cuda.num_warps,
        0,
    )
    assert 40 <= taken.registers_per_thread <= 255
    # K and V of every warp's chunks in flight, and less than a quarter beside them.
    assert cuda.chunk_tokens is not None
    stages_kb = cuda.num_warps * cuda.num_stages * 2 * cuda.chunk_tokens * 128 * 2 / 1024
    assert stages_kb <= taken.shared_bytes / 1024 <= 1.25 * stages_kb


@pytest.mark.deep
def test_an_a100_spills_nothing(pool):
    """Without a cap on registers the compiler spills for group size 4. Triton 3.7 spills for group
    size 8.
    """
    own, a100 = kernel("lean_triton"), find("a100")
    jobs: list[Job] = []
    for head_dim in (64, 128):
        problem = AttentionProblem(1, 32, 8, 4096, head_dim)
        distinct = {config.build_key: config for config in own.tuning_space(problem, a100)}
        jobs += [Job("lean_triton", problem, config) for config in distinct.values()]
    builds = build_all(jobs, (8, 0), pool)
    for job, built in zip(jobs, builds, strict=True):
        (taken,), config = built.resources, job.config
        assert isinstance(config, TileConfig)
        assert taken.spilled_registers == 0, job
        assert theoretical_occupancy(taken, a100).ctas_per_sm >= (config.ctas_per_sm or 1), job


@pytest.mark.deep
def test_pages_and_query_tokens_keep_as_many_stages_in_flight(pool):
    """Loads that wait for the block table in each step could not be in flight together."""
    config = LeanTritonConfig(64, 4, 3, 1, 1, True)
    problems = [replace(PROBLEM, q_len=2, page_size=page_size) for page_size in (None, 16, 64, 256)]
    builds = build_all([Job("lean", problem, config) for problem in problems], (9, 0), pool)
    assert [built.failure for built in builds] == [None] * 4
    assert len({built.resources[0].shared_bytes for built in builds}) == 1


def builds_of_counters(counters: int) -> int:
    """Builds that calls need which are lent these numbers, 4 bytes apart, as their counter of
    replays.
    """
    (launch,) = LeanTriton().launches(shape_only(PROBLEM), CONFIG)
    slots, host_slots, epoch, _ = launch.lent()
    numbers = torch.zeros(counters, dtype=torch.int32)
    with triton_target((9, 0)):
        return len(
            {
                launch.function.warmup(
                    *(slots, host_slots, epoch, numbers[index : index + 1]),
                    *launch.arguments,
                    grid=(launch.grid,),
                    **launch.options,
                ).hash
                for index in range(counters)
            }
        )


def test_a_captured_call_runs_the_build_of_the_plain_one_before_it(pool):
    """Compiling and loading another build inside the capture can break it. The counter of a plain
    call starts at a multiple of 16 bytes, those of three captures out of four do not.
    """
    assert pool.submit(builds_of_counters, 4).result() == 1


def test_one_process_compiles_for_several_architectures(pool):
    job = Job("fa2", PROBLEM, TileConfig(64, 4, 3))
    old = build_all([job], (8, 0), pool)[0]
    new = build_all([job], (9, 0), pool)[0]
    assert old.resources[0].registers_per_thread != new.resources[0].registers_per_thread


def test_what_cannot_be_built_says_why_and_the_others_are_built(pool):
    no_config = replace(CONFIG)
    # Not to be had otherwise: a config is checked where it is made.
    object.__setattr__(no_config, "tile_tokens", 48)
    jobs = [
        Job("lean", PROBLEM, no_config),
        Job("reference", PROBLEM, CONFIG),
        Job("lean", RAGGED, CONFIG),
    ]
    announced: list[tuple[int, int]] = []
    uneven, reference, ragged = build_all(
        jobs, (9, 0), pool, lambda *counts: announced.append(counts)
    )
    assert uneven.failure is not None
    assert "\n" not in uneven.failure
    assert uneven.resources == ()
    assert reference.failure == "TypeError: reference has nothing to compile"
    assert ragged.failure is None
    assert ragged.resources[0].registers_per_thread > 40
    assert announced == [(done, 3) for done in range(4)]


def test_a_process_that_dies_is_one_sentence():
    class Dead(Executor):
        def submit(self, fn, /, *args, **kwargs):
            future = Future()
            future.set_exception(BrokenProcessPool("gone"))
            return future

    with pytest.raises(UserError, match="a compiling process died"):
        build_all([Job("lean", PROBLEM, CONFIG)], (9, 0), Dead())
