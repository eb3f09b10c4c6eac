"""What a call costs the host, as calls of Python functions: on any machine, however busy it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_counts import function_calls
from every_kind import launch_nothing

from leanbench.attention import lean_attn_with_kvcache, prepared
from leanbench.attention.prepared import choices_of
from leanbench.core.problem import AttentionProblem

Q = torch.zeros(2, 1, 8, 64, dtype=torch.float16)
CACHE = torch.zeros(2, 64, 2, 64, dtype=torch.float16)
DENSE = torch.zeros(2, 2, 64, 64, dtype=torch.float16).transpose(1, 2)
LENGTHS = torch.full((2,), 3, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _no_launches(monkeypatch):
    launch_nothing(monkeypatch)


@pytest.mark.parametrize(
    ("cache", "lengths", "most"),
    [(CACHE, LENGTHS, 14), (CACHE, 5, 16), (DENSE, None, 16)],
    ids=["on the device", "on the host", "dense"],
)
def test_a_call_seen_before_makes_few_function_calls(cache, lengths, most):
    def call() -> None:
        lean_attn_with_kvcache(Q, cache, cache, cache_seqlens=lengths)

    with torch.no_grad():
        # The second one may be taken over by the C path, which leaves it.
        call()
        call()
        assert function_calls(call) - 1 <= most


@pytest.mark.parametrize(
    ("tokens", "lengths", "most"),
    [(48, LENGTHS, 82), (64, LENGTHS, 430), (64, 5, 190)],
    ids=["on the device", "of another bound", "on the host"],
)
def test_a_new_shape_makes_few_function_calls(tokens, lengths, most):
    """1,000 of them in a row are to stay under 200 us each, of another bound under 1 ms."""

    def call(tokens: int) -> None:
        cache = CACHE[:, :tokens]
        lean_attn_with_kvcache(Q, cache, cache, cache_seqlens=lengths)

    with torch.no_grad():
        call(40)
        assert function_calls(lambda: call(tokens)) - 2 <= most


def test_a_new_length_makes_few_function_calls():
    """It is under 500 us, once for 64 tokens."""

    def call(length: int) -> None:
        lean_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=length)

    with torch.no_grad():
        call(3)
        assert function_calls(lambda: call(64)) - 1 <= 430


def test_settings_for_lengths_on_the_device_are_chosen_once_for_a_bound(monkeypatch):
    problems: list[AttentionProblem] = []

    def choices(inputs: Any, problem: AttentionProblem, batch_invariant: bool) -> Any:
        problems.append(problem)
        return choices_of(inputs, problem, batch_invariant)

    monkeypatch.setattr(prepared, "choices_of", choices)
    with torch.no_grad():
        for tokens in (50, 60, 64):
            lean_attn_with_kvcache(Q, CACHE[:, :tokens], CACHE[:, :tokens], cache_seqlens=LENGTHS)
        assert [problem.context for problem in problems] == [50]
        # What else they follow from.
        one = CACHE[:1]
        lean_attn_with_kvcache(Q[:1], one, one, cache_seqlens=LENGTHS[:1])
        lean_attn_with_kvcache(Q, DENSE, DENSE, cache_seqlens=LENGTHS)
        sinks = torch.zeros(8)
        lean_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=LENGTHS, sinks=sinks)
        for _ in range(2):
            # Those without lengths on the device are chosen for a length.
            lean_attn_with_kvcache(
                Q, CACHE, CACHE, cache_seqlens=5, softmax_scale=0.1 * len(problems)
            )
    assert [problem.batch for problem in problems] == [2, 1, 2, 2, 2, 2]
    assert [problem.kv_layout for problem in problems[:3]] == ["NHD", "NHD", "HND"]
    assert [problem.sinks for problem in problems[2:]] == [False, True, False, False]
