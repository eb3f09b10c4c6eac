"""The performance model in the search: as the ranker before anything was timed, and as the
stopwatch where there is no such GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from leanbench.compile.build import Build
from leanbench.configs.space import FamilyKey
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kernel import Kernel
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.occupancy import theoretical_occupancy
from leanbench.kernels.lean.configs import BuildKey, LeanConfig
from leanbench.tune.plan import Ranker
from leanbench.tune.stopwatch import Result, Time

#: Predictions that one process makes at a time.
_CHUNK = 8


def predict_us(
    kernel_name: str,
    problem: AttentionProblem,
    configs: Sequence[LeanConfig],
    spec: GpuSpec,
    resident: Sequence[int],
) -> list[float]:
    """Latency of each config, which has `resident` CTAs on an SM at once."""
    from leanbench.core.registry import kernel
    from leanbench.model.cell import predict_latency_us

    lean = kernel(kernel_name)
    return [
        predict_latency_us(problem, lean, config, spec, resident=ctas)
        for config, ctas in zip(configs, resident, strict=True)
    ]


def model_ranker(kernel: Kernel, spec: GpuSpec, pool: Executor) -> Ranker:
    """A ranker by the performance model, in the pool's processes."""

    def rank(
        problem: AttentionProblem, configs: Sequence[LeanConfig], builds: Mapping[BuildKey, Build]
    ) -> list[float]:
        resident = [
            theoretical_occupancy(builds[config.build_key].resources[0], spec).ctas_per_sm
            for config in configs
        ]
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
        return [latency_us for future in futures for latency_us in future.result()]

    return rank


class ModelStopwatch:
    """Every config's predicted latency; no interval, because nothing was measured.

    Args:
        builds: of every family that will be asked for.
    """

    def __init__(self, rank: Ranker, builds: Mapping[FamilyKey, dict[BuildKey, Build]]) -> None:
        self._rank, self._builds = rank, builds

    def time(self, problem: AttentionProblem, configs: Sequence[LeanConfig]) -> Result:
        family = FamilyKey(problem.head_dim, problem.group_size, problem.dtype, problem.kv_layout)
        builds = self._builds[family]
        able = [config for config in configs if builds[config.build_key].resources]
        predicted = self._rank(problem, able, builds)
        return Result(
            {config: Time(latency_us) for config, latency_us in zip(able, predicted, strict=True)},
            {},
        )


def no_ranking(
    problem: AttentionProblem, configs: Sequence[LeanConfig], builds: Mapping[BuildKey, Build]
) -> list[float]:
    """All alike: where the model is the stopwatch, it need not be asked twice."""
    return [0.0] * len(configs)
