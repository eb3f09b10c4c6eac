from __future__ import annotations

from dataclasses import replace

import pytest

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.model.error import model_error
from leanbench.model.predict import predict_latency_us
from leanbench.paper.claim import SAMPLES
from leanbench.paper.claims import claims
from leanbench.paper.predicted import SINGLE_STAGE, evaluate

A100 = find("a100-80gb")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims but for the two means of 500 samples, which take seconds."""
    chosen = tuple(claim for claim in claims() if len(claim.problems) < SAMPLES)
    monkeypatch.setattr("leanbench.paper.predicted.claims", lambda: chosen)


def test_every_figure_is_there() -> None:
    assert {claim.figure for claim in claims()} == {
        *"abstract 3 4 7a 7b 7c 8a 8b 8c text 9 10 11 13".split()
    }
    assert claims() == claims()
    samples = next(
        claim.problems
        for claim in claims()
        if claim.statistic == "mean" and len(claim.problems) == SAMPLES
    )
    assert max(problem.kv_bytes for problem in samples) < 60e9
    assert len({problem.q_heads for problem in samples}) == 7


def test_ragged_batches_get_more_uneven() -> None:
    of_figure = [claim for claim in claims() if claim.figure == "11" and claim.of == "FD"]
    assert [claim.problems[0].batch for claim in of_figure] == [8, 16, 32]
    for claim in of_figure:
        shares = [
            problem.total_context / problem.batch / problem.max_context
            for problem in claim.problems
        ]
        assert shares == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2], abs=1e-4)


@pytest.mark.usefixtures("few")
def test_outcomes_are_ratios_of_predictions() -> None:
    outcomes = {(outcome.claim.figure, outcome.claim.words): outcome for outcome in evaluate(A100)}
    outcome = outcomes["7a", "LA over FA2 at 512k"]
    [problem] = outcome.claim.problems
    lean, fa2 = kernel("lean"), kernel("fa2")
    lean_config = lean.default_config(problem, A100)
    fa2_config = fa2.default_config(problem, A100)
    assert lean_config is not None
    assert fa2_config is not None
    lean_us = predict_latency_us(problem, lean, lean_config, A100)
    fa2_us = predict_latency_us(problem, fa2, fa2_config, A100)
    single_stage_us = predict_latency_us(problem, fa2, SINGLE_STAGE, A100)
    assert outcome.predicted.value == pytest.approx(fa2_us / lean_us)
    error = model_error("a100-80gb", ["fa2", "lean"])
    assert 0 < error < 0.2
    assert outcome.predicted.high == pytest.approx(fa2_us / lean_us * (1 + error))
    assert outcome.predicted.low == pytest.approx(fa2_us / lean_us / (1 + error))
    assert outcome.single_stage is not None
    assert outcome.single_stage.value == pytest.approx(single_stage_us / lean_us)
    assert outcome.claim.paper_words == "2.46x"
    assert (
        outcomes["7a", "LA over FA2 past 8k, 56 heads, batch 1, head_dim 64"].claim.paper_words
        == "≥ 2.00x"
    )
    fd = outcomes["text", "LA over FD, lowest: 24 heads, 1k"]
    assert fd.single_stage is None
    occupancy = outcomes["4", "occupancy of FA2 is low"].predicted
    # The schedule's own: nothing is modelled.
    assert 0 < occupancy.low == occupancy.value == occupancy.high < 0.6


@pytest.mark.usefixtures("few")
def test_another_gpu_another_figure() -> None:
    def at_512k(spec: GpuSpec) -> float:
        return next(
            outcome.predicted.value
            for outcome in evaluate(spec)
            if outcome.claim.words == "LA over FA2 at 512k"
        )

    # With the H200's bandwidth 56 SMs are further from enough.
    assert at_512k(replace(A100, bandwidth_tb_s=4.8)) > 1.3 * at_512k(A100)
