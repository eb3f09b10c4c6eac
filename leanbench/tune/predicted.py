"""The performance model in the search: it ranks before any timing, and replaces the stopwatch for a
GPU that is not available.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from leanbench.compile.build import Build
from leanbench.configs.formula import Shape, grid_of
from leanbench.configs.space import FamilyKey, why_not_run
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel, LaunchResources
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.kernels.lean.configs import BuildKey, LeanConfig
from leanbench.tune.plan import Ranker
from leanbench.tune.stopwatch import Result, Time

#: Predictions per task of a process.
_CHUNK = 8
#: Bytes that an SM's L1 reads or writes per clock.
_L1_BYTES = 128


def predict_us(
    kernel_name: str,
    problem: AttentionProblem,
    configs: Sequence[LeanConfig],
    spec: GpuSpec,
    resident: Sequence[int],
) -> list[float]:
    """Return the latency of each config, given the CTAs of it that an SM holds."""
    from leanbench.core.registry import kernel
    from leanbench.model.predict import predict_latency_us

    lean = kernel(kernel_name)
    return [
        predict_latency_us(problem, lean, config, spec, resident=ctas)
        for config, ctas in zip(configs, resident, strict=True)
    ]


def spill_us(
    problem: AttentionProblem,
    config: LeanConfig,
    taken: LaunchResources,
    target: tuple[Kernel, GpuSpec],
) -> float:
    """Estimate the cost of spilled registers, which the performance model ignores.

    Assumes that a thread stores and loads each once per LeanTile through its SM's L1, and that
    nothing hides it.
    """
    kernel, spec = target
    shape = Shape.of(problem)
    lean_tiles = shape.output_tiles(config) * -(-shape.context // config.tile_tokens)
    moved_bytes = 2 * 4 * taken.spilled_registers * 32 * taken.num_warps * lean_tiles
    busy_sms = min(spec.sms, grid_of(shape, config, spec.sms, kernel))
    return moved_bytes / (busy_sms * _L1_BYTES * spec.boost_clock_mhz)


def model_ranker(kernel: Kernel, spec: GpuSpec, pool: Executor) -> Ranker:
    """Return a ranker by the performance model, which runs in the pool's processes."""

    def rank(
        problem: AttentionProblem, configs: Sequence[LeanConfig], builds: Mapping[BuildKey, Build]
    ) -> list[float]:
        resources = [builds[config.build_key].resources[0] for config in configs]
        resident = [theoretical_occupancy(taken, spec).ctas_per_sm for taken in resources]
        futures = [
            pool.submit(
                predict_us,
                kernel.name,
                problem,
                configs[at : at + _CHUNK],
                spec,
                resident[at : at + _CHUNK],
            )
            for at in range(0, len(configs), _CHUNK)
        ]
        latencies_us = [latency_us for future in futures for latency_us in future.result()]
        return [
            latency_us + spill_us(problem, config, taken, (kernel, spec))
            for latency_us, config, taken in zip(latencies_us, configs, resources, strict=True)
        ]

    return rank


class ModelStopwatch:
    """Stopwatch that predicts. Latencies have no interval, because nothing was measured.

    Args:
        builds: Builds of every family that will be timed.
    """

    def __init__(
        self, rank: Ranker, builds: Mapping[FamilyKey, dict[BuildKey, Build]], spec: GpuSpec
    ) -> None:
        self._rank, self._builds, self._spec = rank, builds, spec

    def time(self, problem: AttentionProblem, configs: Sequence[LeanConfig]) -> Result:
        family = FamilyKey(problem.head_dim, problem.group_size, problem.dtype, problem.kv_layout)
        builds = self._builds[family]
        reasons = {config: why_not_run(builds[config.build_key], self._spec) for config in configs}
        failures = {config: reason for config, reason in reasons.items() if reason is not None}
        able = [config for config in configs if config not in failures]
        predicted_us = self._rank(problem, able, builds)
        times = {config: Time(us) for config, us in zip(able, predicted_us, strict=True)}
        return Result(times, failures)


def no_ranking(
    problem: AttentionProblem, configs: Sequence[LeanConfig], builds: Mapping[BuildKey, Build]
) -> list[float]:
    """Rank all equally, because the model is already the stopwatch."""
    return [0.0] * len(configs)
