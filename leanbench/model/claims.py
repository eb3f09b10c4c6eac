"""What the model predicts for the paper's claims (leanbench.model.paper), each kernel with its
default config.

FlashAttention 2.5.6's FA2 waits for each tile before it loads the next one but one; this project's
`fa2` keeps up to 196 KB in flight and reads more with each SM. So what involves FA2 is predicted a
second time with a single-stage `fa2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import Schedule, quantisation_efficiency
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.kernels.fa2.configs import Fa2TritonConfig
from leanbench.model.claim import OWN, Claim, Figure
from leanbench.model.error import model_error
from leanbench.model.paper import claims
from leanbench.model.predict import predict_energy_mj, predict_latency_us

#: An `fa2` that loads a LeanTile, then computes it.
SINGLE_STAGE = Fa2TritonConfig(tile_tokens=128, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Outcome:
    """A claim and its prediction."""

    claim: Claim
    predicted: Figure
    #: The same with `fa2` in SINGLE_STAGE; None for claims without FA2.
    single_stage: Figure | None = None


def evaluate(spec: GpuSpec) -> list[Outcome]:
    """Every claim with the model's prediction for a GPU, but those about requests: it does not know
    how long a prompt takes.
    """
    outcomes = []
    for claim in claims():
        if claim.prompt is not None:
            continue
        is_of_fa2 = "FA2" in (claim.of, claim.over) and claim.quantity != "occupancy"
        again = _predict(claim, spec, single_stage=True) if is_of_fa2 else None
        outcomes.append(Outcome(claim, _predict(claim, spec, single_stage=False), again))
    return outcomes


def _predict(claim: Claim, spec: GpuSpec, single_stage: bool) -> Figure:
    kernels = OWN.kernels(claim)
    # Occupancy is the schedule's own: nothing is modelled.
    error = 0.0 if claim.quantity == "occupancy" else model_error(spec.name, kernels)
    figures = [_figure(claim, kernels, problem, spec, single_stage) for problem in claim.problems]
    return claim.value([Figure.within(figure, error) for figure in figures])


def _figure(
    claim: Claim,
    kernels: Sequence[str],
    problem: AttentionProblem,
    spec: GpuSpec,
    single_stage: bool,
) -> float:
    # Those on several GPUs split heads: nothing is exchanged.
    problem = problem.shard(0)

    def config(name: str) -> TileConfig:
        return SINGLE_STAGE if single_stage and name == "fa2" else _default(name, problem, spec)

    of, *over = kernels
    if claim.quantity == "occupancy":
        return _occupancy(of, problem, config(of), spec)
    predicted = _latency_us if claim.quantity == "latency" else _energy_mj
    figures = [predicted(name, problem, config(name), spec) for name in (of, *over)]
    return figures[0] / figures[1]


def _default(name: str, problem: AttentionProblem, spec: GpuSpec) -> TileConfig:
    return kernel(name).default_config(problem, spec)


def _schedule(name: str, problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> Schedule:
    schedule = kernel(name).schedule(problem, config, spec)
    assert schedule is not None
    return schedule


@cache
def _latency_us(name: str, problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> float:
    return predict_latency_us(problem, kernel(name), config, spec)


def _energy_mj(name: str, problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> float:
    schedule = _schedule(name, problem, config, spec)
    return predict_energy_mj(_latency_us(name, problem, config, spec), problem, schedule, spec)


def _occupancy(name: str, problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> float:
    """As in rows: one CTA on an SM at once, or as many as the config asks for."""
    schedule = _schedule(name, problem, config, spec)
    return quantisation_efficiency(schedule, schedule.slots(spec.sms, config.ctas_per_sm))
