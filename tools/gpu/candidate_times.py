"""Latency of every candidate of lean_cuda on calls drawn at random, losers too.

Half of the calls have lengths on the device: one capacity, filled in several ways. Each line of the
output is a problem with its candidates' settings, latencies in microseconds and spilled registers;
the first is the default's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from leanbench.kernels.lean.configs import LeanCudaConfig
from leanbench.kernels.lean.cuda_build import HEAD_PAIR_ROWS, CudaBuild, rows_of
from leanbench.kernels.lean.cuda_heuristic import (
    TILE_ROWS,
    copy_of,
    many_rows_configs,
    pairs_heads,
)

from leanbench.compile.build import Job, build_all, process_pool
from leanbench.configs.space import Candidate, distinct
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import choose
from leanbench.measure import buffers
from leanbench.tune import stopwatch

LEAN = kernel("lean_cuda")
#: Query heads, KV heads and head_dim of models.
MODELS = (
    *((32, 32, 128), (32, 8, 128), (64, 8, 128), (32, 8, 64), (24, 8, 128), (14, 2, 64)),
    *((28, 4, 128), (32, 4, 128), (64, 4, 128), (48, 8, 128), (8, 1, 256), (16, 8, 256)),
    *((64, 8, 64), (32, 32, 80), (32, 32, 96), (128, 8, 64), (40, 8, 128), (96, 8, 128)),
    (8, 4, 256),
)
#: Drawn kinds of calls, and their weights.
KINDS = {"plain": 46, "fp8": 22, "q": 14, "window": 10, "sinks": 8}
MOST_KV_BYTES = 1.2e9
#: Copies of K and V to rotate over. More take longer to prepare than to time.
MOST_COPIES = 40
#: Builds of each problem outside of the usual combinations, drawn.
MORE_BUILDS = 25


def drawn(rng: random.Random) -> Iterator[tuple[str, list[AttentionProblem]]]:
    """Draw calls: a kind, and the problem with each of its fills."""
    while True:
        q_heads, kv_heads, head_dim = rng.choice(MODELS)
        gpus = rng.choice([1, 1, 2, 4, 8])
        q_heads, kv_heads = q_heads // gpus, max(1, kv_heads // gpus)
        batch = max(1, round(math.exp(rng.uniform(0, math.log(257)) - 0.3)))
        context = round(math.exp(rng.uniform(math.log(150), math.log(70_000))))
        if q_heads % kv_heads or batch * kv_heads * context * head_dim * 4 > MOST_KV_BYTES:
            continue
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        more: dict[str, Any] = {"page_size": rng.choice([None, None, 16, 64])}
        if kind == "fp8":
            more |= {"kv_dtype": "e4m3"} | ({"q_dtype": "e4m3"} if rng.random() < 0.4 else {})
        elif kind == "q":
            more["q_len"] = rng.choice([2, 3, 4, 6, 8])
        elif kind == "window":
            more["window_left"] = rng.choice([127, 511, 1023, 4095])
        elif kind == "sinks":
            more |= {"sinks": True, "window_left": rng.choice([-1, 127])}
        fills: list[int | tuple[int, ...]] = [context]
        if rng.random() < 0.5:
            more |= {"lengths_on": "device", "capacity": context}
            few = [round(context * rng.uniform(0.01, 0.12)) for _ in range(batch)]
            many = [round(context * rng.random() ** 3) for _ in range(batch)]
            shorter = few, [context, *few[1:]], many
            fills = [(context,) * batch, *(tuple(max(9, n) for n in fill) for fill in shorter)]
        shape = q_heads, kv_heads
        form = head_dim, rng.choice(["fp16", "bf16"]), rng.choice(["HND", "NHD"])
        yield kind, [AttentionProblem(batch, *shape, fill, *form, **more) for fill in fills]


def space(problem: AttentionProblem, gpu: GpuSpec, rng: random.Random) -> list[LeanCudaConfig]:
    """Return candidates: LeanTiles of 64 to 256 tokens, the usual builds, and some drawn ones."""
    usual = {
        (c.chunk_tokens, c.num_warps, c.num_stages, c.ctas_per_sm)
        for c in LEAN.tuning_space(problem, gpu)
        if not c.of_warpgroups
    }
    most = rows_of(problem.group_size, problem.q_len, problem.value_dim)
    most = HEAD_PAIR_ROWS if pairs_heads(problem, gpu, False) else most
    all_rows = [rows for rows in TILE_ROWS if rows <= most]
    others = set(product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4), (1, 2))) - usual
    shapes = list(product(sorted(usual), (1, 2, 4, 8), all_rows))
    further = list(product(sorted(others), (1, 2, 4, 8), all_rows))
    shapes += rng.sample(further, min(len(further), MORE_BUILDS))
    on_host = problem.lengths_on == "host"
    whole = -(-problem.max_context // 128)
    grids = [(128, 1, on_host), (64, 1, on_host), (256, 1, on_host)]
    grids += [(128, 1, False), (128, whole, True)] if on_host else []
    able: list[LeanCudaConfig] = many_rows_configs(problem, gpu)
    for ((chunk, warps, stages, per_sm), cluster, rows), grid in product(shapes, grids):
        tile_tokens, min_tiles, align_grid = grid
        if chunk > tile_tokens or (per_sm > 1 and cluster > 2):
            continue
        config = LeanCudaConfig(
            tile_tokens=tile_tokens,
            num_warps=warps,
            num_stages=stages,
            ctas_per_sm=per_sm,
            min_tiles_per_cta=min_tiles,
            align_grid=align_grid,
            chunk_tokens=chunk,
            tile_rows=rows,
            cluster_size=cluster,
            copy=copy_of(problem, gpu, rows),
        )
        if CudaBuild.of(problem, config).fits(gpu):
            able.append(config)
    if not on_host:
        return able
    candidates = [Candidate(config, config.build_key) for config in able]
    return [candidate.config for candidate in distinct(candidates, problem, LEAN, gpu)]


def compiled(
    problem: AttentionProblem, gpu: GpuSpec, rng: random.Random, pool: Executor
) -> dict[LeanCudaConfig, int]:
    """Return the candidates that compile, with their spilled registers."""
    defaults = [LEAN.default_config(problem, gpu), LEAN.any_length_config(problem, gpu)]
    configs = list(dict.fromkeys([*defaults, *space(problem, gpu, rng)]))
    of_builds = {CudaBuild.of(problem, config): config for config in configs}
    jobs = [Job(LEAN.name, problem, config) for config in of_builds.values()]
    builds = build_all(jobs, gpu.compute_capability, pool)
    spilled = {
        CudaBuild.of(problem, job.config): build.resources[0].spilled_registers
        for job, build in zip(jobs, builds, strict=True)
        if build.resources
    }
    keys = {config: CudaBuild.of(problem, config) for config in configs}
    return {config: spilled[key] for config, key in keys.items() if key in spilled}


def time_drawn(seed: int, seconds: float, out: Path) -> None:
    """Time candidates of drawn calls for some seconds; compile the next call's meanwhile."""
    target = choose(None, require_gpu=True)
    assert target.local_index is not None
    gpu, rng, end = target.spec, random.Random(seed), time.monotonic() + seconds
    copies = buffers.cold_copies
    stopwatch.cold_copies = lambda problem, spec: min(MOST_COPIES, copies(problem, spec))
    watch = stopwatch.GpuStopwatch(LEAN, target.local_index, gpu)
    watch.most_bytes = 0  # fp8 caches need their own memory
    calls = drawn(rng)

    with process_pool() as pool, ThreadPoolExecutor(1) as ahead, out.open("a") as file:

        def upcoming() -> tuple[str, list[AttentionProblem], dict[LeanCudaConfig, int]]:
            able = (call for call in calls if not any(map(LEAN.unsupported_reason, call[1])))
            kind, problems = next(able)
            return kind, problems, compiled(problems[0], gpu, rng, pool)

        following = ahead.submit(upcoming)
        while time.monotonic() < end:
            kind, problems, spilled = following.result()
            following = ahead.submit(upcoming)
            for problem in problems:
                default = LEAN.default_config(problem, gpu)
                result = watch.time(problem, list(dict.fromkeys([default, *spilled])))
                times = [
                    (config.to_dict(), round(took.latency_us, 3), spilled.get(config, 0))
                    for config, took in result.times.items()
                ]
                row = {"gpu": gpu.name, "kind": kind, "problem": problem.to_dict(), "times": times}
                file.write(json.dumps(row) + "\n")
                file.flush()
                best_us = min(us for _, us, _ in times)
                print(f"{problem.label}: {len(times)}, default {best_us / times[0][1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--out", type=Path, default=Path("candidates.jsonl"))
    given = parser.parse_args()
    time_drawn(given.seed, given.seconds, given.out)
