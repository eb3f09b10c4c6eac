"""`attn_implementation="lean"` compared with eager attention, in fp32 and in torch."""

from importlib import metadata
from typing import Any

import pytest
import torch
from depth import deep

from leanbench.core.errors import UserError

pytest.importorskip("transformers", reason="transformers is not installed")

from dense_attention import DenseAttention, dense_attention, in_place_of_lean
from tiny_models import KINDS, prompts, tiny_model
from transformers.cache_utils import StaticCache

from leanbench.integrations import hf_attention
from leanbench.integrations.hf_masks import lean_mask, lengths_of
from leanbench.integrations.transformers import register, version_fault

NEW_TOKENS = 6
PADDING = torch.tensor([[0] * 5 + [1] * 6, [1] * 11, [0] + [1] * 10])


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> DenseAttention:
    return in_place_of_lean(monkeypatch)


def generated(model: Any, implementation: str, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    return model.generate(
        prompts(),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same(result: Any, expected: Any) -> None:
    assert torch.equal(result.sequences, expected.sequences)
    for logits, wanted in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_the_same_with_padding_on_the_left(kind, cache, lean):
    model = tiny_model(kind)
    options = {"attention_mask": PADDING, "cache_implementation": cache}
    result = generated(model, "lean", **options)
    layers = model.config.num_hidden_layers
    assert len(lean.calls) == layers * NEW_TOKENS
    if kind == "opt":
        # It scales its queries itself.
        assert {call["softmax_scale"] for call in lean.calls} == {1.0}
    assert_same(result, generated(model, "eager", **options))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss"])
def test_a_model_says_the_same_without_padding(kind, cache, lean):
    model = tiny_model(kind)
    options = {"attention_mask": torch.ones_like(PADDING), "cache_implementation": cache}
    result = generated(model, "lean", **options)
    assert_same(result, generated(model, "eager", **options))
    lengths = [call["cache_seqlens"] for call in lean.calls]
    assert all(call["cache_leftpad"] is None for call in lean.calls)
    # Prompts go to SDPA, which has neither softcaps nor sinks.
    of_prompts = [] if kind == "llama" else [11, 11]
    assert [call["q"].shape[1] for call in lean.calls] == of_prompts + [1] * 2 * (NEW_TOKENS - 1)
    if cache == "static":
        assert lengths[-1].tolist() == [11 + NEW_TOKENS - 1] * 3


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2-moe"])
def test_a_chunk_over_cached_tokens(kind, lean):
    """Pass several tokens at once, as speculative decoding and chunked prompts do."""
    model, tokens = tiny_model(kind), prompts()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(tokens).logits
        model.set_attn_implementation("lean")
        first = model(tokens[:, :6])
        rest = model(tokens[:, 6:], past_key_values=first.past_key_values)
    assert lean.calls[-1]["causal"] is True
    result = torch.cat((first.logits, rest.logits), dim=1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_lengths_of_static_caches_and_moving_windows(lean):
    mask: Any = lean_mask(2, 1, 64, q_offset=torch.tensor(9), allow_is_causal_skip=False)
    own: Any = lengths_of(mask)
    lengths, starts = own
    assert starts is None
    assert (lengths.tolist(), lengths.dtype) == ([10, 10], torch.int32)
    padding = torch.tensor([[0] * 6 + [1] * 5, [1] * 11]).bool()
    own: Any = lengths_of(lean_mask(2, 1, 7, q_offset=10, kv_offset=4, attention_mask=padding))
    lengths, starts = own
    assert (lengths.tolist(), starts.tolist()) == ([7, 7], [2, 0])
    assert lengths.is_contiguous()
    assert starts.is_contiguous()
    with pytest.raises(UserError, match=r"sequence 1 has padding between tokens.*on the left"):
        lean_mask(2, 1, 4, q_offset=3, attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 1]]).bool())


def test_masks_of_callers_go_to_sdpa_or_are_refused(lean):
    model, tokens = tiny_model("llama"), prompts(1)
    own = torch.ones(1, 1, 11, 11).tril(3).bool()
    with torch.no_grad():
        result = model(tokens, attention_mask=own).logits
        model.set_attn_implementation("sdpa")
        expected = model(tokens, attention_mask=own).logits
    assert lean.calls == []
    assert torch.equal(result, expected)
    model, tokens = tiny_model("gpt-oss"), prompts(1)
    with torch.no_grad(), pytest.raises(UserError, match=r"with sinks has a mask.*'eager'"):
        model(tokens, attention_mask=torch.ones(1, 1, 11, 11).bool())
    training = tiny_model("mistral", attention_dropout=0.5).train()
    with torch.no_grad(), pytest.raises(UserError, match=r"dropout is 0.5.*model.eval\(\)"):
        training(tokens)
    with torch.no_grad(), pytest.raises(UserError, match=r"no weights to return: use.*'eager'"):
        model(tokens, output_attentions=True)


def test_a_model_in_fp32_is_refused_at_its_first_token():
    register()
    with pytest.raises(ValueError, match=r"q is torch.float32, .* expected all fp16 or all bf16"):
        generated(tiny_model("llama"), "lean")


def test_other_versions_are_refused(monkeypatch):
    fix = "from 5.14 to below 6 is: pip install 'transformers>=5.14,<6'"
    for version in "4.57.1 5.0.0 5.13.2 5 6.0.0 6 6rc1 6.0.0.dev0 main".split():
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        with pytest.raises(UserError, match=rf"^transformers {version} is not supported, {fix}$"):
            register()
    for version in "5.14 5.14.0 5.14rc1 5.14.0.dev0 5.100.1+local".split():
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert version_fault() is None

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match="not installed: pip install"):
        register()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["gemma3", deep("qwen2-moe")])
def test_a_step_compiles_whole(kind, lean, monkeypatch):
    """With the lengths of a static cache read in the graph, and padding that nobody looks at."""
    torch._dynamo.reset()
    monkeypatch.setattr(hf_attention, "lean_attn_with_kvcache", dense_attention)
    model, mask, results = tiny_model(kind), torch.ones(3, 15, dtype=torch.long), []
    mask[0, :5] = 0
    for forward in (model.forward, torch.compile(model.forward, backend="eager", fullgraph=True)):
        cache = StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            token = model(prompts(), attention_mask=mask[:, :11], past_key_values=cache).logits
            for count in range(12, 15):
                token = forward(
                    token[:, -1:].argmax(-1),
                    attention_mask=mask[:, :count],
                    position_ids=torch.full((3, 1), count),
                    past_key_values=cache,
                ).logits
        results.append(token)
    torch.testing.assert_close(results[1], results[0])
