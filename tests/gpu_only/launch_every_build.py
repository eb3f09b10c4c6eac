"""One launch of each kind of build of `lean_cuda` on small problems, and of each kind of call,
checked; a program for compute-sanitizer:

    compute-sanitizer --tool TOOL --kernel-regex kns=lean python
    tests/gpu_only/launch_every_build.py

TOOL is memcheck (with --report-api-errors no), racecheck or synccheck. Compiling takes longest:
`python tests/gpu_only/launch_every_build.py --compile` does nothing else, on all cores.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from leanbench.check.kind_cases import kind_problems
from leanbench.check.reference import Reference
from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device

LEAN = kernel("lean_cuda")
PROBLEMS = [
    AttentionProblem(1, 24, 24, 1024, 64),
    AttentionProblem(1, 32, 8, 4096, 128, "bf16"),
    AttentionProblem(4, 32, 8, 300, 128),
    AttentionProblem(1, 32, 1, 5000, 128),
    AttentionProblem(1, 8, 8, 700, 256),
    AttentionProblem(2, 32, 8, (2000, 5), 128, page_size=16),
    AttentionProblem(3, 8, 8, (1, 70, 3000), 64, "bf16", "NHD", page_size=64, q_len=3),
    AttentionProblem(40, 32, 8, 200, 64),
    AttentionProblem(2, 71, 1, 900, 64),
    AttentionProblem(1, 10, 2, 1000, 80),
    AttentionProblem(1, 32, 8, 4096, 128, "bf16", q_len=16),
    AttentionProblem(2, 32, 8, (2000, 5), 128, page_size=16, q_len=40),
    AttentionProblem(3, 8, 8, 700, 64, q_len=200, window_left=100, sinks=True),
]
#: Of the problems of all kinds, which have some five for each.
KIND_STEP = 4


def settings(problem: AttentionProblem) -> Iterator[KernelConfig]:
    """The heuristic's, and what it left out: cp.async, single CTAs, pairs, the largest clusters,
    fixed runs.
    """
    spec = spec_of_device(0)
    chosen = LEAN.default_config(problem, spec)
    fixed_runs = LEAN.batch_invariant_config(problem, spec)
    assert chosen is not None
    assert fixed_runs is not None
    yield chosen
    if chosen.of_warpgroups:
        yield replace(chosen, align_grid=not chosen.align_grid)
        return
    yield replace(chosen, copy="async", cluster_size=1)
    yield replace(chosen, cluster_size=1, align_grid=False, min_tiles_per_cta=1)
    yield replace(chosen, cluster_size=2, align_grid=False)
    if not problem.is_ragged:
        yield replace(chosen, cluster_size=8, ctas_per_sm=1)
    yield fixed_runs


def builds() -> Iterator[tuple[AttentionProblem, KernelConfig]]:
    """Plain problems with all of those settings, every kind and size with the heuristic's: on the
    host and the device, contiguous and in pages in turn.
    """
    for problem in PROBLEMS:
        for config in dict.fromkeys(settings(problem)):
            yield problem, config
    for problem in list(kind_problems())[::KIND_STEP]:
        config = LEAN.default_config(problem, spec_of_device(0))
        assert config is not None
        yield problem, config


def compile_one(problem: AttentionProblem, config: KernelConfig) -> None:
    """Into the folder of compiled kernels."""
    try:
        LEAN.compile(problem, config, (9, 0))
    except UserError as error:
        print(f"{problem.label}: not compiled ({error})")


def compile_all() -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        list(pool.map(compile_one, *zip(*builds(), strict=True)))
    return 0


def main() -> int:
    launched = wrong = 0
    for problem, config in builds():
        inputs = make_inputs(problem, "cuda")
        reference = Reference(inputs)
        inputs.poison()
        try:
            launch = LEAN.prepare(inputs, config)
        except UserError as error:
            print(f"{problem.label}: not launched ({error})")
            continue
        launch()
        torch.cuda.synchronize()
        launched += 1
        failure = reference.check(inputs).failure(problem.dtype)
        if failure:
            wrong += 1
            print(f"{problem.label}: {failure}, {config}")
    print(f"{launched} launches, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(compile_all() if "--compile" in sys.argv else main())
