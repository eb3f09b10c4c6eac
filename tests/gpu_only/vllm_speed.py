"""Time per output token in vLLM for a model with the shapes of Llama-3-8B and random weights, with
several of its attention backends in turns:

    python tests/gpu_only/vllm_speed.py [--layers N] [--no-compile] [BACKEND ...] [BATCHxTOKENS ...]

CUSTOM is this project's plugin. Each backend has a process with an engine. Caches are filled by
vLLM's DecodeBenchConnector, so there is no prefill. A step's time is the difference of two
requests, one of them with 128 tokens more, over 128: the median of several.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from leanbench.core.llm.config import read_config

#: The engine runs in the backend's process, where the plugin is registered.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "CUSTOM")
CELLS = ("1x1024", "16x1024", "1x16384", "16x4096")
FEW, MANY = 16, 144
ROUNDS = 4
#: Fields that vLLM requires in addition to the shipped config.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def engine(
    backend: str, folder: Path, cells: list[tuple[int, int]], layers: int, compiled: bool
) -> Any:
    """Create vLLM with the backend and a cache for the largest cell."""
    from vllm import LLM

    config = dict(read_config("llama-3-8b").published) | LLAMA | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    batches = sorted({batch for batch, _ in cells})
    longest = max(tokens for _, tokens in cells) + MANY + 16
    token_bytes = layers * 2 * 8 * 128 * 2
    graphs = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": batches}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=batches[-1],
        attention_config={"backend": backend},
        enable_prefix_caching=False,
        kv_transfer_config={"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
        # Several engines share the GPU.
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=max(batch * (tokens + 256) for batch, tokens in cells) * token_bytes,
        compilation_config=graphs if compiled else graphs | {"mode": 0},
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


def serve(
    pipe: Connection, backend: str, cells: list[tuple[int, int]], layers: int, compiled: bool
) -> None:
    """Send the software's versions, then a step's time in us for each cell received."""
    if backend == "CUSTOM":
        from leanbench.integrations.vllm import register

        register()
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        llm = engine(backend, Path(folder), cells, layers, compiled)
        for batch, tokens in cells:
            seconds(llm, batch, tokens, FEW)
        name = torch.cuda.get_device_name()
        pipe.send(f"{name}, vLLM {vllm.__version__}, torch {torch.__version__}")
        while cell := pipe.recv():
            batch, tokens = cell
            few, many = (seconds(llm, batch, tokens, outputs) for outputs in (FEW, MANY))
            pipe.send((many - few) / (MANY - FEW) * 1e6)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    backends = [name for name in options.what if name in BACKENDS] or list(BACKENDS)
    named = [cell for cell in options.what if cell not in BACKENDS] or CELLS
    cells = [(int(batch), int(tokens)) for batch, tokens in (cell.split("x") for cell in named)]
    from leanbench.records.environment import kernels_hash

    pipes: dict[str, Connection] = {}
    context = get_context("spawn")
    for backend in backends:
        pipes[backend], theirs = context.Pipe()
        work = (theirs, backend, cells, options.layers, not options.no_compile)
        context.Process(target=serve, args=work, daemon=True).start()
        theirs.close()
    for backend in list(backends):
        try:
            print(f"{backend}: {pipes[backend].recv()}", flush=True)
        except EOFError:
            print(f"{backend} did not start, the error is above: left out", flush=True)
            backends.remove(backend)
    print(f"kernels {kernels_hash()}; Llama-3-8B, {options.layers} layers, bf16, dummy weights")
    for batch, tokens in cells:
        steps_us: dict[str, list[float]] = {backend: [] for backend in backends}
        for number in range(ROUNDS):
            turn = number % len(backends)
            for backend in backends[turn:] + backends[:turn]:
                pipes[backend].send((batch, tokens))
                steps_us[backend].append(pipes[backend].recv())
        figures = "  ".join(
            f"{name} {statistics.median(us):.0f} us ({min(us):.0f} to {max(us):.0f})"
            for name, us in steps_us.items()
        )
        print(f"{batch:4} x {tokens:6}  {figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
