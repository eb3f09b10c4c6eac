"""A decode step in a CUDA graph; here the host replays it, with its counts of the capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from leanbench.core.errors import UserError

pytest.importorskip("transformers", reason="transformers is not installed")

import decoders
from decoders import captured_logits_of, logits_of
from dense_attention import dense_attention
from tiny_models import KINDS, prompts, tiny_model
from transformers.cache_utils import DynamicCache, StaticCache

from leanbench.integrations import hf_attention, hf_masks
from leanbench.integrations.hf_masks import lean_mask
from leanbench.integrations.transformers import register

PROMPT, TOKENS = 11, 20


def capture(patch: pytest.MonkeyPatch) -> None:
    """Has `lean_mask` find that a CUDA graph is being captured."""
    patch.setattr(hf_masks, "is_cuda_stream_capturing", lambda: True)
    patch.setattr(hf_masks, "is_tracing", lambda tensor=None: True)


class ReplayedOnHost:
    """Stands for `decoders.CapturedStep`: a replay sees the host's counts of the capture."""

    def __init__(self, step: Callable[[Any], torch.Tensor], cache: Any, warm_up: Any) -> None:
        step(warm_up)
        self._step, self._cache = step, cache
        self._counts = [getattr(layer, "cumulative_length_int", 0) for layer in cache.layers]

    def replay(self) -> torch.Tensor:
        for layer, count in zip(self._cache.layers, self._counts, strict=True):
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = count
        with pytest.MonkeyPatch.context() as patch:
            capture(patch)
            return self._step(self._cache)


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(decoders, "CapturedStep", ReplayedOnHost)
    monkeypatch.setattr(hf_attention, "lean_attn_with_kvcache", dense_attention)


def step_of(padded: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, int]:
    mask = torch.ones(len(padded), TOKENS, dtype=torch.long)
    for row, padding in enumerate(padded):
        mask[row, :padding] = 0
    return prompts(len(padded), TOKENS), mask, PROMPT


@pytest.mark.parametrize("padded", [(5, 0, 9), (0, 0)], ids=["padded", "not padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_right_as_its_cache_grows(kind, padded):
    model, step = tiny_model(kind), step_of(padded)
    expected = logits_of(model, "eager", *step, DynamicCache(config=model.config))
    first, second = (StaticCache(config=model.config, max_cache_len=32) for _ in range(2))
    replayed = captured_logits_of(model, "lean", *step, (first, second))
    assert replayed.shape == (len(padded), TOKENS - PROMPT, 97)
    torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-4)


def captured_mask(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """The mask of a layer whose window of 7 tokens has dropped 4, in a graph."""
    capture(monkeypatch)
    lean_mask(2, 1, 7, kv_offset=4, **sizes)


def test_captured_windows_that_are_refused(monkeypatch):
    padding = torch.tensor([[0] * 6 + [1] * 5, [1] * 11]).bool()
    with pytest.raises(UserError, match=r"has dropped 4 tokens.*create_masks_for_generate"):
        captured_mask(monkeypatch, q_offset=10, attention_mask=padding)
    with pytest.raises(UserError, match=r"captured with 6 of 7 tokens.*once the window is full"):
        captured_mask(monkeypatch, q_offset=9)
