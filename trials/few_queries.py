"""A few query tokens on one H200: switches and settings of lean.cu and many_rows.cu beside the heuristic's.

    cd CHECKOUT; PYTHONPATH=$PWD python3 gpu_job.py [--budget 58] [--compile-only] [--list]

Builds are compiled first (processes). Each variant is held against the fp64 reference on a problem of an odd length (outputs
poisoned with NaN, NaN past the ends, a second run with the same bits) and again on the timed tensors; then all query tokens and
variants of a size are timed in turn: replays of a CUDA graph over cold copies, medians. A worker that hangs is ended, and the variant
it was at is left out. Timelines of a few launches, then the table.
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
from dataclasses import replace

OUT = pathlib.Path(os.environ.get("OUT", "/tmp/out"))
os.environ.setdefault("LEANBENCH_CACHE", "/tmp/leanbench-cache")
BEGUN = float(os.environ.get("JOB_BEGUN", time.time()))
STATE = pathlib.Path("/tmp/fewq-state.json")

# (query heads, KV heads, head_dim): sizes (batch, context, context of the check), query tokens.
SIZES = [(1, 32768, 4999), (8, 8192, 1333), (32, 4096, 715), (4, 4096, 1111)]
CELLS = {
    (32, 8, 128): (SIZES, (1, 2, 4, 8, 16)),
    (64, 8, 128): (SIZES[:2], (1, 2, 4, 8, 16)),
    (8, 1, 64): (SIZES[1:3], (1, 4, 16)),
}
# Clusters that an H200 holds at once.
CLUSTERS = {8: 15, 4: 30, 2: 66}
TIMELINES = {  # (heads, size): (query tokens, variant)
    ((32, 8, 128), 1): [(1, "base"), (16, "base"), (16, "A"), (16, "E8g2"), (4, "L32x3c8")],
    ((32, 8, 128), 8): [(1, "base"), (16, "base"), (16, "H1"), (16, "E2g1"), (4, "L32x3c2")],
}


def elapsed():
    return time.time() - BEGUN


def problem_of(heads, batch, context, q_len, room=0):
    from leanbench.core.problem import AttentionProblem

    q_heads, kv_heads, head_dim = heads
    kinds = {"capacity": context + room} if room else {}
    return AttentionProblem(batch, q_heads, kv_heads, context, head_dim, "bf16", "NHD", q_len=q_len, **kinds)


def variants(problem):
    """{name: (settings, switches of the build)}; base: the heuristic's."""
    from leanbench.gpu.catalogue import find
    from leanbench.kernels.lean.cuda_build import CudaBuild
    from leanbench.kernels.lean.cuda_heuristic import cuda_config, heuristic, many_rows_config

    gpu = find("h200")
    base = heuristic(problem, gpu)
    found = {"base": (base, {})}
    if problem.q_len == 1:
        return found
    rows = problem.q_len * problem.group_size
    tiles, lean_tiles = problem.batch * problem.kv_heads, -(-problem.context // 128)
    wide, thorough = problem.head_dim == 128, problem.q_heads == 32
    cluster = next((size for size, most in CLUSTERS.items() if tiles <= most), 1)
    if cluster == 4 and tiles > 15:
        cluster = 4 if tiles <= 30 else 2
    # lean.cu, one output tile of up to 16 rows: L<chunk>x<stages>c<cluster>, states over the ring where the third stage
    # asks for that.
    if rows <= 16:
        padded = 8 if rows <= 8 else 16
        shapes = [(32, 4, 2, 1), (32, 4, 3, 1), (16, 8, 2, 1), (16, 8, 3, 1)]
        if tiles > 132:
            shapes = [(16, 4, 2, 2), (16, 4, 3, 2), (16, 4, 4, 2)]
        for size in dict.fromkeys((cluster, 1)):
            for chunk, warps, stages, per_sm in shapes:
                if size == 1 and tiles <= 132 and (not thorough or stages != 3 or cluster == 8):
                    continue
                if not wide and warps == 4:
                    chunk = 2 * chunk
                config = cuda_config(
                    chunk, warps, stages, per_sm, size, padded, "bulk", lean_tiles if size > 1 else 1, True
                )
                late = not CudaBuild.of(problem, config).fits(gpu)
                build = replace(CudaBuild.of(problem, config), late_scratch=int(late))
                if build.fits(gpu) and config != base:
                    found[f"L{chunk}x{stages}c{size}"] = config, {"late_scratch": int(late)}
    # many_rows.cu.
    own = many_rows_config(problem, gpu)
    if base != own:
        found["M"] = own, {}
    splits = max(1, own.ctas_per_sm * 132 // tiles)
    fewer = (2,) if own.ctas_per_sm == 2 else (3, 4) if thorough else (4,)
    for stages in fewer:
        if own.num_stages > stages:
            found[f"s{stages}"] = replace(own, num_stages=stages), {}
    if splits > 2:
        found["A"] = own, {"reread_missing": 1}
        found["A4"] = replace(own, num_stages=4), {"reread_missing": 1}
    if splits == 2:
        found["H1"] = own, {"share_halves": 1}
        found["H2"] = own, {"share_halves": 2}
        found["H1s4"] = replace(own, num_stages=4), {"share_halves": 1}
    if cluster > 1 and rows <= 64:
        stages = 6
        for groups in (1, 2):
            name = f"E{cluster}g{groups}"
            found[name] = cuda_config(64, 4 * groups, stages, 1, cluster, 64, "bulk", lean_tiles, True), {}
            if thorough and (groups == 2) == (cluster == 8):
                found[name + "s4"] = replace(found[name][0], num_stages=4), {}
    return found


def build_of(problem, variant):
    from leanbench.kernels.lean.cuda_build import CudaBuild

    config, switches = variants(problem)[variant]
    return replace(CudaBuild.of(problem, config), **switches)


def cells():
    for heads, (sizes, q_lens) in CELLS.items():
        for size in sizes:
            yield heads, size, q_lens


def all_builds():
    """{build: where it is first of use}, timelines' too."""
    builds = {}
    for heads, (batch, context, odd), q_lens in cells():
        for q_len in q_lens:
            for length in (context, odd):
                problem = problem_of(heads, batch, length, q_len)
                for variant in variants(problem):
                    builds.setdefault(build_of(problem, variant), f"{problem.label} {variant}")
    for (heads, batch), wanted in TIMELINES.items():
        context = next(size[1] for size in SIZES if size[0] == batch)
        for q_len, variant in wanted:
            problem = problem_of(heads, batch, context, q_len)
            if variant in variants(problem):
                builds.setdefault(replace(build_of(problem, variant), max_events=4), f"{problem.label} {variant} events")
    return builds


def compile_one(job):
    from leanbench.compile.nvrtc import compile_cuda

    build, label = job
    binary = compile_cuda(build.source((9, 0)))
    return label, build, binary.registers_per_thread, binary.spilled_registers


def with_queries(inputs, q_len):
    """The same caches with the last query tokens."""
    import torch

    q = inputs.q[:, -q_len:].contiguous()
    return replace(
        inputs, q=q, out=torch.empty_like(q), lse=torch.empty(q.shape[0], q.shape[2], q_len, device=q.device)
    )


def worker(skip, stage, budget):
    import torch
    from leanbench.check.poison import poison_unused
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.kernels.lean import cuda

    current, plain = {"switches": {}}, cuda.build_of
    cuda.build_of = lambda inputs, config: replace(plain(inputs, config), **current["switches"])

    def launch_of(inputs, config, switches):
        current["switches"] = switches
        return cuda.launch_of(inputs, config)

    def at(name, what):
        STATE.write_text(json.dumps({"variant": name, "what": what, "time": time.time()}))

    def key_of(heads, batch, q_len, variant):
        return f"{heads[0]}/{heads[1]}x{heads[2]}:{batch}:q{q_len}:{variant}"

    if stage == "check":
        wrong = checked = 0
        for heads, (batch, _, odd), q_lens in cells():
            whole = poison_unused(make_inputs(problem_of(heads, batch, odd, max(q_lens), 200), "cuda", score_scale=random.choice((1.0, 6.0))))
            line = []
            for q_len in q_lens:
                problem, inputs = problem_of(heads, batch, odd, q_len), with_queries(whole, q_len)
                reference = Reference(inputs, max_pairs=6)
                for variant, (config, switches) in variants(problem).items():
                    key = key_of(heads, batch, q_len, variant)
                    if key in skip:
                        continue
                    at(key, "check")
                    try:
                        run = launch_of(inputs, config, switches).run()
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
                    except Exception as error:  # a setting that does not fit is told, not fatal
                        failure = repr(error)[:200]
                    checked += 1
                    if failure:
                        wrong += 1
                        line.append(f"q{q_len} {variant}: {failure}")
            if line:
                print(f"{elapsed():.0f} s check {heads} {batch} x {odd}: {'; '.join(line)}", flush=True)
        print(f"{elapsed():.0f} s: {checked} checked on odd lengths, {wrong} wrong", flush=True)
        return

    table, timelines, summary = [], [], []
    for heads, (batch, context, _), q_lens in cells():
        if elapsed() > budget - 3:
            print("no time left for", heads, batch, context, flush=True)
            continue
        size = 4 * batch * context * heads[1] * heads[2]
        count = max(2, -(-450_000_000 // size))
        copies = [make_inputs(problem_of(heads, batch, context, max(q_lens)), "cuda", seed=i) for i in range(count)]
        launches = count * max(1, round(12 / count))
        stream = torch.cuda.Stream()
        graphs, kept = {}, []
        wrong = []
        with torch.cuda.stream(stream):
            for q_len in q_lens:
                problem = problem_of(heads, batch, context, q_len)
                own = [with_queries(inputs, q_len) for inputs in copies]
                reference = Reference(own[0], max_pairs=2)
                for variant, (config, switches) in variants(problem).items():
                    key = key_of(heads, batch, q_len, variant)
                    if key in skip:
                        continue
                    at(key, "time")
                    try:
                        made = [launch_of(inputs, config, switches) for inputs in own]
                        calls = [launch.run() for launch in made]
                    except Exception as error:
                        wrong.append(f"q{q_len} {variant}: {error!r}"[:200])
                        continue
                    own[0].poison()
                    calls[0]()
                    torch.cuda.synchronize()
                    if failure := reference.check(own[0]).failure("bf16"):
                        wrong.append(f"q{q_len} {variant}: {failure}")
                        continue
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        for i in range(launches):
                            calls[i % count]()
                    graphs[q_len, variant] = graph
                    kept.append((own, made, calls))
            samples = {name: [] for name in graphs}
            rounds = 12 if size > 3e8 else 20
            for index in range(rounds + 1):
                order = list(graphs)
                random.shuffle(order)
                for name in order:
                    at(key_of(heads, batch, *name), "time")
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record(stream)
                    graphs[name].replay()
                    end.record(stream)
                    end.synchronize()
                    if index > 0:
                        samples[name].append(1e3 * begin.elapsed_time(end) / launches)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        label = f"{heads[0]}/{heads[1]} x {heads[2]}, {batch} x {context}"
        if wrong:
            print(f"{label}: WRONG {'; '.join(wrong)}", flush=True)
        one = medians.get((1, "base"), float("nan"))
        table.append(f"{label} ({size / 1e6:.0f} MB, {size / 4.7e6:.1f} us at 4.7 TB/s): 1 query token {one:.2f} us, limit {1.05 * one:.2f}")
        for q_len in q_lens[1:]:
            own = {v: us for (q, v), us in medians.items() if q == q_len}
            if not own:
                continue
            table.append(f"  q{q_len}: " + " ".join(f"{v}={us:.2f}({us / one:.3f})" for v, us in own.items()))
            best = min(own, key=own.__getitem__)
            summary.append(f"{label} q{q_len}: base {own.get('base', float('nan')) / one:.3f} -> {best} {own[best] / one:.3f}")
        OUT.mkdir(parents=True, exist_ok=True)
        with (OUT / "fewq.jsonl").open("a") as lines:
            print(json.dumps({"problem": label, "us": {f"q{q}/{v}": t for (q, v), t in samples.items()}}), file=lines)
        for q_len, variant in TIMELINES.get((heads, batch), []) if elapsed() < budget - 4 else []:
            if (q_len, variant) not in medians:
                continue
            at(key_of(heads, batch, q_len, variant), "timeline")
            config, switches = variants(problem_of(heads, batch, context, q_len))[variant]
            runs, events = [], []
            for inputs in copies:
                launch = launch_of(with_queries(inputs, q_len), config, switches)
                events.append(torch.full((launch.grid, 12), -1, dtype=torch.int64, device="cuda"))
                runs.append(launch.traced(events[-1], 4).run())
            for _ in range(8):
                for run in runs:
                    run()
            torch.cuda.synchronize()
            lines = []
            for rows in events[1:]:
                rows = [row for row in rows.tolist() if row[3] > 0]
                zero = min(row[0] for row in rows)
                of = lambda kind: sorted((row[5 + 2 * i] - zero) / 1e3 for row in rows for i in range(row[3]) if row[4 + 2 * i] >> 32 == kind)
                begins, tiles, ends = of(0), of(1), sorted((row[1] - zero) / 1e3 for row in rows)
                middle = lambda times: times[len(times) // 2] if times else float("nan")
                lines.append((middle(begins), begins[-1], tiles[0], middle(tiles), tiles[-1], ends[-1]))
            shown = [statistics.median(column) for column in zip(*lines)]
            timelines.append(
                f"  {label} q{q_len} {variant}: first part known {shown[0]:.1f} (last {shown[1]:.1f}), tiles done {shown[2]:.1f} / {shown[3]:.1f} / {shown[4]:.1f}, launch ends {shown[5]:.1f}"
            )
        print(f"{elapsed():.0f} s {label}", flush=True)
        del graphs, kept, copies
        torch.cuda.empty_cache()
    print("\nTimelines, us from the first CTA's start: median (last) begin; first, median, last end of attention; end of the last CTA")
    print("\n".join(timelines))
    print("\nus a launch (over 1 query token). L: lean.cu, M: many_rows.cu, sN: N stages, A: reread_missing, H: share_halves, EcgN: clusters of c, N warpgroups")
    print("\n".join(table))
    print("\nHeuristic -> fastest, over 1 query token (goal 1.05)")
    print("\n".join(summary), flush=True)


def watched(stage, skip, budget):
    """Runs a worker; ends it where nothing has moved for 8 s, and names what it was at."""
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
            if time.time() - state["time"] > 8 or elapsed() > budget + 20:
                hung = True
                process.kill()
                process.wait()
        if process.returncode == 0:
            return skip
        state = json.loads(STATE.read_text())
        print(f"{stage}: {'hung' if hung else f'ended with {process.returncode}'} at {state['variant']} ({state['what']})", flush=True)
        if state["variant"] is None or elapsed() > budget:
            return skip
        # Its switch is left out of all cells.
        name = state["variant"].rsplit(":", 1)[1]
        if name == "base":
            return skip
        skip = [*skip, *(f"{h[0]}/{h[1]}x{h[2]}:{s[0]}:q{q}:{name}" for h, s, qs in cells() for q in qs)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=58)
    parser.add_argument("--worker")
    parser.add_argument("--skip", default="")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    skip = [name for name in args.skip.split(",") if name]
    if args.worker:
        worker(skip, args.worker, args.budget)
        return
    jobs = list(all_builds().items())
    if args.list:
        for heads, (batch, context, _), q_lens in cells():
            for q_len in q_lens:
                print(heads, batch, context, f"q{q_len}", *variants(problem_of(heads, batch, context, q_len)))
        print(len(jobs), "builds")
        return
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for label, build, registers, spilled in pool.map(compile_one, jobs):
            if spilled or args.compile_only:
                print(label, f"{registers} registers, {spilled} spilled, {build.shared_bytes // 1024} KB", flush=True)
    print(f"{elapsed():.0f} s: {len(jobs)} builds", flush=True)
    if args.compile_only:
        return
    skip = watched("check", skip, args.budget)
    watched("time", skip, args.budget)


if __name__ == "__main__":
    main()
