"""The fp64 reference against torch's own attention, and what the comparison with it catches."""

import importlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbench.check.reference import LSE_ERROR_LIMIT, RELATIVE_ERROR_LIMIT, CheckResult, Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel

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
            k = inputs.k_cache[sequence, :tokens, head].double()
            v = inputs.v_cache[sequence, :tokens, head].double()
            for row in range(problem.group_size):
                q = inputs.q[sequence, :, head * problem.group_size + row].double()
                expected = torch.nn.functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], mask
                )[0]
                torch.testing.assert_close(out[:, row], expected, rtol=1e-12, atol=1e-12)
                scores = (q @ k.T * problem.head_dim**-0.5).masked_fill(~mask, float("-inf"))
                torch.testing.assert_close(lse[row], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounding_to_the_dtype_passes_with_room(dtype):
    inputs = solved(replace(PROBLEM, dtype=dtype))
    result = Reference(inputs).check(inputs)
    assert result.failure(dtype) is None
    assert 0 < result.relative_error < RELATIVE_ERROR_LIMIT[dtype] / 3
    assert result.lse_error is not None
    assert result.lse_error < LSE_ERROR_LIMIT["fp16"] / 1000
    assert (result.checked_heads, result.total_heads) == (9, 9)


def solved_below_sinks(sink: float, dtype: str = "fp16") -> AttentionInputs:
    """One token to a sequence, with some exp(-`sink`) of the weight."""
    inputs = make_inputs(replace(PROBLEM, context=1, dtype=dtype, sinks=True), "cpu")
    assert inputs.sinks is not None
    inputs.sinks.fill_(sink)
    kernel("reference").prepare(inputs, None)()
    return inputs


@pytest.mark.parametrize("sink", [8.0, 11.0, 14.0, 17.0, 20.0, 40.0])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounding_of_the_smallest_numbers_passes_with_room(dtype, sink):
    inputs = solved_below_sinks(sink, dtype)
    result = Reference(inputs).check(inputs)
    assert result.failure(dtype) is None
    assert result.relative_error < RELATIVE_ERROR_LIMIT[dtype] / 3


@pytest.mark.parametrize("sink", [11.0, 13.0])
def test_wrong_small_numbers_are_found(sink):
    """Detect outputs of 2e-5 and 2e-6 flushed to zero, of another head, and off by ten spacings."""
    inputs = solved_below_sinks(sink)
    reference, right = Reference(inputs), inputs.out.clone()
    for wrong in (torch.zeros_like(right), right.roll(1, dims=2), right + 10 * 2**-24):
        inputs.out.copy_(wrong)
        assert "above 2e-03" in (reference.check(inputs).failure("fp16") or "")


def test_small_numbers_and_nan_in_the_wrong_place_are_found():
    inputs = solved_below_sinks(11.0)
    inputs.v_cache[1, :, 1] = 0
    kernel("reference").prepare(inputs, None)()
    reference = Reference(inputs)
    assert reference.check(inputs).failure("fp16") is None
    inputs.out[1, 0, 2, 5] = 2**-24
    assert reference.check(inputs).relative_error == math.inf
    inputs = solved()
    inputs.out[1, 0, 2, 5] = float("nan")
    result = Reference(inputs, max_elements=1).check(inputs)
    assert result.checked_heads == 2
    assert (result.relative_error, result.lse_error) == (float("inf"), float("inf"))


def plainly_checked(inputs: AttentionInputs) -> tuple[float, float]:
    """Return the errors of `Reference.check`, computed one element after another."""
    if inputs.out.isnan().any() or inputs.lse.isnan().any():
        return math.inf, math.inf
    worst_out = worst_lse = 0.0
    group = inputs.group_size
    batch, _, kv_heads, _ = inputs.k_cache.shape
    for sequence, head in itertools.product(range(batch), range(kv_heads)):
        heads = slice(head * group, (head + 1) * group)
        out, lse = attend(inputs, sequence, head)
        got_out, got_lse = inputs.out[sequence, :, heads].double(), inputs.lse[sequence, heads]
        off = math.sqrt(sum(number**2 for number in (got_out - out).flatten().tolist()))
        # 2**-14: of fp16, the smallest number before they are evenly spaced.
        counted = (max(abs(number), 2**-14) for number in out.flatten().tolist() if number)
        length = math.sqrt(sum(number**2 for number in counted))
        of_zero = math.inf if off else 0.0
        worst_out = max(worst_out, off / length if length else of_zero)
        for got, expected in zip(got_lse.flatten().tolist(), lse.flatten().tolist(), strict=True):
            if math.isinf(expected):
                error = 0.0 if got == expected else math.inf
            else:
                error = abs(got - expected) / max(1.0, abs(expected))
            worst_lse = max(worst_lse, error)
    return worst_out, worst_lse


NUMBERS = st.sampled_from([0.0, 1e-4, -1.0, 300.0, math.inf, -math.inf, math.nan])


@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 3),
    q_len=st.integers(1, 2),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    head_dim=st.sampled_from([64, 80]),
    spoilt=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6), NUMBERS), max_size=3),
    noise=st.sampled_from([0.0, 1e-4, 1e-2]),
)
@settings(max_examples=examples(60))
def test_a_check_is_what_a_plain_computation_says(
    batch, kv_heads, group_size, q_len, lengths, head_dim, spoilt, noise
):
    """Empty sequences among them, and outputs that are any number or none."""
    problem = AttentionProblem(batch, kv_heads * group_size, kv_heads, 9, head_dim, q_len=q_len)
    inputs = make_inputs(problem, "cpu")
    inputs = replace(inputs, cache_seqlens=torch.tensor(lengths[:batch], dtype=torch.int32))
    kernel("reference").prepare(inputs, None)()
    inputs.out.add_(torch.randn_like(inputs.out) * noise)
    for in_out, place, number in spoilt:
        tensor = inputs.out if in_out else inputs.lse
        tensor.view(-1)[place % tensor.numel()] = number
    result = Reference(inputs).check(inputs)
    assert (result.relative_error, result.lse_error) == pytest.approx(
        plainly_checked(inputs), rel=1e-9, nan_ok=True
    )
    assert (result.checked_heads, result.total_heads) == (batch * kv_heads, batch * kv_heads)


def test_one_reference_serves_many_kernels():
    inputs = solved()
    reference = Reference(inputs)
    right = reference.check(inputs)
    inputs.out[2, 0, 5] *= 1.01
    wrong = reference.check(inputs)
    assert right.failure("fp16") is None
    assert wrong.failure("fp16") is not None
    inputs.out[2, 0, 5] /= 1.01
    inputs.poison()
    kernel("reference").prepare(inputs, None)()
    assert reference.check(inputs) == right


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, int]]:
    """The (sequence, KV head) pairs that references compute, in order."""
    pairs: list[tuple[int, int]] = []

    def noted(inputs: AttentionInputs, sequence: int, head: int) -> Any:
        pairs.append((sequence, head))
        return attend(inputs, sequence, head)

    monkeypatch.setattr("leanbench.kernels.reference.torch.attend", noted)
    return pairs


def checked_pairs(
    inputs: AttentionInputs, computed: list[tuple[int, int]], **limits: Any
) -> list[tuple[int, int]]:
    """The pairs that a check compares; each is made wrong in turn to see that."""
    computed.clear()
    reference = Reference(inputs, **limits)
    result = reference.check(inputs)
    assert (result.checked_heads, result.total_heads) == (len(computed), 9)
    seen = []
    for sequence, head in itertools.product(range(3), range(3)):
        inputs.out[sequence, 0, 2 * head] *= 2
        if reference.check(inputs).relative_error > 0.1:
            seen.append((sequence, head))
        inputs.out[sequence, 0, 2 * head] /= 2
    assert sorted(computed) == seen
    return list(computed)


@pytest.mark.parametrize(
    ("heads_paid_for", "max_pairs", "checked"),
    [
        *((heads, 99, max(2, min(9, heads))) for heads in (0, 1, 2, 3, 8, 9, 99)),
        *((9, 4, 4), (9, 1, 2), (5, 7, 5), (7, 5, 5)),
    ],
)
def test_pairs_are_limited_by_elements_and_by_number(computed, heads_paid_for, max_pairs, checked):
    one = solved(AttentionProblem(1, 4, 1, 30, 64))
    result = Reference(one, max_elements=1).check(one)
    assert (result.checked_heads, result.total_heads) == (1, 1)
    inputs, limits = solved(), {"max_elements": heads_paid_for * 50 * 64, "max_pairs": max_pairs}
    for _ in range(3):
        seen = checked_pairs(inputs, computed, **limits)
        assert len(seen) == len(set(seen)) == checked
        assert (seen[0], seen[-1]) == ((0, 0), (2, 2))


def test_the_sampled_heads_differ_between_checks_and_reach_all(computed):
    inputs = solved()
    computed.clear()
    for _ in range(200):
        Reference(inputs, max_pairs=3)
    counts = Counter(computed)
    assert counts[0, 0] == counts[2, 2] == 200
    assert len(counts) == 9
    # One of seven each time: 29 expected of each.
    assert max(count for pair, count in counts.items() if pair not in [(0, 0), (2, 2)]) < 80


def test_failure_names_error_and_limit():
    assert CheckResult(2e-3, 1e-3, 1, 1).failure("fp16") is None
    assert CheckResult(5e-3, 0.0, 1, 1).failure("bf16") is None
    relative = "relative error 5.00e-03 against the fp64 reference is above 2e-03"
    assert CheckResult(5e-3, 0.0, 1, 1).failure("fp16") == relative
    lse = "LSE error 2.00e-03 against the fp64 reference is above 1e-03"
    assert CheckResult(0.0, 2e-3, 1, 1).failure("fp16") == lse
    assert CheckResult(0.0, 2e-3, 1, 1, lse_base=2.0).failure("fp16") is None
    base_2 = "LSE error 2.10e-03 against the fp64 reference is above 2e-03"
    assert CheckResult(0.0, 2.1e-3, 1, 1, lse_base=2.0).failure("fp16") == base_2
    assert CheckResult(float("nan"), 0.0, 1, 1).failure("fp16") is not None
    assert CheckResult(0.0, float("nan"), 1, 1).failure("fp16") is not None
