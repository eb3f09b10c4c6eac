"""Whole models so small that a CPU runs a step of them at once."""

import json
from pathlib import Path
from typing import Any

from leanbench.core.llm.model import read_model
from leanbench.core.problem import AttentionProblem

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
_SIZES |= {"max_position_embeddings": 128}
_LLAMA = {**_SIZES, "model_type": "llama", "intermediate_size": 96, "head_dim": 64}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_OPT = {**_SIZES, "model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 96}
_OPT |= {"num_attention_heads": 1}
_WINDOW = {"sliding_window": 16}
_GEMMA = {**_LLAMA, **_WINDOW, "model_type": "gemma3_text", "sliding_window_pattern": 2}
_GEMMA |= {"query_pre_attn_scalar": 64}
_GPT_OSS = {**_LLAMA, **_WINDOW, "model_type": "gpt_oss"}
_GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN = {**_LLAMA, **_WINDOW, "model_type": "qwen2", "use_sliding_window": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "opt": _OPT,
    "gemma": _GEMMA,
    "gpt-oss": _GPT_OSS,
    # Windows of all layers, and of those behind the first.
    "mistral": {**_LLAMA, **_WINDOW, "model_type": "mistral"},
    "qwen2": {**_QWEN, "max_window_layers": 1},
}


def written(folder: Path, name: str, **changes: Any) -> str:
    """The path of the config.json of a tiny model."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**CONFIGS[name], **changes}))
    return str(path)


def problem_of(model: str, *contexts: int, dtype: str = "fp16", **axes: Any) -> AttentionProblem:
    """A step of sequences of these lengths."""
    q_heads, kv_heads, head_dim = read_model(model).heads
    context = contexts[0] if len(set(contexts)) == 1 else contexts
    axes |= {"dtype": dtype, "whole_model": model}
    return AttentionProblem(len(contexts), q_heads, kv_heads, context, head_dim, **axes)
