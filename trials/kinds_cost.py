"""What kinds of attention cost: switches of lean.cu against one another on one H200, in a checkout of the branch kinds-cost:

    python gpu_job.py [--budget 58] [--only GROUP,...]

All builds are compiled first (processes); every variant is held against the fp64 reference (outputs NaN, caches poisoned where nothing is
to be read, twice the same bits) on its timed problem and on a small odd one; then each group's variants are timed in turn: replays of CUDA
graphs over cold copies, medians. A worker that hangs is ended, and the variant that it was at is left out. The table comes last.
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
import textwrap
import time
from dataclasses import replace

OUT = pathlib.Path(os.environ.get("OUT", "/tmp/out"))
os.environ.setdefault("LEANBENCH_CACHE", "/tmp/leanbench-cache")
BEGUN = float(os.environ.get("JOB_BEGUN", time.time()))
SEED = int(os.environ.get("JOB_SEED", time.time_ns() % 1_000_000))
STATE = pathlib.Path("/tmp/kindscost-state.json")

#: Switches of a build; `pairs`: of_head_pairs, `promotion`: of the tensor map (1: 64 bytes, 2: 128).
BASE = {}
H = {"halves": 1}
L = {"late_entry": 1}
HL = {"halves": 1, "late_entry": 1}
EL = {"late_entry": 1, "early_append": 1}
SF = {"sequences_first": 1}
P2 = {"pairs": 1, "halves": 1, "late_entry": 1}


def problem(batch, q_heads, kv_heads, context, head_dim, **kinds):
    from leanbench.core.problem import AttentionProblem

    kinds = {"dtype": "bf16", "kv_layout": "NHD"} | kinds
    return AttentionProblem(batch, q_heads, kv_heads, context, head_dim, **kinds)


def fp8(*sizes, **kinds):
    return problem(*sizes, **({"kv_dtype": "e4m3", "scaled": False} | kinds))


def default(p):
    from leanbench.gpu.catalogue import find
    from leanbench.kernels.lean.cuda_heuristic import any_length_heuristic, heuristic

    return (any_length_heuristic if p.lengths_on == "device" else heuristic)(p, find("h200"))


def groups():
    """Of a name: (label, problem, switches, changes of the heuristic's settings); the first is what others are compared with."""

    def settings(chunk, warps, stages, per_sm, cluster, copy="bulk", least=1, align=True):
        return {
            "chunk_tokens": chunk, "num_warps": warps, "num_stages": stages, "ctas_per_sm": per_sm, "cluster_size": cluster,
            "copy": copy, "min_tiles_per_cta": least, "align_grid": align, "tile_rows": 8,
        }  # fmt: skip

    dev = {"lengths_on": "device"}
    big = fp8(32, 64, 8, 4096, 128)
    paged, on_device, hnd = replace(big, page_size=64), replace(big, **dev), replace(big, kv_layout="HND")
    yield "fp8 32 x 64/8 x 4k x 128 (goal: 1.5% less)", [
        ("base", big, BASE, {}), ("h", big, H, {}), ("l", big, L, {}), ("hl", big, HL, {}),
        ("hl 16,4,4,2", big, HL, settings(16, 4, 4, 2, 1)), ("hl 32,4,2,2", big, HL, settings(32, 4, 2, 2, 1)),
        ("pairs 16,8,2,1", big, P2, settings(16, 8, 2, 1, 1)), ("pairs 16,4,4,1", big, P2, settings(16, 4, 4, 1, 1)),
        ("pairs 32,4,3,1", big, P2, settings(32, 4, 3, 1, 1)), ("pairs 32,4,2,1", big, P2, settings(32, 4, 2, 1, 1)),
        ("pairs 16,4,2,2", big, P2, settings(16, 4, 2, 2, 1)), ("HND", hnd, BASE, {}), ("HND hl", hnd, HL, {}),
        ("device", on_device, BASE, {}), ("device h", on_device, H, {}), ("device hl", on_device, HL, {}),
        ("device pairs 16,8,2,1", on_device, P2, settings(16, 8, 2, 1, 1, align=False)),
        ("p64 pairs 16,8,2,1", paged, P2, settings(16, 8, 2, 1, 1)),
        ("p64", paged, BASE, {}), ("p64 h", paged, H, {}), ("p64 hl", paged, HL, {}),
    ]  # fmt: skip
    d64 = fp8(8, 64, 8, 16384, 64)
    d64_dev = replace(d64, **dev)
    yield "fp8 8 x 64/8 x 16k x 64 (goal: 36.5)", [
        ("base", d64, BASE, {}), ("h", d64, H, {}), ("l", d64, L, {}), ("hl", d64, HL, {}),
        ("promote 128", d64, {"promotion": 2}, {}), ("promote 64", d64, {"promotion": 1}, {}),
        ("pairs 64,4,3,1,2", d64, P2, settings(64, 4, 3, 1, 2)), ("pairs 64,4,3,1,1", d64, P2, settings(64, 4, 3, 1, 1)),
        ("pairs 32,8,2,1,2", d64, P2, settings(32, 8, 2, 1, 2)), ("pairs 32,8,2,1,1", d64, P2, settings(32, 8, 2, 1, 1)),
        ("pairs 32,4,2,2,1", d64, P2, settings(32, 4, 2, 2, 1)), ("pairs 64,4,3,1,2 async", d64, P2, settings(64, 4, 3, 1, 2, "async")),
        ("device", d64_dev, BASE, {}), ("device hl", d64_dev, HL, {}),
        ("device pairs 64,4,3,1,2", d64_dev, P2, settings(64, 4, 3, 1, 2, align=False)),
        ("device pairs 32,8,2,1,1", d64_dev, P2, settings(32, 8, 2, 1, 1, align=False)),
    ]  # fmt: skip
    d64 = fp8(16, 64, 8, 16384, 64)
    yield "fp8 16 x 64/8 x 16k x 64 (goal: 70.6)", [
        ("base", d64, BASE, {}), ("h", d64, H, {}), ("hl", d64, HL, {}), ("promote 128", d64, {"promotion": 2}, {}),
        ("pairs 64,4,3,1,2", d64, P2, settings(64, 4, 3, 1, 2)), ("pairs 64,4,3,1,1", d64, P2, settings(64, 4, 3, 1, 1)),
        ("pairs 32,8,2,1,2", d64, P2, settings(32, 8, 2, 1, 2)), ("pairs 32,8,2,1,1", d64, P2, settings(32, 8, 2, 1, 1)),
        ("pairs 32,4,2,2,1", d64, P2, settings(32, 4, 2, 2, 1)), ("pairs 32,8,2,1,1 async", d64, P2, settings(32, 8, 2, 1, 1, "async")),
    ]  # fmt: skip
    host = fp8(8, 32, 8, 8192, 128)
    device = replace(host, **dev)
    two = settings(64, 4, 2, 1, 2, align=False)
    yield "fp8 8 x 32/8 x 8k x 128 (goal on the device: 36.4)", [
        ("host", host, BASE, {}), ("host h", host, H, {}), ("host hl", host, HL, {}),
        ("device", device, BASE, {}), ("device h", device, H, {}), ("device l", device, L, {}), ("device hl", device, HL, {}),
        ("device hl 32,8,2,1,1", device, HL, settings(32, 8, 2, 1, 1, align=False)), ("device 2", device, BASE, two), ("device hl 2", device, HL, two),
    ]  # fmt: skip
    draw = random.Random(SEED)
    for lengths in ([draw.randint(2048, 8192) for _ in range(8)], [8192, *(draw.randint(64, 1024) for _ in range(7))]):
        drawn = fp8(8, 32, 8, tuple(lengths), 128, capacity=8192, **dev)
        yield f"fp8 8 x 32/8 of {sum(lengths) // 8} in the mean x 128", [
            ("device", drawn, BASE, {}), ("device hl", drawn, HL, {}), ("device hl 2", drawn, HL, two),
        ]  # fmt: skip
    plain = problem(1, 32, 8, 32768, 128)
    sinks, alibi, cap = replace(plain, sinks=True), replace(plain, alibi=True), replace(plain, softcap=50.0)
    lin = {"linear_alibi": 1}
    yield "kinds 1 x 32/8 x 32k (goal: 3% over plain)", [
        ("plain", plain, BASE, {}), ("plain l", plain, L, {}), ("softcap", cap, BASE, {}), ("softcap l", cap, L, {}),
        ("sinks", sinks, BASE, {}), ("sinks l", sinks, L, {}),
        ("alibi", alibi, BASE, {}), ("alibi l", alibi, L, {}), ("alibi lin", alibi, lin, {}), ("alibi lin l", alibi, lin | L, {}),
    ]  # fmt: skip
    for name, p in (
        ("1 x 32/8 x 4k", problem(1, 32, 8, 4096, 128)),
        ("24 x 1k x 64 fp16 HND", problem(1, 24, 24, 1024, 64, dtype="fp16", kv_layout="HND")),
        ("8 x 32/8 x 1k, device", problem(8, 32, 8, 1024, 128, **dev)),
        ("48 x 32/4 x 600, pages of 16, device", problem(48, 32, 4, 600, 128, page_size=16, **dev)),
    ):
        yield f"late entry, {name}", [("base", p, BASE, {}), ("l", p, L, {})]
    for batch, page in ((1, None), (8, None), (8, 64), (32, None)):
        p = problem(batch, 32, 8, 4096, 128, capacity=8192, page_size=page, **dev)
        app, rot = replace(p, append=1), replace(p, append=1, rotary_dim=128)
        yield f"append {batch} x 4k{f', pages of {page}' if page else ''} (goal: 1 us over plain)", [
            ("plain", p, BASE, {}), ("plain l", p, L, {}), ("app", app, BASE, {}), ("app l", app, L, {}), ("app el", app, EL, {}),
            ("rot", rot, BASE, {}), ("rot l", rot, L, {}), ("rot el", rot, EL, {}),
        ]  # fmt: skip
    p = fp8(64, 64, 8, 4096, 128)
    yield "heads in step, fp8 64 x 64/8 x 4k", [
        ("base", p, BASE, {}), ("hl", p, HL, {}), ("sf", p, SF, {}), ("hl sf", p, HL | SF, {}),
        ("pairs 32,4,3,1", p, P2, settings(32, 4, 3, 1, 1)), ("pairs 16,8,2,1", p, P2, settings(16, 8, 2, 1, 1)),
        ("pairs 16,8,2,1 sf", p, P2 | SF, settings(16, 8, 2, 1, 1)),
    ]  # fmt: skip
    p = fp8(64, 32, 8, 8192, 128)
    yield "heads in step, fp8 64 x 32/8 x 8k", [("base", p, BASE, {}), ("hl", p, HL, {}), ("hl sf", p, HL | SF, {})]
    p = problem(64, 32, 8, 4096, 128)
    yield "heads in step, bf16 64 x 32/8 x 4k", [("base", p, BASE, {}), ("l", p, L, {}), ("sf", p, SF, {})]


def small(p):
    """A problem of the same build with odd lengths."""
    heads = {"batch": 3, "kv_heads": 4, "q_heads": 4 * p.group_size}
    if p.lengths_on == "device":
        return replace(p, **heads, context=(700, 130, 1), capacity=1024)
    return replace(p, **heads, context=515)


def config_of(p, changes):
    return replace(default(p), **changes)


def switched(build, switches):
    build = build.of_head_pairs() if switches.get("pairs") else build
    return replace(build, **{name: value for name, value in switches.items() if name not in ("pairs", "promotion")})


def compile_one(build):
    from leanbench.compile.nvrtc import compile_cuda

    begun = time.time()
    binary = compile_cuda(build.source((9, 0)))
    return build, binary.registers_per_thread, binary.spilled_registers, time.time() - begun


def elapsed():
    return time.time() - BEGUN


def worker(skip, only, budget):
    import torch
    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.kernels.lean import cuda, cuda_driver

    current = {}
    plain_build, plain_modes = cuda.build_of, cuda_driver._map_modes

    def modes(kv_bytes, column_bytes):
        dtype, interleave, swizzle, promotion, fill = plain_modes(kv_bytes, column_bytes)
        return dtype, interleave, swizzle, current["switches"].get("promotion", promotion), fill

    cuda.build_of = lambda inputs, config: switched(plain_build(inputs, config), current["switches"])
    cuda_driver._map_modes = modes

    def runner(inputs, switches, config):
        current["switches"] = switches
        return cuda.launch_of(inputs, config).run()

    def at(name, what):
        STATE.write_text(json.dumps({"variant": name, "what": what, "time": time.time()}))

    wanted = [(g, [v for v in variants if f"{g}/{v[0]}" not in skip]) for g, variants in groups() if not only or any(o in g for o in only)]
    wrong = set()
    for group, variants in wanted:
        made, lines = {}, []
        for label, p, switches, changes in variants:
            config = config_of(p, changes)
            for size, scale in ((small(p), 8.0), (p, 1.0)):
                at(f"{group}/{label}", "check")
                if size not in made:
                    inputs = poison_unused(make_inputs(size, "cuda", score_scale=scale))
                    made[size] = inputs, Reference(inputs, max_pairs=4)
                inputs, reference = made[size]
                run = runner(inputs, switches, config)
                before = None
                for _ in range(2):
                    inputs.poison()
                    run()
                    torch.cuda.synchronize()
                    failure = reference.check(inputs).failure(p.dtype)
                    if failure is None and before is not None and not torch.equal(before, inputs.out):
                        failure = "other bits in a second run"
                    before = inputs.out.clone()
                    if failure:
                        wrong.add(f"{group}/{label}")
                        lines.append(f"{label} at {size.label}: {failure}")
                        break
        print(f"{elapsed():.0f} s check {group}: {'; '.join(lines) or f'right, {len(variants)}'}", flush=True)
        del made
        if elapsed() > 0.55 * budget:
            print("no more time for checks", flush=True)
            break
    print(f"{len(wrong)} wrong: {sorted(wrong)}", flush=True)

    table = []
    for group, variants in wanted:
        if elapsed() > budget:
            print("no time left for", group, flush=True)
            continue
        # The sizes of a group read the same caches.
        first = variants[0][1]
        read = sum(first.contexts) * first.kv_heads * first.token_bytes
        count = min(64, max(2, -(-450_000_000 // read)))
        # Whole turns over the copies: 4 GB, and 12 launches at least, as a replay has 2 us of its own.
        launches = count * -(-int(min(96, max(12, 4e9 / read))) // count)
        copies = {}
        for _, p, _, _ in variants:
            if p in copies:
                continue
            copies[p] = [make_inputs(p, "cuda", seed=i) for i in range(count)]
            own = copies[first]
            if p is not first and p.page_size == first.page_size and p.append == 0 and first.append == 0:
                copies[p] = [
                    replace(inputs, k_cache=other.k_cache, v_cache=other.v_cache)
                    if inputs.k_cache.shape == other.k_cache.shape and inputs.k_cache.stride() == other.k_cache.stride()
                    else inputs
                    for inputs, other in zip(copies[p], own, strict=True)
                ]
        stream, graphs = torch.cuda.Stream(), {}
        with torch.cuda.stream(stream):
            for label, p, switches, changes in variants:
                at(f"{group}/{label}", "time")
                calls = [runner(inputs, switches, config_of(p, changes)) for inputs in copies[p]]
                calls[0]()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for i in range(launches):
                        calls[i % count]()
                graphs[label] = graph, calls
            samples = {name: [] for name in graphs}
            for index in range(41 if read < 3e8 else 25):
                order = list(graphs)
                random.shuffle(order)
                for name in order:
                    at(f"{group}/{name}", "time")
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record(stream)
                    graphs[name][0].replay()
                    end.record(stream)
                    end.synchronize()
                    if index > 0:
                        samples[name].append(1e3 * begin.elapsed_time(end) / launches)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        base = medians[variants[0][0]]
        cells = " | ".join(
            f"{name}{' WRONG' if f'{group}/{name}' in wrong else ''} {us:.2f} ({us / base:.3f})" for name, us in medians.items()
        )
        table.append(f"{group}, {read / 1e6:.0f} MB (4.5 TB/s: {read / 4.5e6:.1f}): {cells}")
        print(f"{elapsed():.0f} s", table[-1], flush=True)
        OUT.mkdir(parents=True, exist_ok=True)
        with (OUT / "kindscost.jsonl").open("a") as lines:
            print(json.dumps({"group": group, "seed": SEED, "us": samples}), file=lines)
        del graphs, copies
    print(f"\nus a launch, median (over the group's first); {len(wrong)} wrong; seed {SEED}")
    print("\n".join(textwrap.fill(line, 200, subsequent_indent="    ", break_on_hyphens=False) for line in table), flush=True)


def watched(skip, only, budget):
    """Runs the worker; ends it where nothing has moved for 15 s, and names what it was at."""
    while True:
        STATE.write_text(json.dumps({"variant": None, "what": "start", "time": time.time() + 15}))
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--skip", ";".join(skip), "--only", ",".join(only), "--budget", str(budget)],
            env={**os.environ, "JOB_BEGUN": str(BEGUN), "JOB_SEED": str(SEED)},
        )
        hung = False
        while process.poll() is None:
            time.sleep(0.2)
            try:
                state = json.loads(STATE.read_text())
            except ValueError:
                continue
            if time.time() - state["time"] > 15 or elapsed() > budget + 20:
                hung = True
                process.kill()
                process.wait()
        if process.returncode == 0:
            return
        state = json.loads(STATE.read_text())
        print(f"{'hung' if hung else f'ended with {process.returncode}'} at {state['variant']} ({state['what']})", flush=True)
        if state["variant"] is None or elapsed() > budget:
            return
        skip = [*skip, state["variant"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=58)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--skip", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    skip, only = ([word for word in words if word] for words in (args.skip.split(";"), args.only.split(",")))
    if args.worker:
        worker(skip, only, args.budget)
        return
    from leanbench.gpu.catalogue import find
    from leanbench.kernels.lean.cuda_build import CudaBuild

    builds, unfit = {}, []
    for group, variants in groups():
        for label, p, switches, changes in variants:
            for size in (p, small(p)):
                build = switched(CudaBuild.of(size, config_of(p, changes)), switches)
                builds.setdefault(build, f"{group}/{label}")
                if not build.fits(find("h200")):
                    unfit.append(f"{group}/{label}")
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for build, registers, spilled, seconds in pool.map(compile_one, builds):
            if spilled or args.compile_only:
                print(builds[build], f"{registers} registers, {spilled} bytes of stack, shared {build.shared_bytes}, {seconds:.1f} s", flush=True)
    print(f"{elapsed():.0f} s: {len(builds)} builds; find no room: {unfit}", flush=True)
    if args.compile_only:
        return
    watched([*skip, *unfit], only, args.budget)


if __name__ == "__main__":
    main()
