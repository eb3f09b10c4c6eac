"""flashinfer_mla on one H200: its modules loaded or compiled, checked, then timed beside lean_mla and flash_mla.

Run from the repository root with the wheels on PYTHONPATH. Modules beside this file (aot/NAME/NAME.so, compiled by nvcc 13.0
for sm_90a) are put where FlashInfer looks for compiled ones; where they do not load, they are compiled here.
  python gpu_job.py [--jit] [--seconds 170]
--jit: compile the modules here even where the package carries them. Compiled ones go to $OUT/flashinfer_aot.tar.gz,
laid out as flashinfer/data/aot (unpack there).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time

BEGUN = time.monotonic()
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", "/tmp/flashinfer")
os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
OUT = pathlib.Path(os.environ.get("OUT", "/tmp/out"))

LOAD = """
import sys, time, torch
from flashinfer.jit.attention.modules import gen_batch_mla_module
for backend in sys.argv[1:]:
    begun = time.monotonic()
    spec = gen_batch_mla_module(backend, *[torch.bfloat16] * 3, torch.int32, 512, 64, False)
    ready = spec.is_aot
    spec.build_and_load()
    print(f"module {backend}: {'carried' if ready else 'compiled'}, {time.monotonic() - begun:.1f} s", flush=True)
"""


def elapsed() -> float:
    return time.monotonic() - BEGUN


def modules(force_jit: bool) -> None:
    """Each in a process of its own, which may die of a binary that does not fit this machine."""
    import importlib.util

    package = pathlib.Path(importlib.util.find_spec("flashinfer").origin).parent  # type: ignore[union-attr]
    aot = package / "data" / "aot"
    for folder in (pathlib.Path(__file__).parent / "aot").glob("*/"):
        shutil.copytree(folder, aot / folder.name, dirs_exist_ok=True)
    if force_jit and aot.exists():
        aot.rename(aot.with_name("aot_not_used"))
    for backend in ("fa3", "fa2"):
        done = subprocess.run([sys.executable, "-c", LOAD, backend], capture_output=True, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode == 0:
            continue
        print(f"module {backend} did not load:\n{done.stderr[-1500:]}", flush=True)
        if aot.exists():
            aot.rename(aot.with_name("aot_not_used"))
            subprocess.run([sys.executable, "-c", LOAD, backend], check=backend == "fa3")
    built = list(pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]).glob(".cache/flashinfer/*/*/cached_ops/batch_mla*/*.so"))
    if built:
        OUT.mkdir(parents=True, exist_ok=True)
        with tarfile.open(OUT / "flashinfer_aot.tar.gz", "w:gz") as tar:
            for so in built:
                tar.add(so, f"{so.parent.name}/{so.name}")
        print(f"wrote {OUT / 'flashinfer_aot.tar.gz'}: {len(built)} modules", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--seconds", type=float, default=170)
    args = parser.parse_args()
    modules(args.jit)

    import math
    from dataclasses import replace

    import torch
    from leanbench.kernels.libraries.flash_infer_mla import FlashInferMla

    from leanbench.check.grid import CheckCase, run_case
    from leanbench.check.launches import launches_of
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.core.kernel import written_by
    from leanbench.core.problem import AttentionProblem
    from leanbench.core.registry import kernel
    from leanbench.gpu.local import spec_of_device
    from leanbench.measure.instruments import open_instruments
    from leanbench.measure.options import MeasureOptions
    from leanbench.measure.protocol import measure_problem
    from leanbench.measure.timing import Effort

    print(torch.__version__, torch.cuda.get_device_name(), kernel("flashinfer_mla").library(), flush=True)
    one = AttentionProblem(1, 128, 1, 4096, 576, "bf16", page_size=64, latent=True, v_head_dim=512)
    free = replace(one, page_size=None)

    # 1. Right, against the fp64 reference, a second run over NaN with the same bits.
    cases = [
        one,
        replace(one, context=1),
        replace(one, context=65, q_heads=16),
        replace(one, batch=3, context=(1, 700, 4100), page_size=16),
        replace(one, batch=3, context=(5000, 1, 777), page_size=1, q_heads=64),
        replace(one, batch=5, context=1000, lengths_on="device", capacity=4096),
        replace(free, batch=2, context=1001, q_heads=24),
        replace(free, batch=3, context=(5000, 1, 777), capacity=8200),
        replace(free, batch=64, context=1024, q_heads=16),
        replace(free, context=131_072),
        replace(one, batch=4, context=(2, 64, 30_000, 500), q_heads=16, q_len=2),
        replace(one, batch=3, context=(700, 3, 65), q_len=3),
        replace(one, batch=2, context=700, q_len=2, causal=False),
        replace(one, batch=100, context=1024, kv_layout="NHD"),
    ]
    if any("q_f16" in folder.name for folder in (pathlib.Path(__file__).parent / "aot").glob("*/")):
        cases.append(replace(free, dtype="fp16", batch=2, context=3000))
    wrong = 0
    for problem in cases:
        for scale in (1.0, 12.0):
            result = run_case("flashinfer_mla", CheckCase(problem, scale, 0), spec_of_device(0), "cuda")
            if result.failure:
                wrong += 1
            print(f"{'WRONG' if result.failure else 'right'} {problem.label} scale {scale:g}: error {result.relative_error:.2e}"
                  f" LSE {result.lse_error:.1e} {result.failure or ''}", flush=True)
    # As a graph replays it, each copy with page numbers of its own, outputs poisoned.
    problem = replace(one, batch=3, context=(1, 700, 4100))
    copies = [make_inputs(problem, "cuda", seed=seed) for seed in range(3)]
    launches = launches_of(kernel("flashinfer_mla"), copies, None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for inputs, launch in zip(copies, launches, strict=True):
        written_by(launch, inputs).poison()
    graph.replay()
    torch.cuda.synchronize()
    for inputs, launch in zip(copies, launches, strict=True):
        failure = Reference(inputs).check(written_by(launch, inputs), 2.0).failure("bf16")
        wrong += failure is not None
        print("graph replay:", failure or "right", flush=True)
    del graph, launches, copies
    print(f"{wrong} wrong; {elapsed():.0f} s so far", flush=True)

    # 2. Times: CUDA graphs over rotating cold copies, kernels in turn, checked again by the sweep's own path.
    class PagesOf64(FlashInferMla):
        name = "flashinfer_mla, pages of 64"

        def page_size(self, inputs):
            return inputs.page_size or math.gcd(inputs.k_cache.shape[1], 64)

    class Fa2(FlashInferMla):
        name = "flashinfer_mla, fa2"

        def plan_call(self, plan):
            wrapper, call = super().plan_call(plan)
            wrapper._backend = "fa2"
            return wrapper, call

    kernels = [kernel(name) for name in ("lean_mla", "flash_mla", "flashinfer_mla")]
    kernels = [own for own in kernels if own.unavailable_reason() is None]
    effort = Effort(max_seconds=0.4, max_samples=40)
    instruments = open_instruments(0, MeasureOptions(effort=effort))
    timed = [
        replace(one, context=1024),
        one,
        replace(one, context=32_768),
        replace(one, context=131_072),
        replace(one, batch=8, context=8192),
        replace(one, batch=32),
        replace(one, batch=128, context=1024),
        replace(one, batch=128),
        replace(one, batch=32, q_heads=16),
        replace(free, context=32_768),
        replace(free, batch=32),
        replace(one, batch=64, context=32_768),
    ]
    table = []

    def measure(problem, which) -> None:
        if elapsed() > args.seconds:
            print("no time left for", problem.label, flush=True)
            return
        rows = measure_problem(instruments, problem, which)
        table.append((problem.label, rows))
        print(f"{elapsed():.0f} s", problem.label, {name: row.get("latency_us") for name, row in rows.items()}, flush=True)

    for problem in timed:
        measure(problem, kernels)
    print("\nus (plan us)  " + "  ".join(own.name for own in kernels) + "  fastest peer / lean_mla")

    def cell(row) -> str:
        if row.get("latency_us") is None:
            return f"{row['status']}: {row.get('reason')}"
        plan = row.get("plan_us")
        mark = "" if row["status"] == "ok" else f" [{row['status']}]"
        return f"{row['latency_us']:.2f}{mark}" + (f" ({plan:.0f})" if plan else "")

    for label, rows in table:
        peers = [row["latency_us"] for name, row in rows.items() if name != "lean_mla" and row.get("latency_us")]
        own = rows["lean_mla"].get("latency_us")
        ratio = f"{min(peers) / own:.3f}" if peers and own else "-"
        print(f"{label:45s} " + "  ".join(cell(row) for row in rows.values()) + "  " + ratio)
    if table:
        print("GPU kernels of flashinfer_mla:", table[0][1]["flashinfer_mla"].get("gpu_kernels"))

    # 3. Whether another hand-over would be faster.
    table.clear()
    for problem in (replace(free, context=32_768), replace(free, batch=32), one):
        measure(problem, [kernel("flashinfer_mla"), PagesOf64(), Fa2()])
    print()
    for label, rows in table:
        print(f"{label:45s} " + "  ".join(f"{name} {cell(row)}" for name, row in rows.items()))
    print(f"{wrong} wrong of {2 * len(cases) + 3}; {elapsed():.0f} s")


if __name__ == "__main__":
    main()
