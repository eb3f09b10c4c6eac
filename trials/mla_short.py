"""lean_mla on one H200: variants of one build against one another. In a checkout of the branch, root on PYTHONPATH:

    python gpu_job.py [--budget 58]

Builds are compiled first (processes), every variant is held against the fp64 reference on the problems of CHECKS (outputs poisoned
with NaN, cache poisoned past the ends, a second run over NaN with the same bits), then all variants of a problem are timed in turn:
replays of a CUDA graph over cold copies, medians. A worker that hangs is ended, and the variant it was at is left out.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

OUT = pathlib.Path(os.environ.get("OUT", "/tmp/out"))
os.environ.setdefault("LEANBENCH_CACHE", "/tmp/leanbench-cache")
BEGUN = float(os.environ.get("JOB_BEGUN", time.time()))
STATE = pathlib.Path("/tmp/mlashort-state.json")

VARIANTS = {
    "base": {},
    "page": {"early_page": 1},
    "v1": {"early_page": 1, "values_first": 1},
    "v2": {"early_page": 1, "values_first": 2},
    "c4": {"early_page": 1, "column_groups": 4},
    "c4f": {"early_page": 1, "column_groups": 4, "merge_few": 1},
    "c2f": {"early_page": 1, "column_groups": 2, "merge_few": 1},
    "w": {"early_page": 1, "wide_merge": 1},
    "wv1": {"early_page": 1, "wide_merge": 1, "values_first": 1},
    "wv2": {"early_page": 1, "wide_merge": 1, "values_first": 2},
    "wv1f": {"early_page": 1, "wide_merge": 1, "values_first": 1, "merge_few": 1},
    "wc4f": {"early_page": 1, "wide_merge": 1, "column_groups": 4, "merge_few": 1},
}
OF_128 = ("base", "page", "v1", "v2", "c4", "c4f", "c2f")
OF_16 = ("base", "w", "wv1", "wv2", "wv1f", "wc4f")
OF_64 = ("base", "v1", "v2")

# (batch, heads, context or lengths, lengths on the device and their capacity)
CHECKS = [
    (1, 128, 1024, None),
    (1, 128, 4096, None),
    (1, 128, 1000, None),
    (1, 128, 1, None),
    (3, 128, 700, None),
    (70, 128, 200, None),
    (1, 128, 32768, None),
    (5, 128, (1, 64, 430, 4000, 90), 4096),
    (32, 16, 4096, None),
    (1, 16, 1000, None),
    (5, 16, (1, 700, 4100, 64, 3000), 8192),
    (1, 16, 32768, None),
    (3, 64, 1000, None),
]

# (batch, heads, context): (variant, min_tiles_per_cta; None: the heuristic's)
PLAIN = [("base", None), ("page", None), ("v1", None), ("v2", None)]
TIMED = {
    (1, 128, 1024): [*PLAIN[:2], ("c4", 1), ("c4f", 1), ("c4f", 2), ("c2f", 1), ("c2f", 2)],
    (1, 128, 4096): [*PLAIN, ("c4f", 4), ("c4", 4), ("c2f", 2), ("c2f", 4), ("c4f", 8)],
    (1, 128, 32768): [*PLAIN, ("c2f", 16), ("c4f", 32)],
    (1, 128, 131072): PLAIN,
    (8, 128, 8192): [*PLAIN, ("c2f", None)],
    (32, 128, 4096): PLAIN,
    (128, 128, 1024): PLAIN,
    (128, 128, 4096): PLAIN,
    (32, 16, 4096): [("base", None), ("w", None), ("wv1", None), ("wv2", None), ("wv1f", None)],
    (1, 16, 32768): [("base", None), ("w", None), ("wv1", None), ("wv2", None), ("wc4f", 16), ("wc4f", 32)],
    (1, 16, 1024): [("base", None), ("w", None), ("wv1f", None), ("wc4f", 1), ("wc4f", 2)],
    (32, 64, 4096): [("base", None), ("v1", None), ("v2", None)],
    (64, 128, 32768): PLAIN,
}


def problem_of(batch, heads, context, capacity=None):
    from leanbench.core.problem import AttentionProblem

    kinds = {"capacity": capacity, "lengths_on": "device"} if capacity else {}
    return AttentionProblem(batch, heads, 1, context, 576, "bf16", page_size=64, latent=True, v_head_dim=512, **kinds)


def variants_of(heads):
    return {128: OF_128, 16: OF_16, 64: OF_64}[heads]


def build_of(heads, variant, ragged):
    from dataclasses import replace

    from leanbench.kernels.mla.build import MlaBuild

    return replace(MlaBuild.of_shape(heads, 1, True, True, ragged, 64), **VARIANTS[variant])


def compile_one(job):
    from leanbench.compile.nvrtc import compile_cuda

    begun = time.time()
    binary = compile_cuda(build_of(*job).source((9, 0)))
    return job, binary.registers_per_thread, binary.spilled_registers, time.time() - begun


def elapsed():
    return time.time() - BEGUN


def worker(skip, stage, budget):
    import torch
    from dataclasses import replace
    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.kernels.mla import LEAN_MLA, launch
    from leanbench.kernels.mla.configs import MlaConfig

    current = {}
    plain = launch._build
    launch._build = lambda inputs: replace(plain(inputs), **VARIANTS[current["variant"]])

    def runner(inputs, variant, config):
        current["variant"] = variant
        return launch.launch_of(inputs, config).run()

    def at(variant, what):
        STATE.write_text(json.dumps({"variant": variant, "what": what, "time": time.time()}))

    if stage == "check":
        wrong = 0
        for number, (batch, heads, context, capacity) in enumerate(CHECKS):
            problem = problem_of(batch, heads, context, capacity)
            inputs = poison_unused(make_inputs(problem, "cuda", score_scale=8.0 if number % 2 else 1.0))
            reference = Reference(inputs, max_pairs=8)
            line = []
            for variant in variants_of(heads):
                if variant in skip:
                    continue
                # Some splits of the sizes that are timed, and others.
                for least in (1, 2, 3) if capacity is None and context in (1024, 1000, 700) else (None,):
                    config = LEAN_MLA.config_of(inputs.context, capacity is None)
                    if least is not None:
                        config = MlaConfig(least, True)
                    at(variant, f"check {batch} x {context} x {heads}")
                    run = runner(inputs, variant, config)
                    inputs.poison()
                    run()
                    torch.cuda.synchronize()
                    failure = reference.check(inputs).failure("bf16")
                    before = inputs.out.clone()
                    inputs.poison()
                    run()
                    torch.cuda.synchronize()
                    if failure is None and not torch.equal(before, inputs.out):
                        failure = "other bits in a second run"
                    if failure:
                        wrong += 1
                        line.append(f"{variant}/{least}: {failure}")
            print(f"{elapsed():.0f} s check {batch} x {context} x {heads}: {'; '.join(line) or 'right'}", flush=True)
        print(f"{wrong} wrong", flush=True)
        return

    table = []
    for (batch, heads, context), runs in TIMED.items():
        if elapsed() > budget:
            print("no time left for", batch, context, heads, flush=True)
            continue
        problem = problem_of(batch, heads, context)
        size = batch * context * 1152
        count = min(256, max(1 if size > 1e9 else 2, -(-400_000_000 // size)))
        copies = [make_inputs(problem, "cuda", seed=i) for i in range(count)]
        launches = max(count, 8 if size < 5e8 else 2)
        stream = torch.cuda.Stream()
        graphs = {}
        with torch.cuda.stream(stream):
            for variant, least in runs:
                if variant in skip:
                    continue
                at(variant, f"time {batch} x {context} x {heads}")
                config = LEAN_MLA.config_of(context, True)
                if least is not None:
                    config = MlaConfig(least, True)
                calls = [runner(inputs, variant, config) for inputs in copies]
                calls[0]()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for i in range(launches):
                        calls[i % count]()
                graphs[variant, least] = graph, calls
            samples = {name: [] for name in graphs}
            rounds = 4 if size * launches > 3e9 else 12 if size > 3e8 else 20
            for index in range(rounds + 1):
                order = list(graphs)
                random.shuffle(order)
                for name in order:
                    at(name[0], f"time {batch} x {context} x {heads}")
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record(stream)
                    graphs[name][0].replay()
                    end.record(stream)
                    end.synchronize()
                    if index > 0:
                        samples[name].append(1e3 * begin.elapsed_time(end) / launches)
                    if size > 3e8:
                        time.sleep(0.004)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        base = medians[("base", None)]
        floor = size / 4.7e6
        cells = " ".join(
            f"{v}{'' if least is None else f'/{least}'}={us:.2f}({us / base:.3f})" for (v, least), us in medians.items()
        )
        table.append(f"{batch} x {context} x {heads} ({size / 1e6:.1f} MB, floor {floor:.1f}): {cells}")
        print(f"{elapsed():.0f} s", table[-1], flush=True)
        OUT.mkdir(parents=True, exist_ok=True)
        with (OUT / "mlashort.jsonl").open("a") as lines:
            print(json.dumps({"problem": (batch, heads, context), "us": {f"{v}/{m}": t for (v, m), t in samples.items()}}), file=lines)
        del graphs, copies
        torch.cuda.empty_cache()
    print("\nus a launch (median; over base); variant/min_tiles_per_cta")
    print("\n".join(table), flush=True)


def watched(stage, skip, budget):
    """Runs a worker; ends it where nothing has moved for 12 s, and names what it was at."""
    while True:
        STATE.write_text(json.dumps({"variant": None, "what": "start", "time": time.time() + 15}))
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", stage, "--skip", ",".join(skip), "--budget", str(budget)],
            env={**os.environ, "JOB_BEGUN": str(BEGUN)},
        )
        hung = False
        while process.poll() is None:
            time.sleep(0.2)
            try:
                state = json.loads(STATE.read_text())
            except ValueError:
                continue
            if time.time() - state["time"] > 12 or elapsed() > budget + 20:
                hung = True
                process.kill()
                process.wait()
        if process.returncode == 0:
            return skip
        state = json.loads(STATE.read_text())
        print(f"{stage}: {'hung' if hung else f'ended with {process.returncode}'} at {state['variant']} ({state['what']})", flush=True)
        if state["variant"] in (None, "base") or elapsed() > budget:
            return skip
        skip = [*skip, state["variant"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=58)
    parser.add_argument("--worker")
    parser.add_argument("--skip", default="")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    skip = [name for name in args.skip.split(",") if name]
    if args.worker:
        worker(skip, args.worker, args.budget)
        return
    jobs = [(heads, variant, ragged) for heads in (128, 16, 64) for variant in variants_of(heads) for ragged in ((False, True) if heads != 64 else (False,))]
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for job, registers, spilled, seconds in pool.map(compile_one, jobs):
            if spilled or args.compile_only:
                print(job, f"{registers} registers, {spilled} spilled, {seconds:.1f} s", flush=True)
    print(f"{elapsed():.0f} s: {len(jobs)} builds", flush=True)
    if args.compile_only:
        return
    skip = watched("check", skip, args.budget)
    watched("time", skip, args.budget)


if __name__ == "__main__":
    main()
