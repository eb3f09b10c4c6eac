"""Served calls: hints to the L2, settings beside one another, parts of the kernel left out.

    python gpu_job.py [--old old.tar.gz] [--budget 95]      in a checkout of the branch

A worker process has each source tree: the checkout, copies of it with a few lines changed
(variants.py), the commit before any kind of attention (--old). All prepare the same problem; the parent
takes samples from them in turn. $OUT/served.json has every median, the table is printed last.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
BEGUN = time.time()
ROUNDS = 25
GPU = "h200"


def P(batch, heads, context, head_dim, **kinds):
    q_heads, _, kv_heads = str(heads).partition("/")
    return dict(batch=batch, q_heads=int(q_heads), kv_heads=int(kv_heads or q_heads), context=context, head_dim=head_dim, **kinds)


def spread(batch, longest, mean, seed):
    """Lengths of a batch, one of them `longest`, log-uniform."""
    import random

    draw = random.Random(f"{batch} {longest} {mean} {seed}")
    if longest == mean:
        return longest
    weights = [64 ** (draw.random() - 1) for _ in range(batch - 1)]
    low, high = 0.0, longest * 64.0
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(min(longest, max(1, middle * w)) for w in weights)
        low, high = (middle, high) if total < mean * batch - longest else (low, middle)
    lengths = [round(min(longest, max(1, high * w))) for w in weights]
    lengths.insert(draw.randrange(batch), longest)
    return lengths


def one_long(batch, longest, others):
    return [others] * (batch // 3) + [longest] + [others] * (batch - batch // 3 - 1)


def S(text):
    """Settings: chunk,warps,stages,per_sm[,cluster][,rN][,whole|split]; sp3:... is fixed_split_cuda's."""
    return text


DRAWN = json.loads((HERE / "drawn.json").read_text())


def drawn(start, capacity, **other):
    name, fields = next(item for item in DRAWN if item[0].startswith(start))
    return dict(fields, capacity=capacity, **other)


D, N = {"lengths_on": "device"}, {"kv_layout": "NHD"}
ALL = ("now", "old", "norest", "rest0", "nopack")
#: (family, problem, settings beside the heuristic's, trees beside `now`)
JOBS = [
    # (a) the hint. Several row tiles, chunks, latent caches.
    ("hint", P(4, "96/8", 8192, 128), ["16,8,2,1,1,r16"], ["normal"]),
    ("hint", P(4, "128/8", 8192, 128), ["16,8,2,1,1,r16"], ["normal"]),
    ("hint", P(4, "32/1", 65536, 128), [], ["normal"]),
    ("hint", P(8, "64/4", 4096, 128), [], ["normal"]),
    ("hint", P(6, "48/4", 8192, 128), [], ["normal"]),
    ("hint", P(4, "128/8", 16384, 128), [], ["normal"]),
    ("hint", P(4, "96/8", 4096, 256), [], ["normal"]),
    ("hint", P(1, "32/8", 32768, 128, q_len=128), [], ["normal"]),
    ("hint", P(8, "32/8", 4096, 128, q_len=64), [], ["normal"]),
    ("hint", P(1, "32/8", 32768, 128, q_len=512), [], ["normal"]),
    ("hint", P(128, "128/1", 4096, 576, v_head_dim=512, latent=True, page_size=64, dtype="bf16"), [], ["normal"]),
    ("hint", P(1, "128/1", 4096, 576, v_head_dim=512, latent=True, page_size=64, dtype="bf16"), [], ["normal"]),
    ("hint", P(64, "128/1", 16384, 576, v_head_dim=512, latent=True, page_size=64, dtype="bf16"), [], ["normal"]),
    # The five calls that lost, and others near them.
    ("lost", drawn("b192 h3/1", 16384), ["32,4,2,1", "16,4,3,2", "32,4,3,1", "16,8,3,1"], ALL[1:]),
    ("lost", drawn("b48 h32/4", 2048), ["16,8,2,1", "32,4,2,1", "16,4,3,2", "16,8,3,1"], ALL[1:]),
    ("lost", drawn("b16 h4 ", 8192), ["32,4,3,1", "16,8,3,1", "16,4,2,2"], ALL[1:]),
    ("lost", drawn("b32 h2/1", 8192), ["16,4,2,1", "16,2,2,3"], ALL[1:]),
    ("lost", drawn("b64 h6/2", 4096), ["32,4,3,1", "16,8,3,1", "16,4,2,2", "16,4,3,2"], ALL[1:]),
    ("lost", drawn("b24 h20/5", 12288), ["32,4,3,1", "16,4,3,2"], ALL[1:]),
    ("lost", drawn("b24 h32/2", 12288), ["32,4,2,1"], ["old", "rest0"]),
    # Output tiles of head_dim 64, 32 to 66, the length on the host.
    *[
        ("host64", P(b, h, n, 64), ["32,8,2,1,1,whole", "32,8,2,1,1,split", "32,4,2,2,1,split", "32,8,2,1,2,whole", "sp3:32,8,2,1", "sp5:32,4,2,2", "sp6:32,4,2,2"], [])
        for b, h, n in (
            (1, 32, 1024), (1, 40, 1024), (1, 40, 2048), (1, 40, 4096), (1, 36, 8192), (1, 40, 8192),
            (2, 24, 8192), (2, 24, 16384), (1, 44, 3000), (5, "64/8", 2048), (1, 40, 16384), (2, 28, 16384),
        )
    ],
    # 1 to 1.5 output tiles to an SM, lengths on the device.
    *[
        ("tiles1.5", P(b, h, n, 128, **D, **kind), ["32,4,2,1", "16,8,2,1", "16,4,3,2", "32,4,3,1"], [])
        for b, h, n, kind in (
            (192, "4/1", spread(192, 1000, 182, 1), N),
            (192, "6/1", 1647, {}),
            (24, "64/8", spread(24, 6000, 2000, 2), N),
            (40, "32/4", one_long(40, 8000, 300), {}),
            (18, "32/8", 1500, {}),
            (48, "8/4", 105, N),
            (160, "7/1", spread(160, 5000, 700, 3), {"page_size": 16}),
            (140, "8/1", 4000, {}),
        )
    ],
    # Groups of 9 to 16 on many output tiles, lengths on the device.
    *[
        ("group16", P(b, h, n, 128, **D, **kind), ["32,4,2,1", "16,4,2,2", "16,4,4,1"], [])
        for b, h, n, kind in (
            (128, "16/1", 68, {"page_size": 64, "capacity": 1024}),
            (24, "64/4", spread(24, 2483, 390, 4), {"page_size": 16, "dtype": "bf16"}),
            (16, "48/4", spread(16, 22574, 6913, 5), {"page_size": 64, **N}),
            (96, "16/1", 500, N),
            (32, "64/4", one_long(32, 2298, 16), {}),
            (128, "12/1", 1500, {}),
        )
    ],
    # Short sequences.
    ("tiny", P(256, "2", one_long(256, 337, 7), 256, **D), ["16,2,3,2", "16,2,2,3", "16,4,3,1", "16,1,2,6"], ["nopack", "rest0"]),
    ("tiny", P(96, "4", one_long(96, 351, 16), 256, **D, page_size=64), ["16,2,3,2", "16,2,2,3", "16,4,3,1", "16,1,2,6"], ["nopack", "rest0"]),
    ("tiny", P(3, "16/2", 41, 64, **D, **N, capacity=4096), ["64,4,3,1", "32,4,2,2", "64,4,3,1,2", "64,4,3,1,4"], ["alone"]),
    ("tiny", P(1, "8/1", 62, 128, **D, **N, page_size=64, capacity=4096), ["32,4,3,1", "16,4,2,2", "32,4,3,1,2"], ["alone"]),
    ("tiny", P(4, "4/1", [103, 16, 16, 17], 128, **D, capacity=4096, dtype="bf16"), ["32,4,3,1", "32,4,3,1,2"], ["alone"]),
    ("tiny", P(256, "7/1", one_long(256, 8, 55), 64, **D, dtype="bf16"), ["32,4,2,3", "32,2,2,4", "64,4,2,2"], ["nopack"]),
    ("tiny", P(128, "64/4", one_long(128, 67, 2), 128, **D, **N), ["32,4,2,1", "16,8,2,1", "16,2,2,4"], ["nopack"]),
    ("cluster", P(1, "32/8", 4096, 128, **D, capacity=8192), [], ["alone"]),
    ("cluster", P(1, "32/8", 32768, 128, **D), [], ["alone"]),
    ("cluster", P(1, 24, 1024, 64), ["32,8,2,1,1,split"], ["alone"]),
    ("cluster", P(2, "64/4", 2000, 128, **D), [], ["alone"]),
]


# ---- in a worker, whose PYTHONPATH is a tree ----------------------------------------------------------


def problem_of(fields):
    from leanbench.core.problem import AttentionProblem

    fields = dict(fields)
    if isinstance(fields["context"], list):
        fields["context"] = tuple(fields["context"])
    try:
        import dataclasses

        known = {f.name for f in dataclasses.fields(AttentionProblem)}
        fields = {k: v for k, v in fields.items() if k in known or v is not None}
        return AttentionProblem(**fields)
    except TypeError:
        return None


def config_of(kernel, problem, gpu, text):
    """(kernel, config) of a text, or of the heuristic's; None where it does not fit."""
    from leanbench.core.registry import kernels
    from leanbench.kernels.lean.cuda_build import CudaBuild

    # The kernels of the before-kinds commit had a default_config that knew the lengths.
    default = kernel.any_length_config if problem.lengths_on == "device" and kernel.name == "lean_cuda" else kernel.default_config
    chosen = default(problem, gpu)
    if text == "chosen":
        return kernel, chosen
    from dataclasses import replace

    if text.startswith("sp"):
        from leanbench.kernels.fixed_split.cuda_configs import FixedSplitCudaConfig

        splits, _, build = text[2:].partition(":")
        chunk, warps, stages, per_sm = map(int, build.split(","))
        config = FixedSplitCudaConfig(
            tile_tokens=128, num_warps=warps, num_stages=stages, ctas_per_sm=per_sm, chunk_tokens=chunk,
            tile_rows=chosen.tile_rows, cluster_size=1, copy=chosen.copy, splits=int(splits),
        )
        return kernels()["fixed_split_cuda"], config
    words = text.split(",")
    numbers = [int(word) for word in words if word.isdigit()]
    chunk, warps, stages, per_sm = numbers[:4]
    cluster = numbers[4] if len(numbers) > 4 else 1
    rows = next((int(word[1:]) for word in words if word[0] == "r"), chosen.tile_rows)
    lean_tiles = -(-problem.max_context // 128)
    config = replace(
        chosen, chunk_tokens=chunk, num_warps=warps, num_stages=stages, ctas_per_sm=per_sm, cluster_size=cluster, tile_rows=rows,
        min_tiles_per_cta=lean_tiles if "whole" in words else 1, align_grid=problem.lengths_on == "host",
    )
    return (kernel, config) if CudaBuild.of(problem, config).fits(gpu) else None


def texts_of(job, tree):
    family, fields, settings, trees = job
    if tree == "now":
        return ["chosen", *settings]
    if tree == "old":
        return ["chosen", *(settings[:1] if family == "lost" else [])]
    return ["chosen"] if tree in trees else []


def jobs_of(tree):
    """[(index, problem, [(text, kernel, config)])]"""
    from leanbench.core.registry import kernels
    from leanbench.gpu.catalogue import find

    gpu = find(GPU)
    for index, job in enumerate(JOBS):
        if tree != "now" and tree not in job[3]:
            continue
        problem = problem_of(job[1])
        if problem is None:
            continue
        kernel = kernels()["lean_mla" if job[1].get("latent") else "lean_cuda"]
        made, seen = [], {}
        for text in texts_of(job, tree):
            pair = config_of(kernel, problem, gpu, text) if text == "chosen" or kernel.name == "lean_cuda" else None
            if pair is None or pair[1] in seen:
                continue
            seen[pair[1]] = text
            made.append((text, *pair))
        yield index, problem, made


def compile_all(tree, part, parts):
    from leanbench.compile.nvrtc import compile_cuda
    from leanbench.kernels.lean.cuda_build import CudaBuild

    sources = {}
    for _, problem, made in jobs_of(tree):
        for _, kernel, config in made:
            try:
                if kernel.name == "lean_mla":
                    from leanbench.kernels.mla import MlaBuild

                    source = MlaBuild.of_shape(problem.q_heads, problem.q_len, problem.dtype == "bf16", problem.causal, problem.lengths_on == "device", problem.page_size or 0).source((9, 0))
                else:
                    source = CudaBuild.of(problem, config).source((9, 0))
                sources[repr(source)] = source
            except Exception as error:
                print(f"compile {tree}: {error!r}"[:300], file=sys.stderr)
    for number, source in enumerate(sources.values()):
        if number % parts == part:
            try:
                compile_cuda(source)
            except Exception as error:
                print(f"compile {tree}: {error!r}"[:500], file=sys.stderr)


def describe(config):
    fields = ("chunk_tokens", "num_warps", "num_stages", "ctas_per_sm", "cluster_size", "tile_rows", "min_tiles_per_cta", "splits")
    return ",".join(str(getattr(config, name, "-")) for name in fields)


def work(tree):
    import leanbench

    if os.environ.get("FAKE"):
        return fake(tree)
    import torch

    from leanbench.check.reference import Reference
    from leanbench.gpu.local import spec_of_device
    from leanbench.measure import buffers
    from leanbench.measure.timing import Replay

    print(json.dumps({"tree": tree, "from": leanbench.__file__}), flush=True)
    torch.cuda.set_device(0)
    device, spec = torch.device("cuda", 0), spec_of_device(0)
    buffers.cold_copies = lambda problem, spec: min(1500, math.ceil(250e6 / problem.kv_bytes))
    jobs = {index: (problem, made) for index, problem, made in jobs_of(tree)}
    replays, inputs, reference = {}, [], None
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "prepare":
            problem, made = jobs[int(rest[0])]
            answer = {"label": problem.label() if callable(problem.label) else problem.label, "mb": problem.kv_bytes / 1e6, "bad": {}, "config": {}}
            try:
                torch.manual_seed(int(rest[0]))
                inputs = buffers.rotating_inputs(problem, device, spec, "cold")
                answer["copies"] = len(inputs)
                reference = Reference(inputs[0], max_pairs=16)
            except Exception as error:
                answer["bad"]["inputs"] = repr(error)[:200]
                made = []
            for text, kernel, config in made:
                try:
                    launches = [kernel.prepare(own, config) for own in inputs]
                    inputs[0].poison()
                    launches[0]()
                    torch.cuda.synchronize()
                    failure = reference.check(inputs[0]).failure(problem.dtype)
                    if failure:
                        answer["bad"][text] = failure
                        continue
                    replays[text] = Replay(launches, 0.4)
                    answer["config"][text] = describe(config)
                except Exception as error:
                    answer["bad"][text] = repr(error)[:200]
            for replay in replays.values():
                replay.sample_us()
        elif word == "sample":
            turn = int(rest[0]) % max(1, len(replays))
            keys = list(replays)
            answer = {key: replays[key].sample_us() for key in [*keys[turn:], *keys[:turn]]}
        elif word == "drop":
            replays, inputs, reference = {}, [], None
            torch.cuda.synchronize()
            answer = {}
        else:
            break
        print(json.dumps(answer), flush=True)


def fake(tree):
    """A worker without a GPU, to try the parent."""
    import random

    import leanbench

    print(json.dumps({"tree": tree, "from": leanbench.__file__}), flush=True)
    jobs, texts = {index: (problem, made) for index, problem, made in jobs_of(tree)}, []
    for line in sys.stdin:
        word, *rest = line.split()
        answer = {}
        if word == "prepare":
            problem, made = jobs[int(rest[0])]
            texts = [text for text, _, _ in made]
            answer = {"label": problem.label() if callable(problem.label) else problem.label, "mb": problem.kv_bytes / 1e6, "bad": {}, "copies": 1,
                      "config": {text: describe(config) for text, _, config in made}}
        elif word == "sample":
            answer = {text: 10 + random.random() for text in texts}
        print(json.dumps(answer), flush=True)


# ---- the parent ---------------------------------------------------------------------------------------


class Worker:
    def __init__(self, tree, folder, environment):
        self.tree = tree
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_job.py"), "--work", tree], cwd=folder,
            env=environment | {"PYTHONPATH": str(folder)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        while True:
            line = self.process.stdout.readline()
            if not line:
                return {"bad": {"worker": f"{self.tree} ended"}, "gone": True}
            if line.startswith("{"):
                return json.loads(line)


def main(old, budget, only):
    import variants

    out = pathlib.Path(os.environ.get("OUT", "."))
    root = pathlib.Path.cwd()
    home = pathlib.Path(tempfile.mkdtemp())
    environment = dict(os.environ, LEANBENCH_CACHE=str(home / "cache"), LEANBENCH_HOME=str(home / "home"))
    wanted = [index for index, job in enumerate(JOBS) if not only or job[0] in only.split(",")]
    names = ["now", *dict.fromkeys(tree for index in wanted for tree in JOBS[index][3])]
    trees = {"now": root}
    for name in names[1:]:
        folder = home / name
        if name == "old":
            if not old:
                continue
            folder.mkdir()
            with tarfile.open(old) as archive:
                archive.extractall(folder)
        else:
            for part in ("kernels", "leanbench", "sweeps"):
                shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
            shipped = root / "leanbench/configs/shipped"
            shutil.copytree(shipped, folder / "leanbench/configs/shipped")
            variants.apply(folder, name)
        trees[name] = folder
    compiling = []
    for name, folder in trees.items():
        parts = 9 if name == "now" else 1
        for part in range(parts):
            compiling.append(subprocess.Popen([sys.executable, str(HERE / "gpu_job.py"), "--compile", name, str(part), str(parts)], cwd=folder, env=environment | {"PYTHONPATH": str(folder)}))
    workers = {name: Worker(name, folder, environment) for name, folder in trees.items()}
    for process in compiling:
        process.wait()
    print(f"compiled after {time.time() - BEGUN:.0f} s", flush=True)
    for worker in workers.values():
        greeting = worker.answer()
        if "gone" in greeting or str(trees[worker.tree].resolve()) not in str(pathlib.Path(greeting.get("from", "")).resolve()):
            print("WRONG TREE", worker.tree, greeting)
    print(f"workers there after {time.time() - BEGUN:.0f} s", flush=True)
    rows, lines = [], []
    for index in wanted:
        if time.time() - BEGUN > budget:
            lines.append(f"not timed: {len(wanted) - wanted.index(index)} problems, {budget} s are over")
            break
        family, _, _, job_trees = JOBS[index]
        here = [workers[name] for name in ("now", *job_trees) if name in workers]
        ready = {worker.tree: worker.ask("prepare", index) for worker in here}
        here = [worker for worker in here if "gone" not in ready[worker.tree]]
        if "gone" in ready["now"]:
            lines.append(f"the worker ended at {JOBS[index][:2]}"[:300])
            break
        samples = {}
        for number in range(ROUNDS):
            turn = number % len(here)
            for worker in [*here[turn:], *here[:turn]]:
                for text, us in worker.ask("sample", number).items():
                    samples.setdefault(f"{worker.tree} {text}", []).append(us)
        for worker in here:
            worker.ask("drop")
        medians = {key: statistics.median(values) for key, values in samples.items()}
        row = {"family": family, "label": ready["now"].get("label"), "mb": ready["now"].get("mb"), "copies": ready["now"].get("copies"), "medians": medians,
               "quartiles": {key: statistics.quantiles(values, n=4)[::2] for key, values in samples.items()},
               "config": {tree: answer.get("config") for tree, answer in ready.items()}, "bad": {tree: answer.get("bad") for tree, answer in ready.items() if answer.get("bad")}}
        rows.append(row)
        base = medians.get("now chosen")
        text = " ".join(f"{key.removeprefix('now ')}={value:.2f}" + (f"({value / base:.3f})" if base and key != "now chosen" else "") for key, value in medians.items())
        lines.append(f"{family} {row['label']} {row['mb'] or 0:.1f}MB x{row['copies']} [{(row['config']['now'] or {}).get('chosen')}] {text}" + (f" BAD {row['bad']}" if row["bad"] else ""))
        print(f"{time.time() - BEGUN:.0f} s: {len(rows)} done", flush=True)
        (out / "served.json").write_text(json.dumps(rows, indent=1))
    for worker in workers.values():
        worker.process.stdin.close()
    shutil.rmtree(home, ignore_errors=True)
    bad = sum(bool(row["bad"]) for row in rows)
    print(f"\n{len(rows)} problems, {bad} with something that is wrong or does not fit; us, over what is chosen now; chunk,warps,stages,per_sm,cluster,rows,min_tiles,splits")
    for line in lines:
        print(line)
    print(f"{time.time() - BEGUN:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    elif sys.argv[1:2] == ["--compile"]:
        compile_all(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--old")
        parser.add_argument("--budget", type=float, default=85)
        parser.add_argument("--only", default="")
        arguments = parser.parse_args()
        main(arguments.old and str(pathlib.Path(arguments.old).resolve()), arguments.budget, arguments.only)
