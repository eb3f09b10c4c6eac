"""Compiling for GPUs that are not here, in processes of its own: this one's Triton may be the interpreter."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from leanbench.build import Build, Job, build_all, process_pool
from leanbench.errors import UserError
from leanbench.gpu.catalogue import find
from leanbench.problem import AttentionProblem
from leanbench.registry import KernelConfig, kernel

PROBLEM = AttentionProblem(1, 32, 8, 4096, 128)
RAGGED = AttentionProblem(2, 64, 8, (100, 4000), 128)
CONFIG = KernelConfig(64, 4, 3, 1, 1, True)
H200 = find("h200")


@pytest.fixture(scope="module")
def pool():
    with process_pool(2) as found:
        yield found


def test_resources_of_each_kernel(pool):
    names = ("lean", "fa2", "fixed_split")
    configs = {name: kernel(name).default_config(PROBLEM, H200) for name in names}
    jobs = [Job(name, PROBLEM, config) for name, config in configs.items() if config is not None]
    builds = build_all(jobs, (9, 0), pool)
    launches = [[resources.launch for resources in built.resources] for built in builds]
    assert launches == [["lean_kernel"], ["fa2_kernel"], ["split_kernel", "merge_kernel"]]
    for job, built in zip(jobs, builds, strict=True):
        first = built.resources[0]
        assert first.num_warps == job.config.num_warps
        # K and V stages in flight, and less than the reserve beside them.
        stages_kb = (job.config.num_stages - 1) * 2 * job.config.tile_tokens * 128 * 2 / 1024
        assert stages_kb <= first.shared_bytes / 1024 <= stages_kb + 12
        assert 40 <= first.registers_per_thread <= 255


def test_one_process_compiles_for_several_architectures(pool):
    job = Job("fa2", PROBLEM, KernelConfig(64, 4, 3))
    old, new = (build_all([job], capability, pool)[0] for capability in ((8, 0), (9, 0)))
    assert old.resources[0].registers_per_thread != new.resources[0].registers_per_thread


def test_what_cannot_be_built_says_why_and_the_others_are_built(pool):
    jobs = [
        Job("lean", PROBLEM, KernelConfig(48, 4, 3, 1, 1, True)),
        Job("reference", PROBLEM, CONFIG),
        Job("lean", RAGGED, CONFIG),
    ]
    told: list[Build] = []
    uneven, reference, ragged = build_all(jobs, (9, 0), pool, told.append)
    assert uneven.failure is not None
    assert "\n" not in uneven.failure
    assert uneven.resources == ()
    assert reference.failure == "TypeError: reference is not compiled by Triton"
    assert ragged.failure is None
    assert ragged.resources[0].registers_per_thread > 40
    assert {one.job for one in told} == set(jobs)


def test_a_process_that_dies_is_one_sentence():
    class Dead(Executor):
        def submit(self, fn, /, *args, **kwargs):
            future = Future()
            future.set_exception(BrokenProcessPool("gone"))
            return future

    with pytest.raises(UserError, match="a compiling process died"):
        build_all([Job("lean", PROBLEM, CONFIG)], (9, 0), Dead())
