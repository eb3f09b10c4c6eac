"""What a call costs the host, as calls of Python functions: on any machine, however busy it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_counts import function_calls
from leanbench.kernels.lean import LEAN

from leanbench.attention import lean_attn_with_kvcache
from leanbench.calls import prepared
from leanbench.calls.prepared import PreparedLaunches

Q = torch.zeros(2, 1, 8, 64, dtype=torch.float16)
CACHE = torch.zeros(2, 64, 2, 64, dtype=torch.float16)
DENSE = torch.zeros(2, 2, 64, 64, dtype=torch.float16).transpose(1, 2)
LENGTHS = torch.full((2,), 3, dtype=torch.int32)


class Launched:
    """A launch that nothing comes of."""

    any_capacity = True
    tile_tokens = 64

    def __call__(self, *tensors: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_launches(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(LEAN, "relaunch", lambda inputs, config: Launched())
    monkeypatch.setattr(prepared, "_LAUNCHES", PreparedLaunches())


@pytest.mark.parametrize(
    ("cache", "lengths", "most"),
    [(CACHE, LENGTHS, 12), (CACHE, 5, 14), (DENSE, None, 14)],
    ids=["on the device", "on the host", "dense"],
)
def test_a_call_seen_before_makes_few_function_calls(cache, lengths, most):
    def call() -> None:
        lean_attn_with_kvcache(Q, cache, cache, cache_seqlens=lengths)

    with torch.no_grad():
        call()
        assert function_calls(call) - 1 <= most


@pytest.mark.parametrize(("lengths", "most"), [(LENGTHS, 195), (5, 210)])
def test_a_new_shape_makes_few_function_calls(lengths, most):
    """1,000 of them in a row are to stay under 200 us each."""

    def call(tokens: int) -> None:
        cache = CACHE[:, :tokens]
        lean_attn_with_kvcache(Q, cache, cache, cache_seqlens=lengths)

    with torch.no_grad():
        call(40)
        assert function_calls(lambda: call(50)) - 2 <= most
