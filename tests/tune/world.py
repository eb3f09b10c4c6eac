"""A fake GPU: latencies from coefficients unknown to the tuner, with noise."""

from __future__ import annotations

import math
import random
from concurrent.futures import Executor, Future
from dataclasses import replace

from leanbench.compile.build import Build
from leanbench.configs.formula import Coefficients, Shape, divide
from leanbench.configs.space import FamilyKey, jobs
from leanbench.core.kernel import Kernel, LaunchResources
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find
from leanbench.tune.stopwatch import Result, Time

LEAN = kernel("lean")
#: The formula is used only for Triton.
TRITON = kernel("lean_triton")
H200 = find("h200")


class Here(Executor):
    """An executor that runs jobs immediately, in this process."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Silent:
    """An observer that counts a tuning's progress."""

    def __init__(self):
        self.compiled = self.timed = self.fitted = 0

    def compiling(self, done, total):
        self.compiled = done

    def timing(self, family, problem, done, total):
        self.timed += 1

    def fitting(self):
        self.fitted += 1

    def power(self, done, total):
        pass


def true_us(problem, config):
    """Return a latency by rates of the build.

    No build is the best everywhere, nor is an implementation.
    """
    coefficients = (
        cuda_coefficients(config)
        if config.implementation == "cuda"
        else triton_coefficients(config)
    )
    return coefficients.latency_us(divide(Shape.of(problem), config, H200.sms, LEAN))


def triton_coefficients(config):
    tokens, warps, stages = config.tile_tokens, config.num_warps, config.num_stages
    rate = 2e4 * math.log2(stages + 1) * (tokens / 128) ** 0.4 * (1.1 if warps == 8 else 1.0)
    return Coefficients(
        start_us=3.5 + tokens / 200 + 0.3 * (warps == 8) + 0.1 * stages,
        ramp_us=2.0,
        gpu_bytes_per_us=4.6e6,
        cta_bytes_per_us=rate,
        sm_bytes_per_us=1.4 * rate * (0.9 if config.build_key.settings[-1] else 1.0),
        boundary_us=0.9,
        more_boundaries_us=0.6,
        split_us=0.7,
        partial_us=0.06,
        round_us=0.4,
        excess=0.2,
    )


def cuda_coefficients(config):
    """Return the coefficients of a CUDA C++ build.

    Large clusters make splits cheap, and starts and the whole GPU slow. Tile boundaries cost more
    than Triton's.
    """
    warps, stages, cluster = config.num_warps, config.num_stages, config.cluster_size
    in_flight = warps * stages * config.chunk_tokens
    rate = 3.1e4 * (in_flight / 384) ** 0.3 * (1.1 if config.copy == "bulk" else 1.0)
    return Coefficients(
        start_us=3.2 + 0.15 * stages + 0.12 * cluster + 0.1 * (config.copy == "bulk"),
        ramp_us=1.6,
        gpu_bytes_per_us=4.65e6 * (0.96 if cluster > 2 else 1.0),
        cta_bytes_per_us=rate,
        sm_bytes_per_us=(1.5 if config.ctas_per_sm == 2 else 1.2) * rate,
        boundary_us=1.6,
        more_boundaries_us=1.1,
        split_us=0.8 / cluster**0.5,
        partial_us=0.05,
        round_us=0.5,
        excess=0.2,
    )


def cuda_where_small_us(problem, config):
    """Return a latency with CUDA C++ faster than Triton up to some tens of MB.

    It starts 2 us earlier and reads a quarter slower.
    """
    slower = 1.25 if config.implementation == "cuda" else 1.0
    coefficients = Coefficients(
        start_us=(3.0 if config.implementation == "cuda" else 5.0) + 0.05 * config.num_stages,
        ramp_us=0.5,
        gpu_bytes_per_us=4.6e6 / slower,
        cta_bytes_per_us=(6e4 + 3e3 * config.num_warps) / slower,
        sm_bytes_per_us=9e4 / slower,
        boundary_us=0.5,
        more_boundaries_us=0.4,
        split_us=0.4,
        partial_us=0.01,
        round_us=0.1,
        excess=0.2,
    )
    return coefficients.latency_us(divide(Shape.of(problem), config, H200.sms, LEAN))


class World:
    def __init__(self, noise=0.005, fails=lambda config: False, truth=true_us):
        self.random = random.Random(3)
        self.noise, self.fails, self.truth = noise, fails, truth
        self.calls = []

    def time(self, problem, configs):
        self.calls.append((problem, list(configs)))
        times, failures = {}, {}
        for config in configs:
            if self.fails(config):
                failures[config] = "out of shared memory"
                continue
            value = self.truth(problem, config) * (1 + self.noise * self.random.gauss(0, 1))
            times[config] = Time(value, 0.99 * value, 1.01 * value)
        return Result(times, failures)


def builds_of(family: FamilyKey, tuned: Kernel = LEAN) -> dict:
    taken = LaunchResources("lean_kernel", 132, 4, 128, 50_000, 0)
    return {
        key: Build(job, (replace(taken, num_warps=job.config.num_warps),))
        for key, job in jobs(tuned, family, H200).items()
    }


def no_ranking(problem, configs, builds):
    """Rank all equally: the model cannot know the fake GPU."""
    assert all(config.implementation == "triton" for config in configs)
    return [1.0] * len(configs)
