"""The shipped sweeps of the paper's figures ask what its claims are about."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from leanbench.core.problem import AttentionProblem
from leanbench.paper.claim import BASELINES, OWN
from leanbench.paper.claims import claims
from leanbench.run.cells import expand
from leanbench.run.sweep_file import load_sweep


def problems(sweep: str) -> list[AttentionProblem]:
    return list(dict.fromkeys(cell.problem for cell in expand(load_sweep(sweep))))


def by_lengths(of: Iterable[AttentionProblem]) -> set[AttentionProblem]:
    """Return problems with a length for each sequence, also where all are equal."""
    return {replace(problem, context=problem.contexts) for problem in of}


@pytest.mark.parametrize(
    "figure", ["3", "4", "7a", "7b", "7c", "8a", "8b", "8c", "9", "10", "11", "13"]
)
def test_a_figures_sweep_holds_the_problems_of_its_claims(figure):
    claimed = [claim for claim in claims() if claim.figure == figure]
    sweep = load_sweep(f"paper-fig{figure}")
    assert claimed
    asked = by_lengths(problem for claim in claimed for problem in claim.problems)
    assert asked <= by_lengths(problems(sweep.name))
    needed = [name for claim in claimed for name in OWN.kernels(claim) + FLASHINFER.kernels(claim)]
    assert {*needed} <= {*sweep.kernels}


IN_TORCH = next(baselines for baselines in BASELINES if baselines.fd == "torch_flash")
FLASHINFER = next(baselines for baselines in BASELINES if baselines.flashinfer)


@pytest.mark.parametrize("sweep", ["paper-500", "paper-claims", "paper-fig7a", "paper-fig13"])
def test_the_libraries_run_next_to_this_projects_baselines(sweep):
    claimed = [claim for claim in claims() if sweep in claim.sweeps]
    assert any(FLASHINFER.kernels(claim) for claim in claimed)
    for baselines in (OWN, IN_TORCH, FLASHINFER):
        names = {name for claim in claimed for name in baselines.kernels(claim)}
        assert names <= set(load_sweep(sweep).kernels)


def test_one_sweep_holds_what_claims_of_speedups_on_one_gpu_name():
    needed = by_lengths(
        problem
        for claim in claims()
        if "paper-claims" in claim.sweeps
        for problem in claim.problems
    )
    held = by_lengths(problems("paper-claims"))
    assert needed | by_lengths(problems("paper-fig7a")) == held


def test_what_figures_vary_and_measure():
    assert problems("paper-fig7b") == [
        AttentionProblem(1, heads, heads, 65536, 64) for heads in range(8, 65, 8)
    ]
    assert problems("paper-fig7c") == [
        AttentionProblem(batch, 24, 24, 65536, 64) for batch in (1, 2, 4, 8, 16)
    ]
    cells = expand(load_sweep("paper-fig7a"))
    assert {cell.configs for cell in cells} == {"best"}
    assert problems("paper-fig7a") == [
        AttentionProblem(1, 56, 56, 1024 * 2**n, 64) for n in range(10)
    ]
    assert problems("paper-fig9") == [
        AttentionProblem(1, 32, 32, 1024 * 2**n, 128) for n in range(10)
    ]
    ragged = problems("paper-fig11")
    even = {replace(own, context=own.max_context, lengths_on="host") for own in ragged}
    batches = (8, 16, 32)
    assert even == {AttentionProblem(batch, 32, 32, 65536, 64) for batch in batches}
    shares = [problem.total_context / (problem.batch * problem.max_context) for problem in ragged]
    assert sorted(shares) == pytest.approx(
        [share for share in (0.2, 0.4, 0.6, 0.8, 1.0) for _ in batches], abs=1e-4
    )
    assert len(problems("paper-fig4")) == 42
    assert load_sweep("paper-fig4").measure.occupancy
    for figure in ("7a", "7b", "7c", "9", "11"):
        assert not load_sweep(f"paper-fig{figure}").measure.occupancy


def test_the_500_samples():
    sweep, swept = load_sweep("paper-500"), problems("paper-500")
    assert len(swept) == 550
    assert "550" in sweep.description
    assert {(problem.head_dim, problem.group_size, problem.is_ragged) for problem in swept} == {
        (64, 1, False)
    }
    # 64 heads over 2 x 512k tokens.
    assert max(problem.kv_bytes for problem in swept) == 2 * 2 * 64 * 2 * 512 * 1024 * 64
    # The problems that the text names.
    for heads, context in ((16, 2**19), (24, 1024), (24, 2**19)):
        assert AttentionProblem(1, heads, heads, context, 64) in swept
