"""Transformers models with the attention of well-known ones and random weights, and their decode
steps over given tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import create_masks_for_generate

#: Two layers; gemma2, gemma3 and gpt-oss have one with a window and one without.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Kind(NamedTuple):
    config: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    more: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16


KINDS = {
    "opt": Kind("OPTConfig", 32, 32, 64, 2048, {"ffn_dim": 2048}, torch.float16),
    "llama": Kind("LlamaConfig", 32, 8, 128, 4096, {}),
    "qwen3": Kind("Qwen3Config", 32, 8, 128, 2048, {}),
    "gemma2": Kind("Gemma2Config", 8, 4, 256, 2304, {"sliding_window": 64}),
    "gemma3": Kind(
        "Gemma3TextConfig",
        32,
        16,
        128,
        2048,
        {"sliding_window": 96, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": Kind(
        "GptOssConfig",
        64,
        8,
        64,
        2880,
        # All experts: a router's choice between two would turn a rounding into a step.
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
}


def decoder(name: str) -> Any:
    """Return a model on the GPU, in eval mode, with the same weights every time."""
    transformers = import_module("transformers")

    kind = KINDS[name]
    own: dict[str, Any] = {"hidden_size": kind.hidden, "num_attention_heads": kind.heads}
    if name == "opt":
        own["word_embed_proj_dim"] = kind.hidden
    else:
        own.update(num_key_value_heads=kind.kv_heads, head_dim=kind.head_dim)
        own["intermediate_size"] = 2048
    config = getattr(transformers, kind.config)(**{**SIZES, **own, **kind.more})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind.dtype)
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks)
    return model.eval()


@torch.no_grad()
def logits_of(
    model: Any,
    implementation: str,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    prompt: int,
    cache: Any,
) -> torch.Tensor:
    """Return fp32 logits of the prompt, then of each token: (batch, steps, vocabulary).

    Args:
        mask: (batch, tokens): 0 for padding.
        prompt: tokens of the prompt, padding included.
    """
    model.set_attn_implementation(implementation)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, first = [], 0
    for last in range(prompt, tokens.shape[1]):
        result = model(
            tokens[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(result.logits[:, -1].float())
        first = last
    return torch.stack(logits, dim=1)


class CapturedStep:
    """A CUDA graph of a step, captured after a run over another cache, which may compile."""

    def __init__(self, step: Callable[[Any], torch.Tensor], cache: Any, warm_up: Any) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(warm_up)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Read by replays.
        self._last = torch.tensor([-1], device="cuda")
        with _as_last_index(self._last), torch.cuda.graph(self._graph):
            self._out = step(cache)

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._out.clone()


@contextmanager
def _as_last_index(last: torch.Tensor) -> Iterator[None]:
    """Replace the index of the last token, -1, in transformers' static cache of a sliding window.

    The cache copies it from the host in every step, which a capture does not allow. Compiled steps
    have it as a constant. During a capture, `last` on the device replaces it.
    """
    original = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return last if data == [-1] else original(data, **options)

    torch.tensor = tensor  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.tensor = original


@torch.no_grad()
def captured_logits_of(
    model: Any,
    implementation: str,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    prompt: int,
    caches: tuple[Any, Any],
) -> torch.Tensor:
    """Return logits as in `logits_of`, by one CUDA graph replayed for every token after the prompt.

    Models with a sliding window get the masks of each step from outside the graph, as transformers'
    `generate()` makes them for its compiled steps. Others make theirs inside.

    Args:
        caches: two empty static ones, with windows filled by the prompt: for the result, and for
            the run before the capture.
    """
    model.set_attn_implementation(implementation)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, warm_up = caches
    logits = []
    for each in (warm_up, cache):
        result = model(
            tokens[:, :prompt],
            attention_mask=mask[:, :prompt],
            position_ids=positions[:, :prompt],
            past_key_values=each,
            use_cache=True,
        )
        logits = [result.logits[:, -1].float()]
    token = tokens[:, prompt : prompt + 1].clone()
    position = positions[:, prompt : prompt + 1].clone()
    has_window = getattr(model.config, "sliding_window", None) is not None

    def masks(count: int) -> Any:
        embedded = torch.empty(len(tokens), 1, 1, dtype=model.dtype, device=tokens.device)
        return create_masks_for_generate(model.config, embedded, mask[:, :count], cache, position)

    captured_masks = masks(prompt + 1) if has_window else mask

    def step(over: Any) -> torch.Tensor:
        result = model(
            token,
            attention_mask=captured_masks,
            position_ids=position,
            past_key_values=over,
            use_cache=True,
        )
        return result.logits[:, -1].float()

    # Windows of layers counted on the host, which replays do not update.
    windows = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
    captured = CapturedStep(step, cache, warm_up)
    for count in range(prompt, tokens.shape[1] - 1):
        for layer in windows:
            layer.cumulative_length_int = count
        token.copy_(tokens[:, count : count + 1])
        position.copy_(positions[:, count : count + 1])
        if has_window:
            _copy_masks(captured_masks, masks(count + 1))
        logits.append(captured.replay())
    return torch.stack(logits, dim=1)


def _copy_masks(captured: Any, new: Any) -> None:
    if isinstance(captured, dict):
        for kind, mask in captured.items():
            _copy_masks(mask, new[kind])
    elif captured is not None:
        captured.copy_(new)
