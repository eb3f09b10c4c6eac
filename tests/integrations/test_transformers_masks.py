"""`attn_implementation="lean"` in models that do more with a mask than pass it on."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from leanbench.core.errors import UserError

pytest.importorskip("transformers", reason="transformers is not installed")

from dense_attention import DenseAttention, in_place_of_lean
from tiny_models import GROUPED, SIZES, prompts
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from leanbench.integrations import hf_attention
from leanbench.integrations.hf_masks import dense_mask, is_windowed, lean_mask, lengths_of

transformers = import_module("transformers")
PROMPT, TOKENS = 6, 11
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
#: Of the decoder, whose attention has a bias for each distance, or takes itself for not causal.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "moonshine": (
        "MoonshineForConditionalGeneration",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            **{f"{side}_num_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_num_key_value_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_num_hidden_layers": 2 for side in ("encoder", "decoder")},
        },
    ),
}


@pytest.fixture(autouse=True)
def lean(monkeypatch: pytest.MonkeyPatch) -> DenseAttention:
    return in_place_of_lean(monkeypatch)


def model_of(kind: str, config: Any) -> Any:
    """A model with weights large enough for masks to matter."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="lean").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return model


def switch(model: Any, implementation: str) -> None:
    """Set the attention of all parts, also of T5's copies of configs."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation


def encoder_decoder(kind: str) -> Any:
    name, sizes = ENCODER_DECODERS[kind]
    common = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config_type = getattr(transformers, name).config_class
    return model_of(name, config_type(**common, decoder_start_token_id=1, **sizes))


@torch.no_grad()
def decoded(model: Any, implementation: str, cache_type: str, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the decoder's tokens: of a prompt at once, then of a token a step."""
    switch(model, implementation)
    tokens, batch = prompts(len(mask), TOKENS), len(mask)
    states = torch.randn(batch, 5, 32, generator=torch.Generator().manual_seed(2))
    encoded = BaseModelOutput(states)  # pyright: ignore[reportArgumentType]
    encoded.attention_mask = None  # pyright: ignore[reportAttributeAccessIssue]
    own = DynamicCache()
    if cache_type == "static":
        config = model.config.get_text_config(decoder=True)
        own = StaticCache(config=config, max_cache_len=16)
    cache, logits, first = EncoderDecoderCache(own, DynamicCache()), [], 0
    for last in (PROMPT, *range(PROMPT + 1, TOKENS + 1)):
        result = model(
            decoder_input_ids=tokens[:, first:last],
            decoder_attention_mask=mask[:, :last],
            encoder_outputs=encoded,
            past_key_values=cache,
        )
        logits.append(result.logits)
        first = last
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["not padded", "padded"])
@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_a_decoder_with_a_bias_or_that_says_it_is_not_causal(kind, padded, cache_type, lean):
    model, mask = encoder_decoder(kind), torch.ones(2, TOKENS, dtype=torch.long)
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{kind} of transformers {transformers.__version__} computes attention itself")
    if padded:
        mask[0, :3] = 0
    result = decoded(model, "lean", cache_type, mask)
    assert bool(lean.calls) == (kind == "moonshine")
    expected = decoded(model, "eager", cache_type, mask)
    seen = mask.bool()
    torch.testing.assert_close(result[seen], expected[seen], rtol=1e-4, atol=1e-4)


def test_lengths_stand_for_the_mask_that_sdpa_gets():
    mask = lean_mask(
        2, 2, 7, q_offset=4, attention_mask=torch.tensor([[0] * 2 + [1] * 4, [1] * 6]).bool()
    )
    assert mask is not None
    assert dense_mask(mask, 2, 7, None).int().tolist() == [
        [[[0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0]]],
        [[[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]],
    ]
    assert dense_mask(mask, 2, 7, 3)[1].int().tolist() == [
        [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
    ]


def causal_model(name: str, **sizes: Any) -> Any:
    return model_of(f"{name}ForCausalLM", getattr(transformers, f"{name}Config")(**sizes))


@torch.no_grad()
def steps(model: Any, implementation: str, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of a decoder's tokens: of a prompt at once, then of a token a step."""
    switch(model, implementation)
    tokens, logits, first = prompts(len(mask), TOKENS), [], 0
    for last in (PROMPT, *range(PROMPT + 1, TOKENS + 1)):
        result = model(tokens[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        logits.append(result.logits)
        first = last
    return torch.cat(logits, dim=1)


def caches(config: Any) -> dict[str, Any]:
    return {
        "dynamic": DynamicCache(config=config),
        "that keeps all": DynamicCache(),
        "static": StaticCache(config=config, max_cache_len=16),
    }


MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 2}


@pytest.mark.parametrize("cache_type", ["dynamic", "that keeps all", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["not padded", "padded"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Layers that do not pass on their window, and one that does.
        ("Phimoe", {**SIZES, **GROUPED, **MIXTURE, "sliding_window": 4}),
        ("Mistral", {**SIZES, **GROUPED, "sliding_window": 4}),
        # It makes its own masks of those that it gets.
        ("Doge", {**SIZES, **GROUPED, "keep_window_size": 4}),
    ],
)
def test_a_decoder_with_a_window_or_with_its_own_masks(name, sizes, padded, cache_type):
    model, mask = causal_model(name, **sizes), torch.ones(2, TOKENS, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    result = steps(model, "lean", mask, caches(model.config)[cache_type])
    expected = steps(model, "eager", mask, caches(model.config)[cache_type])
    seen = mask.bool()
    torch.testing.assert_close(result[seen], expected[seen], rtol=1e-4, atol=1e-4)


def windowed(kv_length: int, attention_mask: torch.Tensor | None = None) -> torch.Tensor | None:
    config = transformers.MistralConfig(sliding_window=7)
    sizes: dict[str, Any] = {"q_offset": kv_length - 1, "attention_mask": attention_mask}
    return lean_mask(2, 1, kv_length, local_size=7, config=config, **sizes)


def test_a_mask_says_whether_a_window_hides_tokens():
    assert windowed(7) is None
    mask = windowed(8)
    assert mask is not None
    assert is_windowed(mask)
    padded = windowed(8, torch.tensor([[0] + [1] * 7, [1] * 8]).bool())
    assert padded is not None
    assert is_windowed(padded)
    for own, expected in zip(lengths_of(padded), ([8, 8], [1, 0]), strict=True):
        assert own is not None
        assert own.tolist() == expected
        assert own.is_contiguous()


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (windowed(8), r"mask of Linear has a sliding window.*'eager'"),
        (
            torch.ones(2, 1, 1, 9, dtype=torch.int32),
            r"last size of an int32 attention_mask is 9, .* 1 or 2",
        ),
    ],
)
def test_masks_that_are_refused(mask, sentence):
    q = torch.zeros(2, 4, 1, 8)
    with pytest.raises(UserError, match=sentence):
        hf_attention.lean_attention(torch.nn.Linear(1, 1), q, q, q, mask)


@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
def test_a_decoder_that_joins_two_masks(cache_type):
    """T5Gemma 2 attends to its own tokens and the encoder's at once, also in decode steps."""

    decoder = transformers.T5Gemma2Config().decoder
    for q_length, skip in ((1, True), (1, False), (3, False)):
        kv = (16, torch.tensor(4)) if cache_type == "static" else (4 + q_length, 4)
        mask = lean_mask(2, q_length, *kv, config=decoder, allow_is_causal_skip=skip)
        assert mask is not None
        assert mask.dtype == torch.bool


OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4},
    "Mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4},
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_adds_the_mask_itself_is_refused(name):
    model = causal_model(name, vocab_size=97, **OWN_ATTENTION[name])
    kind = model.config.model_type
    with torch.no_grad(), pytest.raises(UserError, match=rf"type '{kind}' does not go.*'eager'"):
        model(prompts(2))


@pytest.mark.parametrize("kind", ["git", "informer"])
def test_a_model_of_which_a_part_alone_asks_transformers_is_refused(kind):
    with pytest.raises(UserError, match=rf"type '{kind}' does not go"):
        lean_mask(2, 1, 5, 4, config=transformers.AutoConfig.for_model(kind))
    # Models from elsewhere are not.
    own = type("OwnConfig", (transformers.BloomConfig,), {})
    assert lean_mask(2, 1, 5, 4, config=own()) is None


def test_attention_to_chosen_tokens_is_refused():
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16}
    index = {"q_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = {**sizes, **heads, **index, **experts, "num_key_value_heads": 4}
    with torch.no_grad(), pytest.raises(UserError, match=r"chosen tokens only \(indices\)"):
        causal_model("DeepseekV32", **config)(prompts(2))
