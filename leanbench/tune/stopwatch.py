"""Timing of a problem's candidates: on a GPU in rounds that drop the slowest, or by the performance
model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from leanbench.core.errors import UserError
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.inputs import (
    AttentionInputs,
    cache_shape,
    deal_pages,
    inputs_over,
    query_shape,
    torch_dtype,
)
from leanbench.core.kernel import Kernel
from leanbench.core.problem import ELEMENT_BYTES, AttentionProblem
from leanbench.kernels.lean.configs import LeanConfig
from leanbench.measure.buffers import cold_copies, free_memory, rotating_inputs
from leanbench.measure.timing import Replay, Sampler, Timing

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Time:
    """One config's latency, with the median's 95% confidence interval for enough samples."""

    latency_us: float
    low_us: float | None = None
    high_us: float | None = None


@dataclass(frozen=True)
class Result:
    """Times of some configs on a problem, and the configs that failed."""

    times: dict[LeanConfig, Time]
    #: Reasons why configs could not be timed.
    failures: dict[LeanConfig, str]


class Stopwatch(Protocol):
    """Timing of configs on a problem."""

    def time(self, problem: AttentionProblem, configs: Sequence[LeanConfig]) -> Result: ...


#: Samples per round, and maximum ratio to the fastest for a candidate to reach the next round.
ROUNDS = ((2, 1.15), (3, 1.04), (8, 1.0))


def knock_out(
    samplers: Mapping[Key, Sampler], rounds: Sequence[tuple[int, float]] = ROUNDS
) -> dict[Key, Timing]:
    """Time all, with more samples for those that may be the fastest, and for the first.

    Gains are relative to the first. A round takes samples in turn, so that drifting clocks affect
    all candidates equally. A warm-up pass is discarded, as in leanbench.measure.timing.run_rounds.
    """
    for sampler in samplers.values():
        sampler.sample_us()
    timings = {key: Timing(sampler.launches) for key, sampler in samplers.items()}
    left = list(samplers)
    first = left[0] if left else None
    number = 0
    for samples, within in rounds:
        for _ in range(samples):
            for key in left:
                timings[key].samples_us.append(samplers[key].sample_us())
                timings[key].rounds.append(number)
            number += 1
        fastest_us = min((timings[key].median_us for key in left), default=0.0)
        left = [
            key for key in left if key == first or timings[key].median_us <= within * fastest_us
        ]
    return timings


#: Minimum samples of an interval; fewer give none at 95%.
_LEAST_SAMPLES = 6
#: GPU time per sample.
_SAMPLE_MS = 0.4
#: Bytes of random numbers shared by K and V of all problems.
_POOL_BYTES = 2_000_000_000
_POOL_SHARE = 0.5
#: Limit of ||out - the first config's out|| over its norm: each differs from the exact result by a
#: few roundings of the output.
_RELATIVE_LIMIT = {"fp16": 4e-3, "bf16": 2e-2}


class GpuStopwatch:
    """Timing on the GPU with torch's `index`.

    K and V of all problems are views of one pool of random numbers: no memory is filled or freed
    between problems.
    """

    def __init__(self, kernel: Kernel, index: int, spec: GpuSpec) -> None:
        import torch

        self._kernel, self._spec = kernel, spec
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        #: Memory available to a problem.
        self.room_bytes = int(_POOL_SHARE * free)
        #: The largest K and V in the pool.
        self.most_bytes = min(_POOL_BYTES, self.room_bytes)
        self._pools: dict[str, torch.Tensor] = {}

    def time(self, problem: AttentionProblem, configs: Sequence[LeanConfig]) -> Result:
        """Time configs over rotating buffers with a cold L2.

        Each output is compared with that of the first config, which is compared with the fp64
        reference.
        """
        from triton.runtime.errors import OutOfResources

        buffers = self.buffers(problem)
        failures: dict[LeanConfig, str] = {}
        replays: dict[LeanConfig, Replay] = {}
        expected = None
        for config in configs:
            buffers[0].poison()
            try:
                replay = Replay(
                    [self._kernel.prepare(inputs, config) for inputs in buffers], _SAMPLE_MS
                )
            except (OutOfResources, UserError) as error:
                failures[config] = str(error).partition("\n")[0]
                continue
            out = buffers[0].out.double()
            if expected is None:
                expected = self._checked(buffers[0])
            wrong = float((out - expected).norm() / expected.norm())
            if not wrong <= _RELATIVE_LIMIT[problem.dtype]:
                failures[config] = (
                    f"differs from the other configs by {wrong:.1e} of the output's norm"
                )
                continue
            replays[config] = replay
        timings = knock_out(replays)
        return Result({config: _time(timing) for config, timing in timings.items()}, failures)

    def buffers(self, problem: AttentionProblem) -> list[AttentionInputs]:
        """Return inputs for launches to rotate over.

        They are in the pool, or in separate memory if the pool is too small or the cache has a
        larger capacity.
        """
        import torch

        if problem.capacity is not None or problem.kv_bytes > self.most_bytes:
            free_memory(self._spec)
            return rotating_inputs(problem, self._device, self._spec, "cold")
        pool = self._pool(problem.dtype)
        half = math.prod(cache_shape(problem))
        block_table = deal_pages(problem, self._device)
        copies = max(1, min(cold_copies(problem, self._spec), pool.numel() // (2 * half)))
        rotation: list[AttentionInputs] = []
        for copy in range(copies):
            both = pool[2 * copy * half : (2 * copy + 2) * half].view(2, *cache_shape(problem))
            k_cache, v_cache = both[0], both[1]
            q = torch.randn(query_shape(problem), dtype=pool.dtype, device=self._device)
            rotation.append(inputs_over(problem, q, k_cache, v_cache, block_table))
        return rotation

    def _pool(self, dtype: str) -> torch.Tensor:
        import torch

        if dtype not in self._pools:
            self._pools.clear()
            self._pools[dtype] = torch.empty(
                self.most_bytes // ELEMENT_BYTES, dtype=torch_dtype(dtype), device=self._device
            ).normal_()
        return self._pools[dtype]

    def _checked(self, inputs: AttentionInputs) -> Any:
        """Return the current output in fp64, after checking a few heads."""
        from leanbench.check.reference import Reference

        dtype = "fp16" if str(inputs.q.dtype) == "torch.float16" else "bf16"
        failure = Reference(inputs, max_pairs=4).check(inputs).failure(dtype)
        if failure:
            raise UserError(
                f"{self._kernel.name} cannot be tuned here, its output is wrong: {failure}"
            )
        return inputs.out.double()


def _time(timing: Timing) -> Time:
    if len(timing.samples_us) < _LEAST_SAMPLES:
        return Time(timing.median_us)
    low_us, high_us = timing.interval_us
    return Time(timing.median_us, low_us, high_us)
