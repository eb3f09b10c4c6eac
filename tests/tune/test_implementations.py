"""Two implementations tuned together: the choice of each problem, and the use of the file by each
alone.
"""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
from depth import deep
from tuned_examples import FROM, LARGE, PROBLEM, family, tuned
from world import H200, LEAN, Here, Silent, World, builds_of, cuda_where_small_us, no_ranking

from leanbench.configs import lookup
from leanbench.configs.lookup import Choice, choose
from leanbench.configs.space import Candidate, FamilyKey, distinct
from leanbench.configs.store import save_families
from leanbench.configs.tuned import Family
from leanbench.configs.tuned_file import read
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.tune.plan import Outcome, Plan, Progress
from leanbench.tune.problems import problems
from leanbench.tune.result import to_family
from leanbench.tune.search import Search

FAMILY = FamilyKey(128, 4)
TRITON, CUDA = kernel("lean_triton"), kernel("lean_cuda")
#: Implementations that each of a file's kernels can launch.
TAKES = {LEAN: ("triton", "cuda"), TRITON: ("triton",), CUDA: ("cuda",)}
#: K and V of problems clearly on one side of the size at which CUDA C++ and Triton are equal.
SMALL_BYTES, LARGE_BYTES = 15e6, 120e6


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    space = LEAN.tuning_space(FAMILY.problem(8, 4096), H200)
    pair = (
        Progress(FAMILY, [Candidate(config, config.build_key) for config in space], {}),
        builds_of(FAMILY),
    )
    search = Search(LEAN, H200, Plan(1e9), Silent())
    stopped = search.run([pair], World(noise=0.0, truth=cuda_where_small_us), no_ranking, 1e12)
    return search.finish([pair], stopped, Here())[0]


@pytest.fixture(scope="module")
def both(outcome: Outcome) -> Family:
    return to_family(
        outcome, LEAN, H200, "measured", "latency", "2026-11-21T09:30:00+00:00", {"triton": "3.6.0"}
    )


def unseen() -> list[AttentionProblem]:
    """Return problems no larger than those of the tuning."""
    most_kv_heads = max(
        problem.batch * problem.kv_heads for problem in islice(problems(FAMILY, H200), 24)
    )
    return [
        problem
        for problem in islice(problems(FAMILY, H200), 60, 90)
        if problem.batch * problem.kv_heads <= most_kv_heads
    ]


@cache
def fastest_us(problem: AttentionProblem, implementation: str | None) -> float:
    space = [Candidate(config, config.build_key) for config in LEAN.tuning_space(problem, H200)]
    launches = [candidate.config for candidate in distinct(space, problem, LEAN, H200)]
    return min(
        cuda_where_small_us(problem, config)
        for config in launches
        if config.implementation == implementation
    )


@pytest.mark.deep
def test_cuda_is_chosen_on_small_problems_and_triton_on_large_ones(home, both):
    save_families(H200, [both])
    seen = set()
    # Timed problems: others run with the heuristic's implementation.
    for problem in islice(problems(FAMILY, H200), 24):
        choice = choose(LEAN, problem, H200)
        assert choice.config is not None
        if problem.kv_bytes < SMALL_BYTES:
            assert choice.config.implementation == "cuda", problem
        if problem.kv_bytes > LARGE_BYTES:
            assert choice.config.implementation == "triton", problem
        seen.add(choice.config.implementation)
        best_us = min(fastest_us(problem, implementation) for implementation in ("triton", "cuda"))
        assert cuda_where_small_us(problem, choice.config) <= 1.03 * best_us
    assert seen == {"triton", "cuda"}


def test_the_two_sides_of_that_world_differ():
    """Otherwise the test above could not fail."""
    for problem in unseen():
        ratio = fastest_us(problem, "cuda") / fastest_us(problem, "triton")
        if problem.kv_bytes < SMALL_BYTES:
            assert ratio < 0.95
        if problem.kv_bytes > LARGE_BYTES:
            assert ratio > 1.02


@pytest.mark.parametrize("lean", [LEAN, deep(TRITON), deep(CUDA)], ids=lambda kernel: kernel.name)
def test_each_kernel_gets_the_best_of_what_it_takes(home, outcome, both, lean):
    saved = save_families(H200, [both])
    assert read(saved.path).families == [both]
    for problem, times in outcome.progress.times.items():
        choice = choose(lean, problem, H200)
        assert choice.config is not None
        own = {config: times[config] for config in times if config.implementation in TAKES[lean]}
        fastest = min(own, key=lambda config: own[config].latency_us)
        latency_us = cuda_where_small_us(problem, choice.config)
        assert latency_us == pytest.approx(own[fastest].latency_us, rel=1e-9), choice
        assert (
            f"timed at {problem.batch * problem.kv_heads} x {problem.max_context} tokens"
            in choice.why
        )
    for problem in unseen():
        choice = choose(lean, problem, H200)
        assert choice.config is not None
        assert choice.config.implementation in TAKES[lean]
        if lean is TRITON:
            best_us = fastest_us(problem, "triton")
            assert cuda_where_small_us(problem, choice.config) <= 1.03 * best_us
        else:
            # For CUDA C++, the heuristic is assumed better than the formula.
            assert choice.config == lean.default_config(problem, H200)
            assert choice.why.endswith(": this size was not timed")


@pytest.mark.deep
def test_gains_are_counted_against_the_kernels_own_heuristic(home, outcome, both):
    save_families(H200, [both])
    gains = dict.fromkeys(TAKES, 0)
    for problem, times in outcome.progress.times.items():
        heuristic = outcome.progress.heuristic[problem]
        assert heuristic.implementation == "cuda"
        for lean in TAKES:
            choice = choose(lean, problem, H200)
            if "faster than the heuristic" not in choice.why:
                continue
            gains[lean] += 1
            assert choice.config is not None
            # Rounded as in files.
            chosen_us = round(times[choice.config].latency_us, 3)
            heuristic_us = round(times[heuristic].latency_us, 3)
            gain = 1 - chosen_us / heuristic_us
            assert f", {gain:.1%} faster than the heuristic" in choice.why
    # The problem's heuristic chose CUDA C++, so Triton's gain is unknown.
    assert gains[TRITON] == 0
    assert min(gains[LEAN], gains[CUDA]) > 5


def test_without_what_launches_cuda_triton_is_looked_up(home, both, monkeypatch):
    save_families(H200, [both])
    small = next(problem for problem in unseen() if problem.kv_bytes < SMALL_BYTES)
    timed = next(problems(FAMILY, H200))
    for problem in (small, timed):
        choice = choose(LEAN, problem, H200)
        assert choice.config is not None
        assert choice.config.implementation == "cuda"
    monkeypatch.setattr(type(CUDA), "unavailable_reason", lambda self: "there is no NVRTC")
    lookup._entry.cache_clear()
    for problem in (small, timed):
        choice = choose(LEAN, problem, H200)
        assert choice.config is not None
        assert choice.config.implementation == "triton"
        assert choice.config == choose(TRITON, problem, H200).config
    lookup._entry.cache_clear()


def test_a_file_from_before_cuda_does_not_override_its_heuristic(ship):
    """Such timings did not include the heuristic's settings."""
    ship(family(10.0, 1.0, problems=[tuned(4096)]))
    heuristic = LEAN.default_config(PROBLEM, H200)
    assert heuristic is not None
    assert heuristic.implementation == "cuda"
    why = f"{FROM}, shipped: this size was not timed"
    # The first was timed, the second was not.
    for problem in (PROBLEM, FAMILY.problem(8, 8192)):
        expected = Choice(LEAN.default_config(problem, H200), "heuristic", why)
        assert choose(LEAN, problem, H200) == expected
        assert choose(CUDA, problem, H200).how == "heuristic"
        assert choose(TRITON, problem, H200).config == LARGE


def test_an_old_file_counts_where_the_heuristic_is_triton(ship, monkeypatch):
    monkeypatch.setattr(type(CUDA), "unavailable_reason", lambda self: "there is no NVRTC")
    ship(family(problems=[tuned(4096)]))
    why = f"{FROM}, shipped: timed at 8 x 4096 tokens, 10.0% faster than the heuristic"
    assert choose(LEAN, PROBLEM, H200) == Choice(LARGE, "tuned", why)
