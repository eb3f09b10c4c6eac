"""The LeanAttention paper's single-GPU claims as data, and what the model predicts for the same
problems.

Sanovar et al. 2024 (arXiv 2405.10480), measured on an A100-80GB (108 SMs), fp16, with
FlashAttention 2.5.6's kernels: LA is LeanAttention (`lean`), FA2 one CTA per output tile (`fa2`),
FD FlashDecoding with that version's heuristic (`fixed_split`, whose own heuristic is not the same
one). Predicted with each kernel's default config.

That version's FA2 waits for each tile before it loads the next one but one; this project's `fa2`
keeps up to 196 KB in flight and reads more with each SM. So what involves FA2 is predicted a second
time with a single-stage `fa2`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from leanbench.core.decomposition import Schedule, quantisation_efficiency
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.core.ragged import ragged_contexts
from leanbench.core.registry import KernelConfig, kernel
from leanbench.kernels.fa2.configs import Fa2Config

#: `latency` and `energy`: kernel `of` over kernel `over`. `occupancy` of `of`: predicted, its
#: schedule's quantisation efficiency; measured, its SM busy share.
Quantity = Literal["latency", "energy", "occupancy"]
#: Over the problems' figures. `last over first`, `highest over lowest`: how much they change.
Statistic = Literal["mean", "lowest", "highest", "last over first", "highest over lowest"]
#: A claim of a figure holds within this of it.
TOLERANCE = 0.15
#: An `fa2` that loads a LeanTile, then computes it.
SINGLE_STAGE = Fa2Config(tile_tokens=128, num_warps=4, num_stages=1)
#: Problems of the text's "over 500 samples".
SAMPLES = 500


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper that a model can be asked about."""

    figure: str
    words: str
    quantity: Quantity
    of: str
    over: str
    statistic: Statistic
    problems: tuple[AttentionProblem, ...]
    paper: float
    #: `about`: within TOLERANCE. `at least`, `at most`: the paper gives a bound or a direction.
    relation: Literal["about", "at least", "at most"] = "about"

    @property
    def paper_words(self) -> str:
        sign = {"about": "", "at least": "≥ ", "at most": "≤ "}[self.relation]
        return f"{sign}{self.words_of(self.paper)}"

    @property
    def is_of_samples(self) -> bool:
        """Any `SAMPLES` problems of the same kind do as well: the paper does not say which
        it took.
        """
        return len(self.problems) == SAMPLES

    def value(self, figures: Sequence[float]) -> float:
        """The claim's figure from one of each problem, in their order."""
        return _STATISTICS[self.statistic](figures)

    def holds(self, value: float) -> bool:
        """Within TOLERANCE of the paper's figure, or on the right side of its bound."""
        return {
            "about": abs(value / self.paper - 1) <= TOLERANCE,
            "at least": value >= self.paper,
            "at most": value <= self.paper,
        }[self.relation]

    @property
    def sweep(self) -> str:
        """The shipped sweep that was made for it."""
        if self.is_of_samples or self.figure == "text":
            return "paper-500"
        return "paper-fig7a" if self.figure == "abstract" else f"paper-fig{self.figure}"

    def words_of(self, value: float) -> str:
        is_share = self.quantity == "occupancy" and self.statistic in ("mean", "lowest", "highest")
        return f"{value:.0%}" if is_share else f"{value:.2f}x"


@dataclass(frozen=True)
class Outcome:
    """A claim and its prediction."""

    claim: Claim
    predicted: float
    holds: bool
    #: The same with `fa2` in SINGLE_STAGE; None for claims without FA2.
    single_stage: float | None = None
    single_stage_holds: bool | None = None

    @property
    def words(self) -> str:
        return self.claim.words_of(self.predicted)

    @property
    def single_stage_words(self) -> str:
        return "" if self.single_stage is None else self.claim.words_of(self.single_stage)


def _mha(heads: int, context_k: int, head_dim: int = 64, batch: int = 1) -> AttentionProblem:
    return AttentionProblem(batch, heads, heads, context_k * 1024, head_dim)


_CONTEXTS_K = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FIG_7A = tuple(_mha(56, context) for context in _CONTEXTS_K)
_FIG_4 = tuple(
    _mha(heads, context) for heads in (16, 24, 32, 48, 56, 64) for context in _CONTEXTS_K[3:]
)
#: Heads and context of figure 7c, heads of figure 9 and the batch of figure 11 are not in the text
#: at hand: chosen so that FA2's CTAs over the SMs come near the ratio that the paper gives.
_FIG_7C = tuple(_mha(24, 64, batch=batch) for batch in (1, 2, 4, 8, 16))
_FIG_9 = tuple(_mha(32, context, head_dim=128) for context in _CONTEXTS_K)
_FIG_11 = tuple(
    AttentionProblem(8, 32, 32, ragged_contexts(8, 65_536, share), 64)
    for share in (1.0, 0.8, 0.6, 0.4, 0.2)
)


@cache
def _samples() -> tuple[AttentionProblem, ...]:
    """Batch, context and heads drawn evenly, as many as fit an 80 GB GPU; the paper does not say
    how it drew.
    """
    draw = random.Random(2405)
    samples: list[AttentionProblem] = []
    while len(samples) < SAMPLES:
        problem = _mha(
            draw.choice((8, 16, 24, 32, 48, 56, 64)),
            draw.choice(_CONTEXTS_K),
            batch=draw.choice((1, 2, 4)),
        )
        if problem.kv_bytes < 60e9:
            samples.append(problem)
    return tuple(samples)


def claims() -> tuple[Claim, ...]:
    """All of them, in the paper's order; the 500 samples are the same every time."""
    single = "batch 1, head_dim 64"
    return (
        Claim(
            "abstract",
            "LA over FD, mean of the samples",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            _samples(),
            1.73,
        ),
        Claim(
            "abstract",
            "LA over FD at 256k, 56 heads",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            _FIG_7A[8:9],
            2.18,
        ),
        Claim(
            "4",
            "occupancy of LA near 100% everywhere",
            "occupancy",
            "lean",
            "",
            "lowest",
            _FIG_4,
            0.9,
            "at least",
        ),
        Claim(
            "4", "occupancy of FA2 is low", "occupancy", "fa2", "", "mean", _FIG_4, 0.6, "at most"
        ),
        Claim(
            "4",
            "occupancy of FD depends on the problem: highest over lowest",
            "occupancy",
            "fixed_split",
            "",
            "highest over lowest",
            _FIG_4,
            1.2,
            "at least",
        ),
        Claim(
            "7a",
            f"LA over FA2 past 8k, 56 heads, {single}",
            "latency",
            "fa2",
            "lean",
            "lowest",
            _FIG_7A[4:],
            2,
            "at least",
        ),
        Claim("7a", "LA over FA2 at 512k", "latency", "fa2", "lean", "mean", _FIG_7A[9:], 2.46),
        Claim(
            "7a", "FD over FA2 at 512k", "latency", "fa2", "fixed_split", "mean", _FIG_7A[9:], 2.06
        ),
        Claim(
            "7a",
            "FD over FA2 flat past 32k: highest over lowest",
            "latency",
            "fa2",
            "fixed_split",
            "highest over lowest",
            _FIG_7A[5:],
            1.1,
            "at most",
        ),
        Claim(
            "7b",
            f"LA over FA2 at the fewest heads (8 here), 64k, {single}",
            "latency",
            "fa2",
            "lean",
            "mean",
            (_mha(8, 64),),
            12.5,
        ),
        Claim(
            "7b", "LA over FA2 at 64 heads", "latency", "fa2", "lean", "mean", (_mha(64, 64),), 2.15
        ),
        Claim(
            "7c",
            "LA over FA2 at batch 1 (24 heads, 64k here)",
            "latency",
            "fa2",
            "lean",
            "mean",
            _FIG_7C[:1],
            4.71,
        ),
        Claim(
            "7c",
            "LA over FD at batch 1",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            _FIG_7C[:1],
            1.06,
        ),
        Claim(
            "7c",
            "LA over FA2 at large batch (16)",
            "latency",
            "fa2",
            "lean",
            "mean",
            _FIG_7C[4:],
            1.5,
        ),
        Claim(
            "7c",
            "LA over FD at large batch (16)",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            _FIG_7C[4:],
            1.5,
        ),
        Claim(
            "text",
            f"LA over FA2, mean of {SAMPLES} samples",
            "latency",
            "fa2",
            "lean",
            "mean",
            _samples(),
            2.6,
        ),
        Claim(
            "text",
            "LA over FA2, highest: 16 heads, 512k",
            "latency",
            "fa2",
            "lean",
            "mean",
            (_mha(16, 512),),
            8.33,
        ),
        Claim(
            "text",
            "LA over FA2, lowest: 24 heads, 1k",
            "latency",
            "fa2",
            "lean",
            "mean",
            (_mha(24, 1),),
            1.1,
        ),
        Claim(
            "text",
            f"LA over FD, mean of {SAMPLES} samples",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            _samples(),
            1.27,
        ),
        Claim(
            "text",
            "LA over FD, highest: 24 heads, 512k",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            (_mha(24, 512),),
            1.71,
        ),
        Claim(
            "text",
            "LA over FD, lowest: 24 heads, 1k",
            "latency",
            "fixed_split",
            "lean",
            "mean",
            (_mha(24, 1),),
            0.99,
        ),
        Claim(
            "9",
            "LA over FA2, head_dim 128, 512k (32 heads here)",
            "latency",
            "fa2",
            "lean",
            "mean",
            _FIG_9[9:],
            3.67,
        ),
        Claim(
            "9", "LA over FA2, head_dim 128, 1k", "latency", "fa2", "lean", "mean", _FIG_9[:1], 1.2
        ),
        Claim(
            "11",
            "LA over FD grows as a batch gets more uneven: mean/max 0.2 over 1.0",
            "latency",
            "fixed_split",
            "lean",
            "last over first",
            _FIG_11,
            1.0,
            "at least",
        ),
        Claim(
            "13",
            "energy of LA over FD at 512k, 56 heads",
            "energy",
            "lean",
            "fixed_split",
            "mean",
            _FIG_7A[9:],
            1.0,
            "at most",
        ),
        Claim(
            "13",
            "energy of LA over FA2 at 512k",
            "energy",
            "lean",
            "fa2",
            "mean",
            _FIG_7A[9:],
            1.0,
            "at most",
        ),
        Claim(
            "13",
            "the gap to FD grows past 128k: LA over FD, 512k over 128k",
            "energy",
            "lean",
            "fixed_split",
            "last over first",
            _FIG_7A[7:],
            1.0,
            "at most",
        ),
    )


def evaluate(spec: GpuSpec) -> list[Outcome]:
    """Every claim with the model's prediction for a GPU."""
    outcomes = []
    for claim in claims():
        predicted, holds = _predict(claim, spec, single_stage=False)
        again = (None, None)
        if "fa2" in (claim.of, claim.over) and claim.quantity != "occupancy":
            again = _predict(claim, spec, single_stage=True)
        outcomes.append(Outcome(claim, predicted, holds, *again))
    return outcomes


def _predict(claim: Claim, spec: GpuSpec, single_stage: bool) -> tuple[float, bool]:
    predicted = claim.value(
        [_figure(claim, problem, spec, single_stage) for problem in claim.problems]
    )
    return predicted, claim.holds(predicted)


_STATISTICS: dict[Statistic, Callable[[Sequence[float]], float]] = {
    "mean": lambda figures: sum(figures) / len(figures),
    "lowest": min,
    "highest": max,
    "last over first": lambda figures: figures[-1] / figures[0],
    "highest over lowest": lambda figures: max(figures) / min(figures),
}


def _figure(claim: Claim, problem: AttentionProblem, spec: GpuSpec, single_stage: bool) -> float:
    def config(name: str) -> KernelConfig:
        return SINGLE_STAGE if single_stage and name == "fa2" else _default(name, problem, spec)

    if claim.quantity == "occupancy":
        return _occupancy(claim.of, problem, config(claim.of), spec)
    predicted = _latency_us if claim.quantity == "latency" else _energy_mj
    of = predicted(claim.of, problem, config(claim.of), spec)
    return of / predicted(claim.over, problem, config(claim.over), spec)


def _default(name: str, problem: AttentionProblem, spec: GpuSpec) -> KernelConfig:
    return kernel(name).default_config(problem, spec)


def _schedule(
    name: str, problem: AttentionProblem, config: KernelConfig, spec: GpuSpec
) -> Schedule:
    schedule = kernel(name).schedule(problem, config, spec)
    assert schedule is not None
    return schedule


@cache
def _latency_us(name: str, problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> float:
    from leanbench.model.cell import predict_latency_us

    return predict_latency_us(problem, kernel(name), config, spec)


def _energy_mj(name: str, problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> float:
    from leanbench.model.cell import predict_energy_mj

    schedule = _schedule(name, problem, config, spec)
    return predict_energy_mj(_latency_us(name, problem, config, spec), problem, schedule, spec)


def _occupancy(name: str, problem: AttentionProblem, config: KernelConfig, spec: GpuSpec) -> float:
    """As in rows: one CTA on an SM at once, or as many as the config asks for."""
    schedule = _schedule(name, problem, config, spec)
    return quantisation_efficiency(schedule, schedule.slots(spec.sms, config.ctas_per_sm))
