"""Tokens per second of transformers' `generate()`, step by step from the host without a graph, for
a model with the shapes of Llama-3-8B, 8 layers and random weights:

    python tests/gpu_only/generate_speed.py [SECONDS]

Implementations take turns of 64 steps. A step's time is the interval between two calls of a logits
processor. The first two steps wait for the prompt and are discarded. Printed are the medians over
turns of a turn's median step, and of the ratio of two turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from leanbench.integrations.transformers import register

transformers = import_module("transformers")

IMPLEMENTATIONS = ("lean", "sdpa")
#: Batch, tokens of the prompt.
CELLS = [(1, 1024), (4, 1024), (1, 16384)]
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
NEW_TOKENS = 64


def llama(layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def step_seconds(
    model: Any, implementation: str, tokens: torch.Tensor, options: dict[str, Any]
) -> list[float]:
    times: list[float] = []

    def clock(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        times.append(time.perf_counter())
        return scores

    model.set_attn_implementation(implementation)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW_TOKENS + 3,
        do_sample=False,
        logits_processor=[clock],
        **options,
    )
    torch.cuda.synchronize()
    return [end - start for start, end in pairwise(times[2:])]


def main(budget_s: float) -> None:
    register()
    model = llama(layers=8)
    cell_s = budget_s / len(CELLS) / len(CACHES)
    print(f"Llama-3-8B, 8 layers, bf16, eager generate(); transformers {transformers.__version__},")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; us a step, tokens/s")
    for cache, options in CACHES.items():
        for batch, context in CELLS:
            tokens = torch.randint(2, 128000, (batch, context), device="cuda")
            for implementation in IMPLEMENTATIONS:
                step_seconds(model, implementation, tokens, options)
            turns: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
            end = time.perf_counter() + cell_s
            while time.perf_counter() < end or len(turns["lean"]) < 3:
                for implementation, times in turns.items():
                    steps = step_seconds(model, implementation, tokens, options)
                    times.append(statistics.median(steps))
            median = {name: statistics.median(times) for name, times in turns.items()}
            figures = "  ".join(
                f"{name} {1e6 * seconds:.0f} us {batch / seconds:.1f}/s"
                for name, seconds in median.items()
            )
            ratios = [sdpa / lean for lean, sdpa in zip(turns["lean"], turns["sdpa"], strict=True)]
            print(
                f"{cache:8}{batch:3} x {context:6}  {figures}  {statistics.median(ratios):.3f}x"
                f" ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} turns)",
                flush=True,
            )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
