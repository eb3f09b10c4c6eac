"""fp8 latent caches of lean_mla: right on random problems, then timed beside bf16 ones (60 s)."""

import math
import os
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

START = time.time()
sys.path.insert(0, os.getcwd())


def build_of(problem):
    from leanbench.kernels.mla.build import MlaBuild

    return MlaBuild.of_shape(
        problem.q_heads,
        problem.q_len,
        problem.dtype == "bf16",
        problem.causal,
        problem.lengths_on == "device",
        problem.page_size or 0,
        problem.kv_dtype,
    )


def compile_one(build):
    import leanbench  # noqa: F401
    from leanbench.compile.nvrtc import compile_cuda

    binary = compile_cuda(build.source((9, 0)))
    return build, binary.registers_per_thread, binary.spilled_registers


def problems(draw):
    """fp8 families of one build each with three members, then bf16 and fp16 ones."""
    from leanbench.core.problem import AttentionProblem

    plain = AttentionProblem(1, 128, 1, 700, 576, "bf16", v_head_dim=512, latent=True)
    families = []
    heads = [16, 128, 64, 24, 128, 16, 96, 128, 64, 16, 40, 128, 32, 128]
    for number, q_heads in enumerate(heads):
        ragged = number % 3 == 2
        q_len = draw.choice((1, 1, 1, 2, 3))
        families.append(
            replace(
                plain,
                q_heads=q_heads,
                kv_dtype=("e4m3", "e5m2")[number % 2],
                dtype=("bf16", "fp16")[number // 2 % 2],
                q_len=q_len,
                page_size=64 if number % 4 in (1, 2) else None,
                lengths_on="device" if ragged else "host",
                causal=q_len == 1 or draw.random() < 0.6,
            )
        )
    sizes = [(1, 20000), (1, 1), (2, 65), (3, 9000), (8, 3000), (33, 700), (64, 400), (64, 2500)]
    made = []
    for family in families:
        for scaled in (True, False, True):
            batch, context = draw.choice(sizes)
            if family.lengths_on == "device":
                lengths = tuple(max(1, round(context ** draw.random())) for _ in range(batch))
                made.append(
                    replace(family, batch=batch, context=lengths, capacity="2x", scaled=scaled)
                    if draw.random() < 0.7
                    else replace(family, batch=batch, context=context, scaled=scaled)
                )
            else:
                made.append(replace(family, batch=batch, context=context, scaled=scaled))
    bf16 = [
        replace(families[1], kv_dtype="same", q_len=1, causal=True, batch=3, context=9000),
        replace(families[2], kv_dtype="same", q_len=1, causal=True, batch=8, context=3000),
        replace(families[4], kv_dtype="same", dtype="bf16", q_len=1, causal=True, batch=64, context=400),
    ]
    return made, bf16


SHAPES = [
    (1, 128, 1024),
    (1, 128, 32768),
    (1, 128, 131072),
    (8, 128, 8192),
    (128, 128, 4096),
    (32, 16, 4096),
    (32, 64, 4096),
    (1, 16, 32768),
]


def timed_problems():
    from leanbench.core.problem import AttentionProblem

    for batch, heads, context in SHAPES:
        plain = AttentionProblem(
            batch, heads, 1, context, 576, "bf16", v_head_dim=512, latent=True, page_size=64
        )
        yield replace(plain, kv_dtype="e4m3"), plain


def replay_us(launches, repeats=9):
    import torch
    from leanbench.measure.timing import capture

    for launch in launches:
        launch()
    torch.cuda.synchronize()
    rounds = max(1, 12 // len(launches))
    count = rounds * len(launches)
    graph = capture(launches, count)
    graph.replay()
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(taken)


def main():
    draw = random.Random(time.time_ns())
    made, bf16 = problems(draw)
    timed = list(timed_problems())
    builds = {build_of(p) for p in (*made, *bf16)} | {build_of(p) for pair in timed for p in pair}
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        compiled = list(pool.map(compile_one, builds))
    spilled = [words for _, _, words in compiled]
    print(f"{len(builds)} builds, spilled words {sorted(spilled)}, {time.time() - START:.0f} s", flush=True)

    import torch
    from leanbench.kernels.mla import LEAN_MLA

    from leanbench import lean_mla_with_kvcache
    from leanbench.check.grid import CheckCase, run_case, wild_case
    from leanbench.check.reference import Reference
    from leanbench.core.inputs import make_inputs
    from leanbench.gpu.local import spec_of_device
    from leanbench.measure.read_floor import _launches

    spec = spec_of_device(0)
    right = wrong = 0
    worst = 0.0
    for number, problem in enumerate((*made, *bf16)):
        scale = draw.choice((1.0, 1.0, 4.0, 12.0))
        result = run_case("lean_mla", CheckCase(problem, scale, 0), spec, "cuda")
        if result.failure is None:
            right += 1
            worst = max(worst, result.relative_error)
        else:
            wrong += 1
            print("WRONG", problem.label, scale, result.failure, flush=True)
        if time.time() - START > 40:
            print(f"stopped after {number + 1} of {len(made) + len(bf16)} problems")
            break
    for problem in (made[6], made[15], made[24]):
        problem = replace(problem, lengths_on="device", capacity=5056, context=1000, batch=1)
        result = run_case("lean_mla", wild_case(problem, 1.0, 0), spec, "cuda")
        if result.failure is not None:
            wrong += 1
            print("WRONG wild", problem.label, result.failure)
    # The public call, with its scale changed between calls of one prepared launch.
    problem = replace(made[1], batch=2, context=1000, page_size=None, lengths_on="host", scaled=True)
    for length in (1000, 961, 64):
        inputs = make_inputs(replace(problem, capacity=1024), "cuda")
        inputs = replace(inputs, context=length)
        out, lse = lean_mla_with_kvcache(
            inputs.q,
            inputs.k_cache[:, :, 0],
            length,
            causal=problem.causal,
            k_descale=inputs.k_descale.reshape(-1)[:1].clone(),
            return_softmax_lse=True,
        )
        failure = Reference(inputs).check(replace(inputs, out=out, lse=lse)).failure(problem.dtype)
        right, wrong = right + (failure is None), wrong + (failure is not None)
        if failure is not None:
            print("WRONG call", length, failure)
    # torch.compile, the scale an input.
    inputs = make_inputs(replace(problem, context=700), "cuda")

    def call(q, cache, scale):
        return lean_mla_with_kvcache(q + 0, cache, 700, causal=problem.causal, k_descale=scale) * 2

    compiled_call = torch.compile(call, fullgraph=True, backend="aot_eager")
    arguments = inputs.q, inputs.k_cache[:, :, 0], torch.full((1,), 0.7, device="cuda")
    same = torch.equal(compiled_call(*arguments), call(*arguments))
    print(
        f"right {right}, WRONG {wrong}, largest relative error {worst:.2e}, torch.compile same"
        f" {same}, {time.time() - START:.0f} s",
        flush=True,
    )

    rows = []
    for fp8, plain in timed:
        if time.time() - START > 54:
            print("no time left for", fp8.label)
            continue
        cells = []
        for problem in (fp8, plain):
            copies = max(2, min(400, math.ceil(250e6 / problem.kv_bytes)))
            buffers = [make_inputs(problem, "cuda") for _ in range(copies)]
            config = LEAN_MLA.default_config(problem, spec)
            launches = [LEAN_MLA.prepare(inputs, config) for inputs in buffers]
            us = replay_us(launches)
            floor = min(
                replay_us(_launches(buffers, problem.kv_bytes, variant), 5)
                for variant in ((2048, 4, 0), (8192, 8, 2), (4096, 4, 4))
            )
            cells.append((us, problem.kv_bytes / us / 1e6, floor / us))
            del buffers, launches
            torch.cuda.empty_cache()
        rows.append((fp8, cells))
    print(f"{torch.cuda.get_device_name()}, {time.time() - START:.0f} s")
    print("batch x heads x context | e4m3 us TB/s share of read floor | bf16 the same | bf16/e4m3")
    for fp8, ((us, speed, share), (us16, speed16, share16)) in rows:
        print(
            f"{fp8.batch:4d} x {fp8.q_heads:3d} x {fp8.max_context:6d} | {us:8.1f} {speed:5.2f} {share:4.0%}"
            f" | {us16:8.1f} {speed16:5.2f} {share16:4.0%} | {us16 / us:.2f}x"
        )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
