"""Models of transformers with random weights, a few thousand numbers each."""

from importlib import import_module
from typing import Any

import torch

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}
SIZES |= {"eos_token_id": None}
GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
#: A window that prompts of 11 tokens exceed.
WINDOW = {"sliding_window": 7}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "llama": ("LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, **WINDOW}),
    "gemma2": ("Gemma2Config", {**GROUPED, **WINDOW, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**GROUPED, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # Its windowed layer does not pass the window on.
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **GROUPED,
            **WINDOW,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
            **dict.fromkeys(("num_experts", "num_experts_per_tok"), 2),
            **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        },
    ),
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """A model in eval mode, the same weights every time, with attn_implementation="lean"."""
    transformers = import_module("transformers")

    config_type, own = KINDS[kind]
    sizes = {"initializer_range": 0.2, **SIZES, **own, **changes}
    config = getattr(transformers, config_type)(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lean").eval()
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks)
    return model


def prompts(batch: int = 3, tokens: int = 11) -> torch.Tensor:
    return torch.randint(2, 97, (batch, tokens), generator=torch.Generator().manual_seed(1))
