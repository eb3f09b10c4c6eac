"""The branch beside main on problems that no rule was chosen on (drawn2.json, of draw2.py).

    python gpu_job2.py --main main.tar.gz [--budget 54]      in a checkout of the branch

A worker process has each source tree: the checkout (`now`), main, a copy of the checkout with a few lines
changed (variants2.py). All prepare the same problem, check it against fp64 over NaN, and the parent takes
samples from them in turn. `now mains`: main's settings (main_heuristic.py) in the branch's kernel.
$OUT/served2.json has every median; printed last: by family the geometric mean and the extremes of branch
over main, and every line where that is outside 0.98 to 1.02, or that has settings or a variant beside it.
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
ROUNDS = 17
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


#: (family, problem, settings beside the heuristic's, trees beside `now`): draw2.py
JOBS = [tuple(job) for job in json.loads((HERE / "drawn2.json").read_text())]


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


def main_heuristic():
    import importlib.util

    if "main_heuristic" not in sys.modules:
        spec = importlib.util.spec_from_file_location("main_heuristic", HERE / "main_heuristic.py")
        sys.modules["main_heuristic"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["main_heuristic"])
    return sys.modules["main_heuristic"]


def config_of(kernel, problem, gpu, text):
    """(kernel, config) of a text, or of the heuristic's; None where it does not fit."""
    from leanbench.core.registry import kernels
    from leanbench.kernels.lean.cuda_build import CudaBuild

    # The kernels of the before-kinds commit had a default_config that knew the lengths.
    default = kernel.any_length_config if problem.lengths_on == "device" and kernel.name == "lean_cuda" else kernel.default_config
    chosen = default(problem, gpu)
    if text == "chosen":
        return kernel, chosen
    if text == "mains":
        known = problem.known_to_host
        return kernel, (main_heuristic().any_length_heuristic if problem.lengths_on == "device" else main_heuristic().heuristic)(known, gpu)
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
    return ["chosen", "mains", *settings] if tree == "now" else ["chosen"] if tree in trees else []


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
            [sys.executable, str(HERE / "gpu_job2.py"), "--work", tree], cwd=folder,
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


def main(archived, budget, only):
    import variants2 as variants

    out = pathlib.Path(os.environ.get("OUT", "."))
    root = pathlib.Path.cwd()
    home = pathlib.Path(tempfile.mkdtemp())
    environment = dict(os.environ, LEANBENCH_CACHE=str(home / "cache"), LEANBENCH_HOME=str(home / "home"))
    wanted = [index for index, job in enumerate(JOBS) if not only or job[0] in only.split(",")]
    names = ["now", *dict.fromkeys(tree for index in wanted for tree in JOBS[index][3])]
    trees = {"now": root}
    for name in names[1:]:
        folder = home / name
        if name == "main":
            folder.mkdir()
            with tarfile.open(archived) as archive:
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
        parts = {"now": 9, "main": 5}.get(name, 1)
        for part in range(parts):
            compiling.append(subprocess.Popen([sys.executable, str(HERE / "gpu_job2.py"), "--compile", name, str(part), str(parts)], cwd=folder, env=environment | {"PYTHONPATH": str(folder)}))
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
        base, mains = medians.get("now chosen"), medians.get("main chosen")
        ratio = row["ratio"] = base / mains if base and mains else None
        config = {tree: (row["config"].get(tree) or {}).get("chosen") for tree in ("now", "main")}
        settings = f"[{config['now']}]" + (f" main's [{config['main']}]" if config["main"] != config["now"] else "")
        if ratio is None or not 0.98 <= ratio <= 1.02 or len(medians) > 2 or row["bad"]:
            text = " ".join(f"{key.removeprefix('now ')}={value:.2f}" + (f"({value / base:.3f})" if base and key not in ("now chosen", "main chosen") else "") for key, value in medians.items())
            lines.append(f"{'-' if ratio is None else format(ratio, '.3f')} {family} {row['label']} {row['mb'] or 0:.1f}MB x{row['copies']} {settings} {text}" + (f" BAD {row['bad']}" if row["bad"] else ""))
        (out / "served2.json").write_text(json.dumps(rows, indent=1))
    for worker in workers.values():
        worker.process.stdin.close()
    shutil.rmtree(home, ignore_errors=True)
    bad = sum(bool(row["bad"]) for row in rows)
    print(f"{len(rows)} problems, {bad} with something that is wrong or does not fit")
    print("first: branch over main; in parentheses: over what the branch chooses; [chunk,warps,stages,per_sm,cluster,rows,min_tiles,splits]")
    for line in lines:
        print(line)
    print("branch over main, by family: problems, geometric mean, least, median, most")
    for family in dict.fromkeys(row["family"] for row in rows):
        summary(family, [row["ratio"] for row in rows if row["family"] == family and row["ratio"]])
    summary("all", [row["ratio"] for row in rows if row["ratio"]])
    same = [row for row in rows if row["ratio"] and (row["config"].get("main") or {}).get("chosen") == (row["config"].get("now") or {}).get("chosen")]
    summary("settings as main's (kernel alone)", [row["ratio"] for row in same])
    summary("settings not as main's", [row["ratio"] for row in rows if row["ratio"] and row not in same])
    print("beside what the branch chooses, by family")
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family and row["ratio"]]
        for key in dict.fromkeys(key for row in own for key in row["medians"] if key not in ("now chosen", "main chosen")):
            summary(f"{family}: {key}", [row["medians"][key] / row["medians"]["now chosen"] for row in own if key in row["medians"]])
    print(f"{time.time() - BEGUN:.0f} s")


def summary(name, ratios):
    if ratios:
        print(f"{name}: {len(ratios)} {math.exp(statistics.fmean(map(math.log, ratios))):.4f} {min(ratios):.3f} {statistics.median(ratios):.3f} {max(ratios):.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    elif sys.argv[1:2] == ["--compile"]:
        compile_all(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--main", required=True)
        parser.add_argument("--budget", type=float, default=54)
        parser.add_argument("--only", default="")
        arguments = parser.parse_args()
        main(str(pathlib.Path(arguments.main).resolve()), arguments.budget, arguments.only)
