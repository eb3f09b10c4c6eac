"""Predicted times, and the saved results."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from depth import deep
from leanbench.kernels.lean.configs import LeanTritonConfig
from world import H200, LEAN, TRITON, Here, Silent, World, builds_of

from leanbench.compile.build import Build
from leanbench.configs.space import Candidate, FamilyKey
from leanbench.core.kernel import LaunchResources
from leanbench.gpu.catalogue import CATALOGUE
from leanbench.gpu.local import Target
from leanbench.tune import fits, result, run, search
from leanbench.tune.plan import Plan, Progress
from leanbench.tune.predicted import ModelStopwatch, model_ranker, no_ranking, spill_us
from leanbench.tune.result import to_family
from leanbench.tune.run import Request, tune
from leanbench.tune.search import Search

FAMILY = FamilyKey(128, 8)
CONFIG = LeanTritonConfig(64, 4, 3, 1, 1, True)


@pytest.mark.deep
def test_what_is_written_of_a_prediction():
    builds = builds_of(FAMILY)
    space = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)[::6]
    pair = (Progress(FAMILY, [Candidate(config, config.build_key) for config in space], {}), builds)
    search = Search(LEAN, H200, Plan(1e9, problems=4, every_candidate=True), Silent())
    stopped = search.run([pair], World(), no_ranking, 1e12)
    outcome = search.finish([pair], stopped, Here())[0]
    whole = to_family(outcome, LEAN, H200, "measured", "latency", "2026-01-01T00:00:00+00:00", {})
    few = to_family(outcome, LEAN, H200, "predicted", "latency", "2026-01-01T00:00:00+00:00", {})
    assert (whole.source, few.source) == ("measured", "predicted")
    assert whole.problems == few.problems
    for tuned in few.problems:
        assert tuned.heuristic in [timed.candidate for timed in tuned.timed]
    assert [few.candidates[index].config for index in few.shortlist] == outcome.shortlist


def taken(spilled: int) -> LaunchResources:
    return LaunchResources("lean", 128, 4, 128, 60_000, spilled)


def test_spilled_registers_cost_time():
    problem = FAMILY.problem(8, 4096)
    # 8 output tiles of 64 LeanTiles on 128 CTAs: 4 LeanTiles each.
    moved_bytes = 4 * 128 * 2 * 4 * 40
    expected_us = moved_bytes / 128 / H200.boost_clock_mhz
    assert spill_us(problem, CONFIG, taken(40), (TRITON, H200)) == pytest.approx(expected_us)
    assert spill_us(problem, CONFIG, taken(0), (TRITON, H200)) == 0


def test_the_ranking_prefers_what_spills_less():
    problem = FAMILY.problem(8, 4096)
    configs = [CONFIG, replace(CONFIG, num_stages=2), replace(CONFIG, num_stages=4)]
    job = builds_of(FAMILY)[CONFIG.build_key].job
    rank = model_ranker(TRITON, H200, Here())
    kept = {config.build_key: Build(job, (taken(0),)) for config in configs}
    spills = kept | {configs[1].build_key: Build(job, (taken(40),))}
    before, after = (rank(problem, configs, builds) for builds in (kept, spills))
    added = [late - early for early, late in zip(before, after, strict=True)]
    assert added == pytest.approx([0, spill_us(problem, configs[1], taken(40), (TRITON, H200)), 0])


def test_what_cannot_run_fails_in_a_prediction():
    """A heuristic's build is an example, because it is no candidate."""
    problem = FAMILY.problem(8, 4096)
    configs = [replace(CONFIG, num_stages=stages) for stages in (2, 3, 4, 5)]
    keys = [config.build_key for config in configs]
    job = builds_of(FAMILY)[CONFIG.build_key].job
    builds = {
        keys[0]: Build(job, (taken(186),)),
        keys[1]: Build(job, failure="ValueError: no"),
        keys[2]: Build(job, (replace(taken(0), shared_bytes=230 * 1024),)),
        keys[3]: Build(job, (replace(taken(0), num_warps=16, registers_per_thread=255),)),
    }
    watch = ModelStopwatch(model_ranker(TRITON, H200, Here()), {FAMILY: builds}, H200)
    result = watch.time(problem, configs)
    assert [*result.times] == configs[:1]
    assert [*result.failures] == configs[1:]
    assert result.failures[configs[1]] == "does not compile: ValueError: no"


#: A GPU of each compute capability; the others are of deep runs.
ALWAYS = {gpu.compute_capability: gpu for gpu in CATALOGUE}.values()


@pytest.mark.parametrize(
    "spec", [gpu if gpu in ALWAYS else deep(gpu) for gpu in CATALOGUE], ids=lambda gpu: gpu.name
)
def test_every_gpu_of_the_catalogue_is_tuned(spec, monkeypatch):
    """One of three families spills, and one has no build that fits; tests/run compiles."""
    spills, small, large = FamilyKey(256, 8), FamilyKey(256, 1), FamilyKey(256, 4)

    def build(job, capability):
        assert capability == spec.compute_capability
        group = job.problem.group_size
        shared_kb = spec.shared_kb_per_cta + 1 if group == large.group_size else 40
        spilled = 40 if group == spills.group_size else 0
        warps = job.config.num_warps
        return Build(
            job, (LaunchResources("lean", spec.sms, warps, 128, shared_kb * 1024, spilled),)
        )

    def build_all(jobs, capability, pool, on_build):
        return [build(job, capability) for job in jobs]

    for module in (fits, result):
        monkeypatch.setattr(module, "_SAMPLED_PROBLEMS", 4)
    monkeypatch.setattr(search, "build_all", build_all)
    monkeypatch.setattr(search, "build", build)
    monkeypatch.setattr(run, "process_pool", lambda preload: contextlib.nullcontext(Here()))
    plan = Plan(math.inf, problems=1, every_candidate=True, predicted=True)
    request = Request(LEAN, [spills, large, small], Target(spec, None), plan)
    tuned = tune(request, Silent())
    assert [summary.family for summary, _ in tuned.families] == [spills, small]
    assert [summary.spilled for summary, _ in tuned.families] == [[40], []]
    assert {*tuned.left_out} == {large}
    for summary, family in tuned.families:
        assert family.source == "predicted"
        assert family.candidates[family.problems[0].chosen].config
        assert summary.gain >= 1
