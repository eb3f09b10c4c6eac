"""Check of the settings with a fake stopwatch: shares computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_watch import FakeWatch
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.kernels.lean.cuda_cost import Costs
from leanbench.kernels.lean.cuda_settings import chosen, for_any_length, ranked
from timed_examples import (
    H200,
    LATENT,
    MODELS,
    OTHERS,
    OTHERS_OF_LATENT,
    PROBLEM,
    RULES,
    SERVED,
    timed,
)

from leanbench.configs.store import save
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.tune import search
from leanbench.tune.check import Checked, call_of, check
from leanbench.tune.search import Request, first_candidates

A, B, C, D = OTHERS
#: Two fills of one cache.
LONG = replace(SERVED, batch=2)
SHORT = replace(LONG, context=(100, 100), capacity=4096)


def checked(us: Any, *fills: AttentionProblem) -> tuple[Checked | None, FakeWatch]:
    watch: Any = FakeWatch(us)
    return check(Request(H200, 0), fills, watch), watch


def test_the_share_of_one_length(home):
    """The settings reach 9 us of 8 us, the model 12 us."""
    save(H200, [timed(10.0, 9.0)])
    times = {MODELS: 12.0, A: 9.0, B: 8.0}
    one, watch = checked(lambda problem, config: times.get(config, 20.0), PROBLEM)
    assert one is not None
    assert (one.choice.how, one.choice.config, one.model, one.best) == ("tuned", A, MODELS, B)
    assert one.share() == pytest.approx(8 / 9)
    assert one.share("model") == pytest.approx(8 / 12)
    assert one.share_of_fills == pytest.approx(8 / 9)
    everything = first_candidates(PROBLEM, H200, None)
    (kept,) = one.timed
    assert kept.problem == PROBLEM
    assert kept.costs == {config: times.get(config, 20.0) for config in everything}
    # The finalists are timed again, with the choice and the model's.
    (first, again) = watch.timed
    assert set(first[1]) == set(everything)
    assert again[1][:2] == (A, MODELS)
    assert set(again[1]) >= {A, B, MODELS}
    assert len(again[1]) < 12
    predicted = dict(ranked(PROBLEM, H200, Costs()))[A]
    assert one.predicted_us == pytest.approx(predicted)
    assert one.to_dict() == {
        "how": "tuned",
        "why": "timed 2026-11-28 on NVIDIA H200, yours: 8 tiles d128 g4 2 B HND, 4096 tokens",
        "chosen": A.to_dict(),
        "best": B.to_dict(),
        "timed": [kept.to_dict()],
        "us": {"chosen": [9.0], "model": [12.0], "best": [8.0]},
        "fastest_us": [8.0],
        "predicted_us": one.predicted_us,
        "share": 0.8889,
        "model_share": 0.6667,
    }


def test_the_shares_of_fills(home):
    """Means of 10 and 10 us for the choice, 16 and 4 us for the best: 0.8. Each fill's best: 8 and
    4 us.
    """
    call = for_any_length(LONG)
    model, best, of_long = first_candidates(call, H200, 3)
    assert model == chosen(call, H200)
    times: dict[LeanConfig, tuple[float, float]] = {
        model: (10.0, 10.0),
        best: (16.0, 4.0),
        of_long: (8.0, 40.0),
    }
    one, watch = checked(
        lambda problem, config: times.get(config, (99.0, 99.0))[problem is SHORT], LONG, SHORT
    )
    assert one is not None
    assert (one.choice.how, one.choice.config, one.best) == ("heuristic", model, best)
    assert one.share() == one.share("model") == pytest.approx(0.8)
    assert one.share_of_fills == pytest.approx((8 * 4) ** 0.5 / 10)
    assert one.fastest_us == [8.0, 4.0]
    assert [problem for problem, _ in watch.timed] == [LONG, SHORT] * 2
    assert one.predicted_us is not None
    assert 2 < one.predicted_us < 40


def test_the_share_of_a_latent_call(home):
    """The rules reach 20.4 us of 15.6 us, which no model predicts."""
    best = OTHERS_OF_LATENT[2]
    us: dict[Any, float] = {RULES: 20.4, best: 15.6}
    one, watch = checked(lambda problem, config: us.get(config, 30.0), LATENT)
    assert one is not None
    assert (one.choice.how, one.choice.config, one.model) == ("heuristic", RULES, RULES)
    assert one.best == best
    assert one.share() == pytest.approx(15.6 / 20.4)
    assert one.predicted_us is None
    assert set(watch.timed[0][1]) == {RULES, *OTHERS_OF_LATENT}


@pytest.mark.parametrize("fails", [MODELS, B], ids=["the choice", "another"])
def test_a_candidate_that_fails(home, fails):
    one, _ = checked(lambda problem, config: "it spills" if config == fails else 5.0, PROBLEM)
    if fails == MODELS:
        assert one is None
    else:
        assert one is not None
        assert len(one.timed[0].costs) == len(first_candidates(PROBLEM, H200, None)) - 1


def test_a_choice_of_another_kernel_has_no_prediction(home):
    watch: Any = FakeWatch(lambda problem, config: 5.0)
    one = check(Request(find("a100"), 0), [PROBLEM], watch)
    assert one is not None
    assert one.predicted_us is None
    assert one.share() == 1.0


def test_every_candidate_is_compiled_once(monkeypatch):
    jobs: list[Any] = []
    monkeypatch.setattr(search, "build_all", lambda wanted, *given: jobs.extend(wanted))
    pool: Any = None
    calls = [[LONG, SHORT], [replace(LONG, batch=3)], [PROBLEM]]
    search.compile_calls(Request(H200, 0, candidates=None), map(call_of, calls), pool)
    keys = [(job.problem.lengths_on, job.config.build_key) for job in jobs]
    assert len(set(keys)) == len(keys)
    assert {key for on, key in keys if on == "device"} == {
        config.build_key for config in first_candidates(LONG, H200, None)
    }
