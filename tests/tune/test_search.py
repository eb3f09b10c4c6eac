"""The search on a fake GPU with known true latencies."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import pytest
from leanbench.kernels.lean.configs import BuildKey
from world import H200, LEAN, TRITON, Here, Silent, World, builds_of, no_ranking, true_us

from leanbench.compile.build import Build
from leanbench.configs.space import Candidate, FamilyKey, distinct
from leanbench.configs.tuned import LEAST_GAIN
from leanbench.core.errors import UserError
from leanbench.core.kernel import LaunchResources
from leanbench.core.registry import kernel
from leanbench.tune import search as search_module
from leanbench.tune.fits import Fitter, Trial, held_out, least_gain
from leanbench.tune.plan import PROBLEMS, Plan, Progress
from leanbench.tune.problems import problems
from leanbench.tune.result import cost_of, geometric_mean, summarise, ties, to_family
from leanbench.tune.search import NothingToTune, Search
from leanbench.tune.stopwatch import Time

FAMILY = FamilyKey(128, 4)


def compiled(family=FAMILY, tuned=LEAN):
    builds = builds_of(family, tuned)
    space = tuned.tuning_space(family.problem(8, 4096), H200)
    able = [Candidate(config, config.build_key) for config in space]
    return Progress(family, able, {}), builds


def run(world, problems=PROBLEMS, family=FAMILY, tuned=LEAN):
    search = Search(tuned, H200, Plan(1e9, problems=problems), Silent())
    pairs = [compiled(family, tuned)]
    stopped = search.run(pairs, world, no_ranking, 1e12)
    return search.finish(pairs, stopped, Here())[0]


@pytest.fixture(scope="module")
def world():
    """Return the timings of `outcome`."""
    return World()


@pytest.fixture(scope="module")
def outcome(world):
    return run(world)


@pytest.fixture(scope="module")
def triton_outcome():
    """Return a search of the implementation with a formula."""
    return run(World(), tuned=TRITON)


def test_the_choice_is_near_the_best_where_nothing_was_timed(triton_outcome):
    outcome = triton_outcome
    fitter = Fitter(TRITON, H200)
    shares, heuristic = [], []
    for problem in islice(problems(FAMILY, H200), 60, 100):
        assert problem not in outcome.progress.times
        launches = distinct(outcome.progress.able, problem, TRITON, H200)
        best_us = min(true_us(problem, launch.config) for launch in launches)
        chosen = min(
            outcome.shortlist, key=lambda config: fitter.predict_us(outcome.fits, problem, config)
        )
        shares.append(best_us / true_us(problem, chosen))
        heuristic.append(best_us / true_us(problem, TRITON.default_config(problem, H200)))
    assert geometric_mean(shares) > 0.985
    assert min(shares) > 0.92
    # The task is not trivial.
    assert geometric_mean(heuristic) < 0.97


@pytest.mark.deep
def test_it_says_how_good_the_choice_is(outcome, triton_outcome):
    assert geometric_mean([trial.formula for trial in triton_outcome.trials]) > 0.97
    summary = summarise(outcome, LEAN, H200, cost_of("latency"))
    assert summary.problems == PROBLEMS
    assert summary.gain > 1.03
    assert summary.most_gain >= summary.gain
    assert summary.median_error < 0.02
    assert 0.95 < summary.untried <= 1
    fastest = [
        min(times, key=lambda config: times[config].latency_us)
        for times in outcome.progress.times.values()
    ]
    assert summary.cuda == sum(config.implementation == "cuda" for config in fastest) > 0
    assert (
        sum(summary.tile_tokens.values())
        == sum(config.implementation == "triton" for config in fastest)
        > 0
    )
    assert outcome.stopped == "all 24 problems were timed"


@pytest.mark.deep
@pytest.mark.usefixtures("outcome")
def test_fewer_candidates_are_timed_once_the_formula_knows(world):
    counts = [len(configs) for _, configs in world.calls]
    # They can include the heuristic's choice and Triton's.
    assert all(64 <= count <= 66 for count in counts[:5])
    assert all(24 <= count <= 28 for count in counts[5:])
    assert max(counts[5:]) > 26


@pytest.mark.usefixtures("outcome")
def test_each_implementation_has_its_share_and_its_heuristic(world):
    for number, (problem, configs) in enumerate(world.calls):
        heuristics = [
            kernel(name).default_config(problem, H200) for name in ("lean_cuda", "lean_triton")
        ]
        for config, heuristic in zip(configs, heuristics, strict=False):
            assert heuristic is not None
            same = [Candidate(launched, launched.build_key) for launched in (config, heuristic)]
            assert len(distinct(same, problem, LEAN, H200)) == 1
        for implementation in ("cuda", "triton"):
            share = sum(config.implementation == implementation for config in configs)
            assert share >= (32 if number < 5 else 6)


@pytest.mark.deep
def test_every_candidate_is_timed_where_that_is_asked():
    world = World()
    search = Search(LEAN, H200, Plan(1e9, problems=7, every_candidate=True), Silent())
    search.run([compiled()], world, no_ranking, 1e12)
    assert len(world.calls) == 7
    for problem, configs in world.calls:
        launches = {
            candidate.config for candidate in distinct(compiled()[0].able, problem, LEAN, H200)
        }
        assert launches <= set(configs)


@pytest.mark.deep
def test_a_candidate_that_fails_leaves_with_its_build_and_a_reason():
    world = World(fails=lambda config: config.tile_tokens == 256)
    result = run(world)
    assert {config.tile_tokens for config in result.progress.left_out} == {256}
    assert all(config.tile_tokens != 256 for config in result.shortlist)
    failed: set[BuildKey] = set()
    for _, configs in world.calls:
        assert failed.isdisjoint(config.build_key for config in configs)
        failed |= {config.build_key for config in configs if config.tile_tokens == 256}
    assert failed


@pytest.mark.deep
def test_what_fails_later_is_not_chosen_earlier():
    failing = []

    def fails(config):
        return config.implementation == "triton" and config.tile_tokens == 128 and len(failing) > 3

    world = World(fails=fails)
    timed = world.time
    world.time = lambda problem, configs: failing.append(problem) or timed(problem, configs)
    result = run(world, problems=8)
    times = [config for launches in result.progress.times.values() for config in launches]
    assert {config.tile_tokens for config in times if config.implementation == "triton"} == {
        64,
        256,
    }
    assert {config.tile_tokens for config in times if config.implementation == "cuda"} == {128}
    assert all("out of shared memory" in reason for reason in result.progress.left_out.values())
    space = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)
    ruled_out = [
        config
        for config in space
        if config.implementation == "triton" and config.tile_tokens == 128
    ]
    assert set(result.progress.left_out) == set(ruled_out)


def test_nothing_runs():
    with pytest.raises(NothingToTune) as error:
        run(World(fails=lambda config: True))
    assert error.value.product == "NVIDIA H200"
    assert {**error.value.left_out} == {FAMILY: "nothing could be timed: out of shared memory"}


def test_a_family_of_which_nothing_runs_leaves_the_others():
    other, family = FamilyKey(256, 8), FamilyKey(256, 4)

    class OneFails(World):
        def time(self, problem, configs):
            self.fails = lambda config: problem.group_size == 8
            return super().time(problem, configs)

    world = OneFails()
    search = Search(TRITON, H200, Plan(1e9, problems=6), Silent())
    pairs = [compiled(other, TRITON), compiled(family, TRITON)]
    assert search.run(pairs, world, no_ranking, 1e12) == "all 6 problems were timed"
    assert search.left_out == {other: "nothing could be timed: out of shared memory"}
    # After every launch has failed, no further one of the family is tried.
    assert sum(problem.group_size == 8 for problem, _ in world.calls) < 6
    (outcome,) = search.finish(pairs, "", Here())
    assert outcome.progress.family == family


def resources_of(job, shared_kb: int = 60, spilled: int = 0) -> LaunchResources:
    return LaunchResources("lean", 132, job.config.num_warps, 128, shared_kb * 1024, spilled)


@pytest.fixture
def builds(monkeypatch):
    """Return a function that sets the build of a job."""

    def set_build(make):
        def build_all(jobs, capability, pool, on_build):
            return [make(job) for job in jobs]

        monkeypatch.setattr(search_module, "build_all", build_all)

    return set_build


def test_a_family_whose_builds_do_not_fit_leaves_the_others(builds):
    def build(job):
        large = job.problem.group_size == 8
        return Build(job, (resources_of(job, shared_kb=230 if large else 60),))

    builds(build)
    search = Search(TRITON, H200, Plan(1e9), Silent())
    ((progress, _),) = search.compile([FamilyKey(128, 8), FAMILY], Here())
    assert progress.family == FAMILY
    assert search.left_out == {
        FamilyKey(128, 8): ("no candidate can run: takes 230 KB of shared memory, a CTA has 227 KB")
    }


def test_no_family_compiles(builds):
    builds(lambda job: Build(job, failure="ValueError: no such instruction"))
    search = Search(TRITON, H200, Plan(1e9), Silent())
    with pytest.raises(NothingToTune) as error:
        search.compile([FAMILY], Here())
    (why,) = error.value.left_out.values()
    assert why == "no candidate can run: does not compile: ValueError: no such instruction"


def test_builds_that_spill_are_candidates(builds):
    builds(lambda job: Build(job, (resources_of(job, spilled=40),)))
    family = FamilyKey(256, 4)
    search = Search(TRITON, H200, Plan(1e9, problems=2), Silent())
    pairs = search.compile([family], Here())
    ((progress, _),) = pairs
    space = TRITON.tuning_space(family.problem(8, 4096), H200)
    assert {candidate.config for candidate in progress.able} | {*progress.left_out} == {*space}
    assert all("CTAs to an SM" in why for why in progress.left_out.values())
    (outcome,) = search.finish(pairs, search.run(pairs, World(), no_ranking, 1e12), Here())
    assert summarise(outcome, TRITON, H200, cost_of("latency")).spilled == [40] * 2


def test_the_budget_ends_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(search_module.time, "monotonic", lambda: now[0])

    class Slow(World):
        def time(self, problem, configs):
            now[0] += 1.0
            return super().time(problem, configs)

    world = Slow()
    search = Search(LEAN, H200, Plan(15.0), Silent())
    stopped = search.run([compiled()], world, no_ranking, 1e12)
    assert len(world.calls) == 11
    assert stopped == "the budget of 15 s was spent after 11 of 24 problems"


def test_too_small_a_budget_says_what_it_needs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(search_module.time, "monotonic", lambda: now[0])

    class Slow(World):
        def time(self, problem, configs):
            now[0] += 1.0
            return super().time(problem, configs)

    search = Search(LEAN, H200, Plan(6.0), Silent())
    with pytest.raises(
        UserError,
        match=(
            r"--budget 6s is too small: after 2 s 2 problems are timed, .* 5 problems of each .*"
            r" 10 s"
        ),
    ):
        search.run([compiled()], Slow(), no_ranking, 1e12)


@pytest.mark.deep
def test_what_was_timed_before_is_not_timed_again():
    first, plan = World(), Plan(1e9, problems=12)
    Search(LEAN, H200, plan, Silent()).run([compiled()], first, no_ranking, 1e12)
    search = Search(LEAN, H200, plan, Silent())
    progress, builds = compiled()
    for problem, configs in first.calls[:5]:
        search.take_up(progress, problem, World().time(problem, configs).times)
    # Timings without the heuristic's current settings are useless.
    problem, configs = first.calls[5]
    search.take_up(progress, problem, World().time(problem, configs[1:]).times)
    second = World()
    search.run([(progress, builds)], second, no_ranking, 1e12)
    assert [problem for problem, _ in second.calls] == [problem for problem, _ in first.calls[5:]]
    assert len(progress.heuristic) == 12


@pytest.mark.deep
def test_the_heuristic_is_always_timed(outcome):
    for problem, times in outcome.progress.times.items():
        heuristic = outcome.progress.heuristic[problem]
        assert heuristic in times
        same = Candidate(heuristic, heuristic.build_key)
        default = LEAN.default_config(problem, H200)
        assert default is not None
        assert (
            len(distinct([same, Candidate(default, default.build_key)], problem, LEAN, H200)) == 1
        )


@pytest.mark.deep
def test_held_out_problems_are_not_fitted_to(triton_outcome):
    trials = triton_outcome.trials
    assert len(trials) == len(triton_outcome.progress.times)
    assert min(trial.formula for trial in trials) > 0.9
    assert all(
        trial.gain is None or trial.gain > 0
        for trial in trials
        if trial.formula > trial.heuristic * 1.02
    )
    assert held_out(TRITON, H200, {}, {}) == []


def test_the_formula_is_believed_as_far_as_it_was_right():
    """By hand: it gains 10% if it promises 10%, and loses 5% if it promises 2%."""
    right, wrong = Trial(1.0, 0.9, 0.1), Trial(0.95, 1.0, 0.02)
    assert least_gain([]) == LEAST_GAIN
    assert least_gain([right]) == LEAST_GAIN
    assert least_gain([right, wrong]) == 0.03
    assert least_gain([wrong, Trial(0.9, 1.0, 0.1)]) == 0.12
    assert least_gain([right, Trial(0.9, 1.0, None)]) == LEAST_GAIN
    assert Trial(0.9, 1.0, None).share(LEAST_GAIN) == 1.0
    assert [right.share(0.1), right.share(0.11)] == [1.0, 0.9]


def test_ties_are_intervals_that_overlap():
    configs = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)[:4]
    readings = [Time(10, 9.9, 10.1), Time(10.05, 10, 10.2), Time(10.3, 10.2, 10.4), Time(12)]
    times = dict(zip(configs, readings, strict=True))
    assert ties(times) == configs[:2]


def test_what_is_saved(outcome):
    family = to_family(
        outcome, LEAN, H200, "measured", "latency", "2026-01-01T00:00:00+00:00", {"triton": "3.6.0"}
    )
    assert (family.head_dim, family.group_size, family.source) == (128, 4, "measured")
    assert len(family.problems) == 24
    for saved, (problem, times) in zip(
        family.problems, outcome.progress.times.items(), strict=True
    ):
        assert saved.batch * saved.kv_heads == problem.batch * problem.kv_heads
        written = {family.candidates[timed.candidate].config for timed in saved.timed}
        assert {outcome.progress.heuristic[problem], *ties(times)} <= written
        assert {config.implementation for config in written} == {"triton", "cuda"}
        assert saved.timed[0].candidate == saved.chosen
        assert saved.chosen in saved.ties
        fastest = min(times.values(), key=lambda time: time.latency_us)
        assert saved.timed[0].latency_us == pytest.approx(fastest.latency_us, abs=5e-4)
    assert [family.candidates[index].config for index in family.shortlist] == outcome.shortlist
    for index in family.shortlist:
        build = family.candidates[index].build
        assert build is not None
        config = family.candidates[index].config
        # Files have six digits.
        assert asdict(family.builds[build].coefficients) == pytest.approx(
            asdict(outcome.fits[config.build_key].coefficients), rel=1e-5
        )


def test_energy_chooses_by_power_times_latency(outcome):
    power = {key: 0.5 if 64 in key.settings else 5.0 for key in outcome.builds}
    energy = to_family(
        outcome, LEAN, H200, "measured", "energy", "2026-01-01T00:00:00+00:00", {}, power
    )
    assert {
        energy.candidates[problem.chosen].config.tile_tokens for problem in energy.problems
    } == {64}
    assert {build.power_kw for build in energy.builds} == {0.5, 5.0}
