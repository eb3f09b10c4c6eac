"""The fp64 reference against torch's own attention, and what the comparison with it catches."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace

import pytest
import torch

from leanbench.inputs import AttentionInputs, make_inputs
from leanbench.measure import check as module
from leanbench.measure.check import LSE_ERROR_LIMIT, RELATIVE_ERROR_LIMIT, CheckResult, check_against_reference
from leanbench.problem import AttentionProblem
from leanbench.registry import kernel

attend = importlib.import_module("leanbench.kernels.reference.torch").attend
PROBLEM = AttentionProblem(3, 6, 3, 50, 64)


def solved(problem: AttentionProblem = PROBLEM) -> AttentionInputs:
    """Inputs whose outputs are the reference's, rounded to the dtype."""
    inputs = make_inputs(problem, "cpu")
    kernel("reference").prepare(inputs, None)()
    return inputs


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(2, 4, 4, 33, 64),
        AttentionProblem(1, 8, 2, 100, 128, "bf16", "NHD"),
        AttentionProblem(2, 6, 3, 40, 80, q_len=3),
        AttentionProblem(3, 4, 2, (5, 41, 3), 96, "fp16", "NHD", q_len=3),
        AttentionProblem(4, 5, 1, (1, 17, 64, 2), 256),
    ],
    ids=lambda problem: problem.label,
)
def test_the_reference_is_torchs_attention_in_fp64(problem):
    inputs = make_inputs(problem, "cpu")
    for sequence, tokens in enumerate(problem.contexts):
        # The last query token sees all tokens, each earlier one a token less.
        visible = tokens - problem.q_len + 1 + torch.arange(problem.q_len)
        mask = torch.arange(tokens)[None, :] < visible[:, None]
        for head in range(problem.kv_heads):
            out, lse = attend(inputs, sequence, head)
            assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
            k, v = (cache[sequence, :tokens, head].double() for cache in (inputs.k_cache, inputs.v_cache))
            for row in range(problem.group_size):
                q = inputs.q[sequence, :, head * problem.group_size + row].double()
                expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]
                torch.testing.assert_close(out[:, row], expected, rtol=1e-12, atol=1e-12)
                scores = (q @ k.T * problem.head_dim**-0.5).masked_fill(~mask, float("-inf"))
                torch.testing.assert_close(lse[row], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_the_reference_of_one_token_is_its_value():
    inputs = make_inputs(AttentionProblem(1, 2, 1, 1, 64), "cpu")
    out, lse = attend(inputs, 0, 0)
    assert torch.equal(out[0, 0], inputs.v_cache[0, 0, 0].double())
    score = inputs.q[0, 0, 1].double() @ inputs.k_cache[0, 0, 0].double() / 8
    assert lse[1, 0].item() == pytest.approx(score.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounding_to_the_dtype_passes_with_room(dtype):
    result = check_against_reference(solved(replace(PROBLEM, dtype=dtype)))
    assert result.failure(dtype) is None
    assert 0 < result.relative_error < RELATIVE_ERROR_LIMIT[dtype] / 3
    assert result.lse_error < LSE_ERROR_LIMIT / 1000
    assert (result.checked_heads, result.total_heads) == (9, 9)


@pytest.mark.parametrize(("sequence", "head"), [(0, 0), (1, 1), (2, 2), (0, 2)])
def test_a_wrong_head_is_found_wherever_it_is(sequence, head):
    inputs = solved()
    inputs.out[sequence, 0, 2 * head + 1] *= 1.01
    result = check_against_reference(inputs)
    # One of the two rows that share the KV head is 1% off.
    assert 0.004 < result.relative_error < 0.01
    assert "above 2e-03" in (result.failure("fp16") or "")


def test_swapped_heads_are_found():
    inputs = solved()
    inputs.out.copy_(inputs.out.roll(1, dims=2))
    assert check_against_reference(inputs).relative_error > 0.5


def test_a_wrong_lse_is_found():
    inputs = solved()
    inputs.lse[1, 3, 0] += 0.02
    result = check_against_reference(inputs)
    assert result.relative_error < 2e-3
    assert "LSE error" in (result.failure("fp16") or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["out", "lse"])
def test_nothing_but_numbers_passes(tensor, value):
    inputs = solved()
    getattr(inputs, tensor)[1, 0, 0] = value
    result = check_against_reference(inputs)
    assert float("inf") in (result.relative_error, result.lse_error)
    assert result.failure("fp16") is not None


def test_nan_in_a_head_that_is_not_sampled_is_found():
    inputs = solved()
    inputs.out[1, 0, 2, 5] = float("nan")
    result = check_against_reference(inputs, max_elements=1)
    assert result.checked_heads == 2
    assert (result.relative_error, result.lse_error) == (float("inf"), float("inf"))


def test_an_empty_sequence_must_say_minus_infinity():
    inputs = make_inputs(AttentionProblem(2, 2, 2, (20, 1), 64), "cpu")
    inputs = replace(inputs, cache_seqlens=torch.tensor([20, 0], dtype=torch.int32))
    kernel("reference").prepare(inputs, None)()
    assert check_against_reference(inputs).failure("fp16") is None
    inputs.lse[1, 0, 0] = -1e4
    assert check_against_reference(inputs).lse_error == float("inf")
    inputs.lse[1, 0, 0] = float("-inf")
    inputs.out[1, 0, 0, 0] = 1e-3
    assert check_against_reference(inputs).relative_error == float("inf")


def checked_pairs(monkeypatch, inputs: AttentionInputs, max_elements: int) -> list[tuple[int, int]]:
    seen = []

    def errors(inputs: AttentionInputs, sequence: int, head: int) -> tuple[float, float]:
        seen.append((sequence, head))
        return 0.0, 0.0

    monkeypatch.setattr(module, "_errors", errors)
    result = check_against_reference(inputs, max_elements)
    assert (result.checked_heads, result.total_heads) == (len(seen), 9)
    return seen


@pytest.mark.parametrize(
    ("heads_paid_for", "checked"), [(0, 2), (1, 2), (2, 2), (3, 3), (5, 5), (8, 8), (9, 9), (99, 9)]
)
def test_the_first_and_last_head_and_what_others_can_be_paid_for(monkeypatch, heads_paid_for, checked):
    inputs = solved()
    for _ in range(5):
        seen = checked_pairs(monkeypatch, inputs, heads_paid_for * 50 * 64)
        assert len(seen) == len(set(seen)) == checked
        assert (seen[0], seen[-1]) == ((0, 0), (2, 2))


def test_the_sampled_heads_differ_between_checks_and_reach_all(monkeypatch):
    inputs = solved()
    counts = Counter(pair for _ in range(200) for pair in checked_pairs(monkeypatch, inputs, 3 * 50 * 64))
    assert len(counts) == 9
    assert max(count for pair, count in counts.items() if pair not in [(0, 0), (2, 2)]) < 80


def test_one_head_is_checked_once(monkeypatch):
    result = check_against_reference(solved(AttentionProblem(1, 4, 1, 30, 64)), max_elements=1)
    assert (result.checked_heads, result.total_heads) == (1, 1)


def test_failure_names_error_and_limit():
    assert CheckResult(2e-3, 1e-3, 1, 1).failure("fp16") is None
    assert CheckResult(5e-3, 0.0, 1, 1).failure("bf16") is None
    relative = "relative error 5.00e-03 against the fp64 reference is above 2e-03"
    assert CheckResult(5e-3, 0.0, 1, 1).failure("fp16") == relative
    lse = "LSE error 2.00e-03 against the fp64 reference is above 1e-03"
    assert CheckResult(0.0, 2e-3, 1, 1).failure("fp16") == lse
    assert CheckResult(float("nan"), 0.0, 1, 1).failure("fp16") is not None
    assert CheckResult(0.0, float("nan"), 1, 1).failure("fp16") is not None
