"""`attn_implementation="paged|lean"` compared with "paged|eager", in fp32 and in torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leanbench.core.errors import UserError

pytest.importorskip("transformers", reason="transformers is not installed")

from dense_attention import DenseAttention, dense_attention
from tiny_models import tiny_model
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as paged_cache

from leanbench.integrations import hf_paged
from leanbench.integrations.transformers import register

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30] * 17]
BLOCK, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> DenseAttention:
    register()
    dense = DenseAttention()
    monkeypatch.setattr(hf_paged, "lean_attn_with_kvcache", dense)
    memory = (torch.device("cpu"), 1 << 30, 0, 0)
    monkeypatch.setattr(paged_cache, "get_device_and_memory_breakdown", lambda: memory)
    return dense


def paged_model(kind: str) -> Any:
    """A tiny model whose attention is "paged|lean", where transformers keeps that name."""
    model = tiny_model(kind)
    model.set_attn_implementation("paged|lean")
    if model.config._attn_implementation != "paged|lean":
        pytest.skip("this transformers batches with FlashAttention, sdpa and eager attention alone")
    return model


def generated(model: Any, implementation: str) -> list[list[int]]:
    """Tokens of prompts that are cut into chunks, which share batches with decode steps."""
    model.set_attn_implementation(implementation)
    ends = {"max_new_tokens": 5, "eos_token_id": -1, "pad_token_id": 0}
    batching = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=64, max_batch_tokens=16)
    results = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(do_sample=False, **ends),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt-oss"])
def test_a_model_says_the_same(kind, lean):
    model = paged_model(kind)
    tokens = generated(model, "paged|lean")
    assert [len(sequence) for sequence in tokens] == [5, 5, 5]
    assert len(lean.calls) >= 5
    assert tokens == generated(model, "paged|eager")


def test_a_decode_step_appends_to_its_blocks(lean, monkeypatch):
    """Lengths are those before the new token; a padding sequence writes to unread slots."""
    cache = paged_blocks()
    table = torch.tensor([[[9, 9], [9, 9], [9, 9]], [[3, 1], [0, -1], [-1, -1]]], dtype=torch.int32)
    tokens = torch.tensor([0, 7, 9, 9], dtype=torch.int32)
    appended = AppendingAttention()
    monkeypatch.setattr(hf_paged, "lean_attn_with_kvcache", appended)
    query = torch.randn(1, 4, 3, DIM)
    new = torch.randn(1, KV_HEADS, 3, DIM)
    layer: Any = SimpleNamespace(layer_idx=5)
    own: dict[str, Any] = {"cu_seq_lens_q": torch.arange(4, dtype=torch.int32), "scaling": 0.25}
    own |= {"cache": cache, "cu_seq_lens_k": tokens, "block_table": table}
    out, _ = hf_paged.lean_paged_attention(layer, query, new, -new, None, **own)
    assert appended.lengths == [6, 1, 0]
    assert appended.table == [[3, 1], [0, 6], [6, 6]]
    assert appended.new.equal(new[0].transpose(0, 1)[:, None])
    assert out.shape == (1, 3, 4, DIM)


class AppendingAttention:
    """What a call that appends was asked for."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, *args: Any, **own: Any) -> Any:
        assert k_cache.shape == (8, BLOCK, KV_HEADS, DIM)
        self.lengths = own["cache_seqlens"].tolist()
        self.table = own["block_table"].tolist()
        self.new = own["k"]
        return dense_attention(q, own["k"], own["v"])


def paged_blocks() -> SimpleNamespace:
    """Return the parts of a PagedAttentionCache that are read: 8 blocks, two not used."""
    slots = torch.zeros(8 * BLOCK, KV_HEADS, DIM)
    return SimpleNamespace(
        layer_index_to_group_indices={5: (1, 0)},
        key_cache=[slots],
        value_cache=[slots],
        block_size=BLOCK,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        write_trash_index=6 * BLOCK,
    )


def test_generate_is_no_continuous_batching(lean):
    model = paged_model("llama")
    with pytest.raises(UserError, match=r"for continuous batching: use 'lean' with generate"):
        model(torch.tensor([[5, 6]]))
