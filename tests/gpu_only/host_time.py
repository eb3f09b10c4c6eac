"""Host time of calls in us: median and minimum of 40 means of 16 calls, with a GPU synchronization
between means.

    python tests/gpu_only/host_time.py [--rounds N]

torch's `scaled_dot_product_attention` is timed at the start and at the end, which shows a host
disturbed by other programs. Calls of 1,000 new shapes follow.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# A single thread: others that wait for compilations would be timed, too.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch

from leanbench import lean_attn_with_kvcache, lean_mla_with_kvcache
from leanbench.attention import fast, prepared
from leanbench.attention.prepared import PreparedLaunches
from leanbench.records.environment import kernels_hash

BATCH, CAPACITY, LENGTH = 8, 4096, 1024
MEANS, CALLS = 40, 16
#: Limits and number of the new shapes.
MOST_BATCH, MOST_CAPACITY, SHAPES = 64, 2000, 1000

sdpa = torch.nn.functional.scaled_dot_product_attention


def time_us(call: Callable[[], object]) -> list[float]:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    means = []
    for _ in range(MEANS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return means


def cache(batch: int, capacity: int, heads: int = 8) -> torch.Tensor:
    return torch.randn(batch, capacity, heads, 128, dtype=torch.float16, device="cuda")


def lengths_of(batch: int, length: int) -> torch.Tensor:
    return torch.full((batch,), length, dtype=torch.int32, device="cuda")


def eager_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls by name, of 8 x 32/8 x 128 with capacity for 4k tokens.

    They are fp16, `lean_mla` is bf16.
    """
    q, k, v = cache(BATCH, 1, 32), cache(BATCH, CAPACITY), cache(BATCH, CAPACITY)
    lengths, out = lengths_of(BATCH, LENGTH), torch.empty_like(q)
    new = cache(BATCH, 1)
    q_hnd, k_hnd, v_hnd = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    caches = [cache(1, CAPACITY).transpose(1, 2)[:, :, : LENGTH + i] for i in range(30)]
    dense = [grown.contiguous().transpose(1, 2) for grown in caches]

    def run_sdpa() -> torch.Tensor:
        return sdpa(q_hnd, k_hnd, v_hnd, enable_gqa=True)

    def longer() -> None:
        dense.append(dense.pop(0))
        lean_attn_with_kvcache(q[:1], dense[0], dense[0])

    def lean(**options: Any) -> Callable[[], object]:
        return lambda: lean_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)

    yield "sdpa", run_sdpa
    yield "lengths on the device", lean()
    yield "lengths on the device, out=", lean(out=out)
    yield "with the LSE", lean(return_softmax_lse=True)
    yield "with the LSE, out=", lean(return_softmax_lse=True, out=out)
    yield "a length on the host", lambda: lean_attn_with_kvcache(q, k, v, cache_seqlens=LENGTH)
    k_pages, v_pages = k.view(-1, 16, 8, 128), v.view(-1, 16, 8, 128)
    table = torch.arange(BATCH * CAPACITY // 16, dtype=torch.int32, device="cuda").view(BATCH, -1)
    paged: Any = {"cache_seqlens": lengths, "block_table": table}
    yield "pages", lambda: lean_attn_with_kvcache(q, k_pages, v_pages, **paged)
    q_8, k_8, v_8 = (each.to(torch.float8_e4m3fn) for each in (q, k_pages, v_pages))
    ones = torch.ones(BATCH, 8, device="cuda")
    scaled = paged | {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    yield "fp8 pages with scales", lambda: lean_attn_with_kvcache(q_8, k_8, v_8, **scaled)
    queries = cache(BATCH, 4, 32)
    drafts: Any = {"cache_seqlens": lengths, "causal": True}
    yield "4 query tokens", lambda: lean_attn_with_kvcache(queries, k, v, **drafts)
    yield "appends a token", lean(k=new, v=new)
    cos, sin = torch.randn(2, CAPACITY, 64, dtype=torch.float16, device="cuda")
    yield "appends and rotates a token", lean(k=new, v=new, rotary_cos=cos, rotary_sin=sin)
    yield (
        "window and sinks",
        lean(window_size=(127, 0), causal=True, sinks=lengths.new_ones(32).float()),
    )
    yield "dense caches", lambda: lean_attn_with_kvcache(q[:1], dense[0], dense[0])
    yield "dense caches, a token longer in each call", longer
    rows = torch.randn(BATCH, 1, 128, 576, dtype=torch.bfloat16, device="cuda")
    latent = torch.randn(BATCH, CAPACITY, 576, dtype=torch.bfloat16, device="cuda")
    latent_out = torch.empty_like(rows[..., :512])
    yield "lean_mla", lambda: lean_mla_with_kvcache(rows, latent, lengths)
    yield "lean_mla, out=", lambda: lean_mla_with_kvcache(rows, latent, lengths, out=latent_out)
    yield (
        "lean_mla with the LSE",
        lambda: lean_mla_with_kvcache(rows, latent, lengths, return_softmax_lse=True),
    )
    attend = torch.compile(
        lambda q, k, v, lengths: lean_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    )
    yield "torch.compile", lambda: attend(q, k, v, lengths)
    compiled_sdpa = torch.compile(lambda q, k, v: sdpa(q, k, v, enable_gqa=True))
    yield "torch.compile, sdpa", lambda: compiled_sdpa(q_hnd, k_hnd, v_hnd)
    times_1 = torch.compile(lambda q: q * 1)
    yield "torch.compile, q * 1", lambda: times_1(q)
    yield "sdpa at the end", run_sdpa


def new_shapes_us(lengths_on_device: bool) -> list[float]:
    q, k = cache(MOST_BATCH, 1, 32), cache(MOST_BATCH, MOST_CAPACITY)
    lengths = {batch: lengths_of(batch, 1) for batch in range(1, MOST_BATCH + 1)}
    every = [(batch, room) for batch in lengths for room in range(1, MOST_CAPACITY + 1)]
    prepared._LAUNCHES = PreparedLaunches()
    times = []
    gc.collect()
    for batch, capacity in random.sample(every, SHAPES):
        tensors = q[:batch], k[:batch, :capacity], k[:batch, :capacity]
        length = lengths[batch] if lengths_on_device else None
        start = time.perf_counter()
        lean_attn_with_kvcache(*tensors, cache_seqlens=length)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def main(rounds: int) -> None:
    python = sys.version.partition(" ")[0]
    print(
        f"Host time in us: median and least of {MEANS} means of {CALLS} calls;"
        f" {torch.cuda.get_device_name()},\n"
        f"torch {torch.__version__}, Python {python}, kernels {kernels_hash()};"
        f" calls seen before: {'Python' if fast.why_not else 'C'}",
        flush=True,
    )
    calls = dict(eager_calls())
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for place in range(rounds):
        for name, call in calls.items():
            means = time_us(call)
            taken[name] += means
            print_line(f"round {place}", name, means)
        for where, on_device in (("device", True), ("host", False)):
            times = sorted(new_shapes_us(on_device))
            print(
                f"round {place}  {SHAPES} new shapes, lengths on the {where}: median"
                f" {times[SHAPES // 2]:.0f}, 99% below {times[-SHAPES // 100]:.0f}, most"
                f" {times[-1]:.0f}; {torch.cuda.memory_allocated() >> 20} MB of the GPU and"
                f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB of memory taken",
                flush=True,
            )
    for name, means in taken.items():
        print_line("all", name, means)


def print_line(which: str, name: str, means: list[float]) -> None:
    print(f"{which:8} {name:42} {statistics.median(means):6.1f} {min(means):6.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    with torch.no_grad():
        main(parser.parse_args().rounds)
