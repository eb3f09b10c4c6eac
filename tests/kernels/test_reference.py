"""The fp64 reference against flash-attn's definitions, computed number by number."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from leanbench.kernels.reference.torch import attend_all

from leanbench.check.reference import Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

PLAIN = AttentionProblem(2, 4, 2, 9, 16, q_len=3)
KINDS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window_left": 2},
    {"window_left": 0},
    {"window_left": 100},
    {"causal": False, "window_left": 3, "window_right": 1},
    {"causal": False, "window_right": 0},
    {"attention_chunk": 4},
    {"attention_chunk": 3, "causal": False, "leftpad": True},
    {"attention_chunk": 5, "q_len": 12, "causal": False, "window_right": 2, "context": (9, 8)},
    {"softcap": 1.5},
    {"sinks": True},
    {"alibi": True},
    {"alibi": True, "causal": False, "softcap": 2.0},
    {"leftpad": True},
    {"batch_idx": True, "lengths_on": "device", "capacity": 20},
    {"page_size": 4},
    {"page_size": 1, "context": (9, 5)},
    {"append": 2},
    {"append": 3, "page_size": 4, "context": (9, 3)},
    {"append": 3, "rotary_dim": 16},
    {"append": 2, "rotary_dim": 16, "rotary_interleaved": True, "head_dim": 24},
    {"append": 1, "rotary_dim": 16, "causal": False},
    {"append": 1, "rotary_dim": 16, "causal": False, "window_left": 4},
    {"kv_dtype": "e4m3"},
    {"kv_dtype": "e5m2", "q_dtype": "e4m3", "append": 1},
    {"kv_dtype": "e4m3", "page_size": 4, "page_scales": "page", "leftpad": True},
    {"kv_dtype": "e5m2", "page_size": 1, "page_scales": "page-head", "append": 2},
    {"v_head_dim": 8},
    {"latent": True, "kv_heads": 1, "v_head_dim": 8},
    {"latent": True, "kv_heads": 1, "page_size": 4, "causal": False},
    {"q_lens": (1, 4)},
    {"q_lens": (5, 2), "context": (3, 9), "window_left": 1, "sinks": True},
    {
        **dict.fromkeys(("batch_idx", "leftpad", "alibi", "sinks"), True),
        "softcap": 3.0,
        "window_left": 5,
        "append": 2,
        "rotary_dim": 16,
        "kv_layout": "NHD",
        "context": (9, 12),
    },
]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kinds) or "plain")
def test_every_kind_is_flash_attns(kinds: dict[str, Any]) -> None:
    problem = replace(PLAIN, **kinds)
    inputs = make_inputs(problem, "cpu", seed=3)
    expected = [_row(problem, inputs, *place) for place in _places(problem)]
    attend_all(inputs)
    out, lse = inputs.out, inputs.lse
    if problem.q_lens is None:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    rows = torch.tensor([row for row, _ in expected], dtype=torch.float64)
    torch.testing.assert_close(out.flatten(0, 1).double(), rows, rtol=2e-3, atol=1e-3)
    logarithms = torch.tensor([own for _, own in expected], dtype=torch.float64)
    torch.testing.assert_close(lse.T.flatten().double(), logarithms, rtol=1e-5, atol=1e-5)
    assert Reference(inputs).check(inputs).failure("fp16") is None


def _places(problem: AttentionProblem) -> list[tuple[int, int, int]]:
    """Return (sequence, query, query head) of every row in the order of packed outputs."""
    return [
        (sequence, query, head)
        for sequence, q_len in enumerate(problem.query_lengths)
        for query in range(q_len)
        for head in range(problem.q_heads)
    ]


def _row(
    problem: AttentionProblem, inputs: AttentionInputs, sequence: int, query: int, head: int
) -> tuple[list[float], float]:
    """Return output and LSE of a row before anything is appended, by scalars."""
    kv_head = head // problem.group_size
    total = problem.contexts[sequence]
    cached = total - problem.append
    first = problem.leftpads[sequence]
    is_local = max(problem.window_left, problem.window_right, problem.attention_chunk - 1) >= 0
    turn = cached + (query if problem.causal or is_local else 0)
    token = sum(problem.query_lengths[:sequence]) + query
    packed = inputs.q if inputs.cu_seqlens_q is not None else inputs.q.flatten(0, 1)
    q = _numbers(_turned(inputs, packed[token, head], turn), inputs.q_descale, sequence, kv_head)
    weights: list[tuple[float, list[float]]] = []
    seqlen_k, seqlen_q = total - first, problem.query_lengths[sequence]
    for key in range(seqlen_k):
        k, v = _token(problem, inputs, sequence, kv_head, first + key, cached)
        here = query + seqlen_k - seqlen_q
        behind, chunk = here - key, problem.attention_chunk
        if (
            (problem.causal and behind < 0)
            or 0 <= problem.window_left < behind
            or 0 <= problem.window_right < -behind
            or (chunk and key // chunk != here // chunk)
        ):
            continue
        score = math.fsum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(problem.head_dim)
        if problem.softcap:
            score = problem.softcap * math.tanh(score / problem.softcap)
        if inputs.alibi_slopes is not None:
            score -= inputs.alibi_slopes[sequence, head].item() * abs(behind)
        weights.append((score, v))
    logits = [score for score, _ in weights]
    if inputs.sinks is not None:
        logits.append(inputs.sinks[head].item())
    if not logits:
        return [0.0] * problem.value_dim, -math.inf
    total_weight = math.fsum(map(math.exp, logits))
    columns = range(problem.value_dim)
    sums = [math.fsum(math.exp(score) * v[column] for score, v in weights) for column in columns]
    return [own / total_weight for own in sums], math.log(total_weight)


def _token(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    sequence: int,
    kv_head: int,
    place: int,
    cached: int,
) -> tuple[list[float], list[float]]:
    at = place
    if place >= cached:
        assert inputs.k_new is not None
        assert inputs.v_new is not None
        k = _turned(inputs, inputs.k_new[sequence, place - cached, kv_head], place)
        v = inputs.v_new[sequence, place - cached, kv_head]
    else:
        row = sequence
        if inputs.cache_batch_idx is not None:
            row = int(inputs.cache_batch_idx[sequence])
        if inputs.block_table is not None:
            assert problem.page_size is not None
            row = int(inputs.block_table[sequence, place // problem.page_size])
            place %= problem.page_size
        k, v = inputs.k_cache[row, place, kv_head], inputs.v_cache[row, place, kv_head]
    k_numbers = _numbers(k, inputs.k_descale, sequence, kv_head)
    v_numbers = _numbers(v, inputs.v_descale, sequence, kv_head)
    if inputs.k_page_descale is not None and inputs.v_page_descale is not None:
        assert inputs.block_table is not None
        page = int(inputs.block_table[sequence, at // inputs.k_cache.shape[1]])
        k_scale, v_scale = (
            (scales if scales.dim() == 1 else scales[:, kv_head])[page].item()
            for scales in (inputs.k_page_descale, inputs.v_page_descale)
        )
        k_numbers = [number * k_scale for number in k_numbers]
        v_numbers = [number * v_scale for number in v_numbers]
    return k_numbers, v_numbers


def _numbers(
    row: torch.Tensor, scales: torch.Tensor | None, sequence: int, kv_head: int
) -> list[float]:
    scale = 1.0 if scales is None else scales[sequence, kv_head].item()
    return [number * scale for number in row.double().tolist()]


def _turned(inputs: AttentionInputs, row: torch.Tensor, place: int) -> torch.Tensor:
    """Return the row with pairs of columns, as complex numbers, rotated by their angles."""
    if inputs.rotary_cos is None or inputs.rotary_sin is None:
        return row
    turned = row.double().tolist()
    half = inputs.rotary_cos.shape[1]
    for pair in range(half):
        real, imaginary = (pair, pair + half)
        if inputs.rotary_interleaved:
            real, imaginary = 2 * pair, 2 * pair + 1
        angle = complex(
            inputs.rotary_cos[place, pair].item(), inputs.rotary_sin[place, pair].item()
        )
        number = complex(turned[real], turned[imaginary]) * angle
        assert cmath.isfinite(number)
        turned[real], turned[imaginary] = number.real, number.imag
    return torch.tensor(turned, dtype=torch.float64).to(row.dtype)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_is_zero_and_its_lse_the_sink(sinks: bool) -> None:
    inputs = make_inputs(replace(PLAIN, context=1, sinks=sinks), "cpu", seed=4)
    attend_all(inputs)
    assert (inputs.out[:, :2] == 0).all()
    if inputs.sinks is None:
        assert inputs.lse[:, :, :2].isneginf().all()
    else:
        torch.testing.assert_close(inputs.lse[0, :, 0], inputs.sinks.float())
        assert (inputs.lse[:, :, 2] > inputs.sinks.float()).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("kinds", [{}, {"page_size": 4}, {"batch_idx": True}])
def test_what_was_appended_is_checked(name: str, kinds: dict[str, Any]) -> None:
    inputs = make_inputs(replace(PLAIN, append=1, **kinds), "cpu", seed=5)
    attend_all(inputs)
    reference = Reference(inputs)
    assert reference.check(inputs).relative_error < 1e-3
    row, place = 1, 8
    if inputs.block_table is not None:
        row, place = inputs.block_table[1, 2].item(), 0
    elif inputs.cache_batch_idx is not None:
        row = inputs.cache_batch_idx[1].item()
    getattr(inputs, name)[row, place, 1, 3] += 1
    assert reference.check(inputs).relative_error > 0.1
