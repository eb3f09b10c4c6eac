"""Small pages with many query rows: right against the fp64 reference, then timed before and after.

    python gpu_job.py [--seed N] [--dry]

Runs in the checkout; --dry draws, compiles and prints builds without a GPU. 'before' are the settings
of the parent commit for pages that are no multiple of 16 tokens (lean.cu, whose code is unchanged).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

sys.path.insert(0, os.getcwd())
START = time.time()

from leanbench.kernels.lean import cuda_build, cuda_driver, cuda_heuristic
from leanbench.kernels.lean.cuda_build import CudaBuild

from leanbench.compile.nvrtc import compile_cuda
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

LEAN, H200 = kernel("lean_cuda"), find("h200")
KINDS, PROBLEMS = 24, 40
ROUNDS, ROUND_MS, COLD_BYTES = 7, 6.0, 260e6
FLOPS, BYTES_PER_US = 700e6, 4.7e6  # of a microsecond: reached by wgmma at its best; read from HBM
HAS_MANY_ROWS = cuda_heuristic.has_many_rows


def said(text: str) -> None:
    print(f"[{time.time() - START:5.1f}s] {text}", flush=True)


# ---- what is drawn -----------------------------------------------------------------------------


def drawn_kinds(draw: random.Random) -> list[dict]:
    """What a build depends on; pages in turn, so that each size has as many."""
    kinds = []
    for i in range(KINDS):
        head_dim, v = draw.choice([(64, None), (128, None), (128, None), (256, None), (192, 128)])
        kind = {
            "page_size": (1, 2, 4, 8, 16)[i % 5],
            "group": draw.choice([1, 2, 4, 8]),
            "head_dim": head_dim,
            "v_head_dim": v,
            "dtype": draw.choice(["bf16", "fp16"]),
            "kv_layout": draw.choice(["HND", "NHD"]),
            "lengths_on": draw.choice(["host", "device"]),
            "ragged": draw.random() < 0.4,
            "packed": draw.random() < 0.4,
            "window": draw.random() < 0.35,
            "causal": draw.random() < 0.8,
            "softcap": 20.0 if draw.random() < 0.2 else 0.0,
            "sinks": draw.random() < 0.25,
            "alibi": draw.random() < 0.2,
            "leftpad": draw.random() < 0.15,
            "few": draw.random() < 0.3,  # rows for one warpgroup
        }
        if i in (3, 11, 17):
            # fp8 stays with lean.cu.
            kind |= {"kv_dtype": "e4m3", "head_dim": 128, "v_head_dim": None, "leftpad": False}
        if i in (6, 13):
            kind |= {"page_size": draw.choice([3, 12, 24])}
        kinds.append(kind)
    return kinds


def drawn_problem(kind: dict, draw: random.Random) -> AttentionProblem:
    k = dict(kind)
    group, few = k.pop("group"), k.pop("few")
    ragged, packed, window = k.pop("ragged"), k.pop("packed"), k.pop("window")
    most = max(17, 64 // group) if few else 600
    q_len = draw.randint(17, most) if not few or group == 1 else draw.randint(-(-17 // group), most)
    batch, kv_heads = draw.randint(1, 5), draw.randint(1, 3)
    if few:
        batch = draw.choice([batch, 12])
    longest = draw.randint(max(q_len, 650), 2600)
    context: int | tuple[int, ...] = longest
    if ragged:
        context = tuple([longest, *(draw.randint(q_len, longest) for _ in range(batch - 1))])
        k["capacity"] = longest + draw.randint(0, 300)
    if packed:
        k["q_lens"] = tuple([q_len, *(draw.choice([1, draw.randint(1, q_len)]) for _ in range(batch - 1))])
    else:
        k["q_len"] = q_len
    if window:
        k["window_left"] = draw.randint(30, 700)
        if not k["causal"]:
            k["window_right"] = draw.randint(0, 50)
    return AttentionProblem(batch, group * kv_heads, kv_heads, context, **k)


def timed_problems() -> dict[str, AttentionProblem]:
    chunk = AttentionProblem(1, 32, 8, 8192, 128, "bf16", "NHD", q_len=512)
    made = {f"1 x 8k x 512, pages of {page}": replace(chunk, page_size=page) for page in (1, 2, 4, 8, 16, 64)}
    draw = random.Random(12)
    contexts = tuple([4096, *(draw.randint(500, 8000) for _ in range(31))])
    mixed = AttentionProblem(
        32, 32, 8, contexts, 128, "bf16", "NHD", q_lens=(512,) + (1,) * 31, lengths_on="device"
    )
    eight = AttentionProblem(8, 32, 8, 4096, 128, "bf16", "NHD", q_len=128)
    made |= {f"512 + 31 x 1, some 4k, pages of {page}": replace(mixed, page_size=page) for page in (1, 16)}
    made |= {f"8 x 4k x 128, pages of {page}": replace(eight, page_size=page) for page in (1, 8, 16)}
    long = replace(chunk, context=32768, page_size=1)
    made |= {f"1 x 32k x {q}, pages of 1": replace(long, q_len=q) for q in (8, 16)}
    made |= {f"8 x 4k x {q}, pages of 1": replace(eight, page_size=1, q_len=q) for q in (4, 16)}
    made["32 x 500 x 16, pages of 1, lengths on the device"] = replace(
        eight, batch=32, context=500, q_len=16, page_size=1, lengths_on="device"
    )
    return made


# ---- settings ----------------------------------------------------------------------------------


def before(problem: AttentionProblem):
    def has_many_rows(asked, gpu):
        return (asked.page_size or 0) % 16 == 0 and HAS_MANY_ROWS(asked, gpu)

    cuda_heuristic.has_many_rows = has_many_rows
    try:
        return LEAN.default_config(problem, H200)
    finally:
        cuda_heuristic.has_many_rows = HAS_MANY_ROWS


def copy_without_fence() -> None:
    """The sources without the fence of who waits for copies of lanes: what it takes, no candidate."""
    folder = os.environ["WITHOUT_FENCE"] = os.path.join(tempfile.mkdtemp(), "lean")
    shutil.copytree(cuda_build._FOLDER, folder)
    path = os.path.join(folder, "rows_attend.cuh")
    text = open(path).read()
    line = "  if (!BULK) fence_proxy_async_shared_cta();\n"
    assert text.count(line) == 1
    open(path, "w").write(text.replace(line, ""))


@contextmanager
def without_fence():
    folder = cuda_build._FOLDER
    cuda_build._FOLDER = type(folder)(os.environ["WITHOUT_FENCE"])
    cuda_driver._function.cache_clear()
    try:
        yield
    finally:
        cuda_build._FOLDER = folder
        cuda_driver._function.cache_clear()


def variants(problem: AttentionProblem) -> dict:
    """Of copies by lanes, for the log."""
    after = LEAN.default_config(problem, H200)
    made = {"no fence": after}
    if after.chunk_tokens == 128:
        made["chunks of 64"] = replace(after, chunk_tokens=64, num_stages=6)
    return made


VARIED = ("1 x 8k x 512, pages of 1", "8 x 4k x 128, pages of 1", "1 x 32k x 16, pages of 1")


def candidates(problem: AttentionProblem) -> dict:
    after = LEAN.default_config(problem, H200)
    made = {"before": before(problem), "after": after}
    if after.of_warpgroups and after.copy == "bulk":
        made["lanes"] = replace(after, copy="async")
    return made


def compiled(job) -> str:
    problem, config = job
    build = CudaBuild.of(problem, config)
    compile_cuda(build.source((9, 0)))
    return f"{type(build).__name__} {build.rows} rows, bulk {build.bulk}"


# ---- the GPU -----------------------------------------------------------------------------------


def check(problems: list[AttentionProblem], seed: int) -> int:
    import torch

    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs

    wrong = by_lanes = 0
    for number, problem in enumerate(problems):
        config = LEAN.default_config(problem, H200)
        build = CudaBuild.of(problem, config)
        inputs = poison_unused(make_inputs(problem, "cuda", seed + number, score_scale=(1.0, 6.0)[number % 2]))
        reference = Reference(inputs)
        run = LEAN.prepare(inputs, config)
        failures = []
        for _ in range(3):
            inputs.poison()
            run()
            torch.cuda.synchronize()
            failures.append(reference.check(inputs).failure(LEAN.precision(problem)))
        by_lanes += int(build.rows > 32 and not build.bulk)
        if failure := next((f for f in failures if f), None):
            wrong += 1
            print(f"WRONG {problem.label}, {build.rows} rows, bulk {build.bulk}: {failure}", flush=True)
    said(f"{len(problems)} problems, 3 launches each, {by_lanes} by lanes of many_rows.cu: {wrong} wrong")
    return wrong


def prepared(label: str, each, config):
    if label != "no fence":
        return LEAN.prepare(each, config)
    with without_fence():
        return LEAN.prepare(each, config)


def compile_without_fence(job) -> str:
    with without_fence():
        return compiled(job)


def timed(name: str, problem: AttentionProblem) -> str:
    import torch

    from leanbench.core.inputs import make_inputs

    copies = max(2, min(12, -(-int(COLD_BYTES) // problem.kv_bytes)))
    inputs = [make_inputs(problem, "cuda", seed) for seed in range(copies)]
    graphs, outs, times = {}, {}, {}
    launches = copies * max(1, 8 // copies)
    asked = candidates(problem) | (variants(problem) if name in VARIED else {})
    for label, config in asked.items():
        runs = [prepared(label, each, config) for each in inputs]
        inputs[0].poison()
        for run in runs:
            run()
        torch.cuda.synchronize()
        outs[label] = inputs[0].out.float().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                runs[i % copies]()
        graphs[label], times[label] = (graph, runs), []
    for turn in range(ROUNDS + 1):
        for label, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replays = 1
            if turn:
                replays = max(1, int(ROUND_MS * 1e3 / (launches * times[label][0])))
            torch.cuda.synchronize()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times[label].append(start.elapsed_time(end) * 1e3 / (launches * replays))
    us = {label: statistics.median(each[1:]) for label, each in times.items()}
    apart = (outs["after"] - outs["before"]).norm() / outs["before"].norm()
    q_lens = problem.q_lens or (problem.q_len,) * problem.batch
    seen = sum(q * (n - (q - 1) / 2) for q, n in zip(q_lens, problem.contexts))
    flops = 4 * problem.q_heads * problem.head_dim * seen
    floor = max(flops / FLOPS, problem.kv_bytes / BYTES_PER_US)
    lanes = f"{us['lanes']:8.1f}" if "lanes" in us else "       -"
    others = "".join(f"; {label} {us[label]:.1f}" for label in us if label not in ("before", "after", "lanes"))
    return (
        f"{name:50s} {us['before']:8.1f} {us['after']:8.1f} {lanes} {us['before'] / us['after']:6.2f}x"
        f" {floor:7.1f} {apart:9.1e} {min(times['after'][1:]):7.1f}-{max(times['after'][1:]):.1f}{others}"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    draw = random.Random(seed)
    said(f"seed {seed}")
    kinds = drawn_kinds(draw)
    problems = [drawn_problem(kinds[i % KINDS], draw) for i in range(PROBLEMS)]
    timings = timed_problems()
    jobs = [(problem, LEAN.default_config(problem, H200)) for problem in problems]
    jobs += [(problem, config) for problem in timings.values() for config in candidates(problem).values()]
    jobs += [(timings[name], config) for name in VARIED for config in variants(timings[name]).values()]
    fenceless = [(timings[name], variants(timings[name])["no fence"]) for name in VARIED]
    unique = list({CudaBuild.of(*job): job for job in jobs}.values())
    if options.dry:
        for problem, config in jobs:
            build = CudaBuild.of(problem, config)
            print(problem.label, "|", type(build).__name__, build.rows, "rows, chunk", build.chunk, "stages", build.stages, "bulk", build.bulk)
        said(f"{len(jobs)} launches, {len(unique)} builds")
        return 0
    copy_without_fence()
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(compile_without_fence, job) for job in fenceless]
        list(pool.map(compiled, unique))
        [each.result() for each in waiting]
    said(f"{len(unique)} builds compiled on {cores} cores")
    wrong = check(problems, seed)
    rows = [timed(name, problem) for name, problem in timings.items()]
    said("timed: us, medians of 7 rounds; lanes: bulk copies replaced by 16 bytes a lane; floor: 700 TFLOP/s, 4.7 TB/s")
    print(f"{'32/8 heads x 128, bf16, NHD':50s} {'before':>8s} {'after':>8s} {'lanes':>8s} {'':>7s} {'floor':>7s} {'apart':>9s}   after, least-most")
    print("\n".join(rows))
    said("done" if not wrong else f"{wrong} WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
