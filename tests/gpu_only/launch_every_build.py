"""One checked launch of each kind of build of lean.cu, many_rows.cu and mla.cu on small problems,
and of each kind of call. A program for compute-sanitizer:

    compute-sanitizer --tool TOOL --kernel-regex kns=KERNEL python
    tests/gpu_only/launch_every_build.py [--compile] [--latent] [--share 2/4] [WORDS...]

TOOL is memcheck (with --report-api-errors no), racecheck or synccheck; KERNEL is lean, or mla with
`--latent`, which makes only the launches of mla.cu. `--compile` only compiles, on all cores: it
takes longest. Words select launches by parts of their names. `--share 2/4` makes every fourth, from
the second on.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from leanbench.check.grid import kind_problems
from leanbench.check.poison import poison_unused
from leanbench.check.reference import Reference
from leanbench.core.config import KernelConfig
from leanbench.core.errors import UserError
from leanbench.core.inputs import make_inputs
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.local import spec_of_device

LEAN = kernel("lean_cuda")
#: Other decompositions on its source.
OTHERS = ("fa2_cuda", "fixed_split_cuda")
LATENT = "lean_mla"
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
    # Output tiles for all SMs: a ring of many_rows.cu wraps around.
    AttentionProblem(20, 32, 8, 1500, 128, q_len=16),
    # Pairs of CTAs with whole output tiles and rings that wrap around.
    AttentionProblem(8, 32, 8, 1500, 128, "bf16", q_len=9),
    # Tails of the query tokens span two chunks, and hide a large part.
    AttentionProblem(2, 8, 8, (33, 66), 128, q_len=5),
    # Copies by lanes, with a ring that wraps around.
    AttentionProblem(2, 32, 8, (5000, 5), 128, page_size=1, q_len=40),
    # Rows of two KV heads, copied as one: with an output tile per SM, or with different lengths.
    AttentionProblem(34, 64, 8, 300, 64, "bf16", "NHD", kv_dtype="e4m3"),
    AttentionProblem(3, 16, 2, (1, 70, 3000), 64, "fp16", "NHD", page_size=16, kv_dtype="e5m2"),
    AttentionProblem(9, 32, 32, 300, 80, "fp16", "NHD"),
    AttentionProblem(3, 8, 4, (1, 70, 3000), 96, "bf16", "NHD", page_size=16),
    # States overlay the ring, in CTAs of several parts; scales of pages, several per warp.
    AttentionProblem(
        *(20, 32, 8, 300, 128), q_len=16, page_size=64, kv_dtype="e4m3", page_scales="page-head"
    ),
]
#: Problems of mla.cu: rows of part of a CTA, of a pair of CTAs, of two pairs, output tiles of many
#: splits. The first and the fifth have four column groups, the seventh has two.
LATENT_PROBLEMS = [
    AttentionProblem(1, 16, 1, 1000, 576, page_size=64, latent=True, v_head_dim=512),
    AttentionProblem(1, 128, 1, 9000, 576, "bf16", latent=True, v_head_dim=512),
    AttentionProblem(
        3, 128, 1, (700, 2, 65), 576, page_size=64, q_len=3, latent=True, v_head_dim=512
    ),
    AttentionProblem(2, 16, 1, 9000, 576, "bf16", page_size=64, latent=True, v_head_dim=512),
    AttentionProblem(2, 128, 1, 1000, 576, "bf16", page_size=64, latent=True, v_head_dim=512),
    AttentionProblem(
        3, 128, 1, (700, 2, 65), 576, "bf16", latent=True, v_head_dim=512, kv_dtype="e4m3"
    ),
    # Copies by lanes.
    AttentionProblem(2, 16, 1, 1000, 576, "bf16", page_size=1, latent=True, v_head_dim=512),
    AttentionProblem(
        3, 128, 1, (700, 2, 65), 576, page_size=1, latent=True, v_head_dim=512, kv_dtype="e4m3"
    ),
    AttentionProblem(
        *(3, 16, 1, (700, 2, 65), 576, "bf16"),
        page_size=1,
        latent=True,
        v_head_dim=512,
        kv_dtype="e4m3",
        row_scales=True,
    ),
]
#: Stride through the problems of all kinds, which have some five for each.
KIND_STEP = 4


@dataclass(frozen=True)
class Launch:
    """A build of lean.cu or many_rows.cu, and a problem to launch it on."""

    problem: AttentionProblem
    #: Name of the settings, or of a kernel other than lean_cuda.
    settings: str
    config: KernelConfig
    #: Factor of the inputs: with 12, softmax picks few tokens, and the maximum moves more than
    #: once.
    score_scale: float

    @property
    def name(self) -> str:
        return f"{self.problem.label}, {self.settings}"

    @property
    def kernel(self) -> Kernel[Any]:
        return kernel(self.settings) if self.settings in (*OTHERS, LATENT) else LEAN


def settings(problem: AttentionProblem) -> Iterator[tuple[str, KernelConfig]]:
    """Yield the heuristic's settings, and alternatives that it does not use.

    They are cp.async, single CTAs, pairs, the largest clusters, and fixed runs.
    """
    spec = spec_of_device(0)
    chosen = LEAN.default_config(problem, spec)
    fixed_runs = LEAN.batch_invariant_config(problem, spec)
    assert chosen is not None
    assert fixed_runs is not None
    yield "heuristic", chosen
    if chosen.of_warpgroups:
        yield "other grid", replace(chosen, align_grid=not chosen.align_grid)
        if chosen.tile_rows == 64 and not problem.is_ragged:
            yield "pairs", replace(chosen, cluster_size=2, ctas_per_sm=1)
        return
    # One stage for single sequences: a chunk is waited for immediately after the start of its copy.
    stages = 1 if problem.batch == 1 else chosen.num_stages
    yield "cp.async", replace(chosen, copy="async", cluster_size=1, num_stages=stages)
    yield "stream-K", replace(chosen, cluster_size=1, align_grid=False, tile_tokens=128)
    yield "pairs", replace(chosen, cluster_size=2, align_grid=False)
    if not problem.is_ragged:
        yield "clusters of 8", replace(chosen, cluster_size=8, ctas_per_sm=1)
    yield "fixed runs", fixed_runs


def launches() -> Iterator[Launch]:
    """Yield launches of plain problems and of every kind.

    Plain problems have all settings and decompositions, kinds have the heuristic's. They alternate
    between lengths on the host and the device, and between contiguous caches and pages.
    """
    scales, kind_scales = itertools.cycle((1.0, 12.0)), itertools.cycle((1.0, 4.0))
    for problem in PROBLEMS:
        known: set[KernelConfig] = set()
        for name, config in settings(problem):
            # Mutations name these launches, for any choice of the heuristic.
            if config not in known or name in ("stream-K", "pairs"):
                yield Launch(problem, name, config, next(scales))
            known.add(config)
        for name in OTHERS:
            config = kernel(name).default_config(problem, spec_of_device(0))
            assert config is not None
            yield Launch(problem, name, config, next(scales))
    for problem in list(kind_problems())[::KIND_STEP]:
        config = LEAN.default_config(problem, spec_of_device(0))
        assert config is not None
        yield Launch(problem, "heuristic", config, next(kind_scales))


def latent_launches() -> Iterator[Launch]:
    """Yield launches of mla.cu, kept separate: racecheck crashes if it skips clusters of them."""
    for problem, scale in zip(LATENT_PROBLEMS, itertools.cycle((12.0, 1.0)), strict=False):
        config = kernel(LATENT).default_config(problem, spec_of_device(0))
        yield Launch(problem, LATENT, config, scale)


def wanted(words: list[str], share: str = "1/1", latent: bool = False) -> list[Launch]:
    """Return launches with one of the words in their names; all without words.

    Args:
        share: "2/4": the second of four shares.
        latent: only mla.cu.
    """
    made = latent_launches() if latent else launches()
    of_words = [
        launch for launch in made if not words or any(word in launch.name for word in words)
    ]
    mine, _, shares = share.partition("/")
    return of_words[int(mine) - 1 :: int(shares)]


def compile_one(launch: Launch) -> None:
    """Compile into the folder of compiled kernels."""
    try:
        launch.kernel.compile(launch.problem, launch.config, (9, 0))
    except UserError as error:
        print(f"{launch.name}: not compiled ({error})")


def compile_all(compiled: list[Launch]) -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        list(pool.map(compile_one, compiled))
    return 0


def launch_all(chosen: list[Launch]) -> int:
    """Make launches; return 1 if any is wrong, or there is none. Unused parts of caches are NaN."""
    launched = wrong = 0
    for launch in chosen:
        inputs = make_inputs(launch.problem, "cuda", score_scale=launch.score_scale)
        inputs = poison_unused(inputs)
        reference = Reference(inputs)
        inputs.poison()
        try:
            run = launch.kernel.prepare(inputs, launch.config)
        except UserError as error:
            print(f"{launch.name}: not launched ({error})")
            continue
        run()
        torch.cuda.synchronize()
        launched += 1
        failure = reference.check(inputs).failure(launch.kernel.precision(launch.problem))
        if failure:
            wrong += 1
            print(f"WRONG {launch.name}: {failure}")
    print(f"{launched} launches, {wrong} wrong")
    return 1 if wrong or not launched else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--share", default="1/1")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    chosen = wanted(options.words, options.share, options.latent)
    return compile_all(chosen) if options.compile else launch_all(chosen)


if __name__ == "__main__":
    sys.exit(main())
