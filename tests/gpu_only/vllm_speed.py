"""Time per output token in vLLM for a model with the shapes of Llama-3-8B and random weights, with
one of its attention backends:

    python tests/gpu_only/vllm_speed.py FLASH_ATTN|FLASHINFER|CUSTOM [BATCHxTOKENS...]

CUSTOM is this project's plugin. Caches are filled by vLLM's DecodeBenchConnector, so there is no
prefill. A step's time is the difference of two requests, one of them with 128 tokens more, over
128: the median of several. One backend per process: an engine keeps the GPU's memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from leanbench.core.llm.config import read_config

#: The engine runs in this process, where the plugin is registered.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "CUSTOM")
CELLS = ("1x1024", "16x1024", "1x16384", "16x16384", "1x65536", "4x65536")
FEW, MANY = 16, 144
ROUNDS = 5
#: Fields that vLLM requires in addition to the shipped config.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def engine(backend: str, folder: Path, longest: int, most: int) -> Any:
    """Create vLLM with the backend and capacity for `most` requests of `longest` tokens."""
    from vllm import LLM

    config = dict(read_config("llama-3-8b").published) | LLAMA
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=most,
        attention_config={"backend": backend},
        enable_prefix_caching=False,
        kv_transfer_config={"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    )


def seconds(llm: Any, batch: int, tokens: int, outputs: int) -> float:
    """Return the time of requests, each with this number of output tokens."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [1 + number % 100] * tokens} for number in range(batch)]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=outputs, min_tokens=outputs, ignore_eos=True, detokenize=False
    )
    began = time.perf_counter()
    done = llm.generate(prompts, sampling, use_tqdm=False)
    took = time.perf_counter() - began
    assert [len(each.outputs[0].token_ids) for each in done] == [outputs] * batch
    return took


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in BACKENDS:
        print(f"name a backend: {', '.join(BACKENDS)}", file=sys.stderr)
        return 2
    backend = arguments[0]
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments[1:] or CELLS]
    if backend == "CUSTOM":
        from leanbench.integrations.vllm import register

        register()
    import torch
    import vllm

    from leanbench.records.environment import kernels_hash

    longest = max(tokens for _, tokens in cells) + MANY + 16
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(backend, Path(folder), longest, max(batch for batch, _ in cells))
        name = torch.cuda.get_device_name()
        print(f"{name}, vLLM {vllm.__version__}, torch {torch.__version__}, {backend}", flush=True)
        print(f"kernels {kernels_hash()}; Llama-3-8B, bf16, dummy weights; us a token", flush=True)
        for batch, tokens in cells:
            seconds(llm, batch, tokens, FEW)
            steps_us = []
            for _ in range(ROUNDS):
                few, many = (seconds(llm, batch, tokens, outputs) for outputs in (FEW, MANY))
                steps_us.append((many - few) / (MANY - FEW) * 1e6)
            median_us = statistics.median(steps_us)
            spread = f"{min(steps_us):.0f} to {max(steps_us):.0f}"
            rate = f"{batch / median_us * 1e6:.1f} tokens/s"
            print(f"{batch:4} x {tokens:6}  {median_us:8.0f} us ({spread})  {rate}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
