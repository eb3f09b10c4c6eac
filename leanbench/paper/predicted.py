"""Predictions of the performance model for the paper's claims, with every kernel's default config.

FlashAttention 2.5.6's FA2 waits for each tile before it loads the next one but one. This project's
`fa2` keeps up to 196 KB in flight and reads more with each SM. So claims that involve FA2 are also
predicted with a single-stage `fa2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from leanbench.core.config import TileConfig
from leanbench.core.decomposition import quantisation_efficiency
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.kernels.fa2.configs import Fa2TritonConfig
from leanbench.model.error import model_error
from leanbench.model.predict import predict_energy_mj, predict_latency_us
from leanbench.paper.claim import OWN, Claim, Figure
from leanbench.paper.claims import claims

#: An `fa2` that loads a LeanTile, then computes it.
SINGLE_STAGE = Fa2TritonConfig(tile_tokens=128, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Outcome:
    """A claim and its prediction."""

    claim: Claim
    predicted: Figure
    #: Prediction with `fa2` in SINGLE_STAGE; None for claims without FA2.
    single_stage: Figure | None = None


def evaluate(spec: GpuSpec) -> list[Outcome]:
    """Predict the claims for a GPU.

    Left out are requests and libraries: the model predicts no prompts and no other project's
    kernels.
    """
    outcomes = []
    for claim in claims():
        if claim.prompt is not None or not OWN.kernels(claim):
            continue
        is_of_fa2 = "FA2" in (claim.of, claim.over) and claim.quantity != "occupancy"
        single_stage = _predict(claim, spec, single_stage=True) if is_of_fa2 else None
        outcomes.append(Outcome(claim, _predict(claim, spec, single_stage=False), single_stage))
    return outcomes


def _predict(claim: Claim, spec: GpuSpec, single_stage: bool) -> Figure:
    kernels = OWN.kernels(claim)

    def value(name: str, problem: AttentionProblem) -> float:
        config: TileConfig | None = SINGLE_STAGE if single_stage and name == "fa2" else None
        return _value(claim, name, problem, config, spec)

    def figure(problem: AttentionProblem) -> float:
        # Problems on several GPUs split heads: nothing is exchanged.
        of, *over = (value(name, problem.shard(0)) for name in kernels)
        return of / over[0] if over else of

    # Occupancy follows from the schedule: nothing is modelled.
    error = 0.0 if claim.quantity == "occupancy" else model_error(spec.name, kernels)
    return claim.value([Figure.within(figure(problem), error) for problem in claim.problems])


def _value(
    claim: Claim, name: str, problem: AttentionProblem, config: TileConfig | None, spec: GpuSpec
) -> float:
    config = config or kernel(name).default_config(problem, spec)
    assert config is not None, "every kernel of a claim has settings"
    if claim.quantity == "latency":
        return _latency_us(name, problem, config, spec)
    schedule = kernel(name).schedule(problem, config, spec)
    assert schedule is not None
    if claim.quantity == "occupancy":
        return quantisation_efficiency(schedule, schedule.slots(spec.sms, config.ctas_per_sm))
    return predict_energy_mj(_latency_us(name, problem, config, spec), problem, schedule, spec)


@cache
def _latency_us(name: str, problem: AttentionProblem, config: TileConfig, spec: GpuSpec) -> float:
    return predict_latency_us(problem, kernel(name), config, spec)
