"""A claim of the LeanAttention paper, and when it holds.

A speedup is judged by its gain, the ratio less 1: its direction and its 95% interval.
docs/results.md, "When a claim holds", has the rules.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem

#: Kernels by the paper's names: LeanAttention, FlashAttention-2, FlashDecoding, FlashInfer.
Role = Literal["LA", "FA2", "FD", "FI"]
#: `latency` and `energy`: `of` over `over`. `occupancy` of `of`: the schedule's quantisation
#: efficiency if predicted, the SM busy share if measured. A request to a whole model is a prompt
#: and output tokens: `request` is the time with `of` over that with `over`, `decode share` the
#: output tokens' part of the time with `of`.
Quantity = Literal["latency", "energy", "occupancy", "request", "decode share"]
#: Statistic over the problems' figures. Means of ratios are geometric, of shares arithmetic.
Statistic = Literal["mean", "lowest", "highest", "last over first", "highest over lowest"]
#: `about`: the paper gives a figure. `at least`, `at most`: a bound or a direction.
Relation = Literal["about", "at least", "at most"]
#: `holds`: the interval contains the paper's figure, or lies on the right side of its bound.
#: `less`, `more`: it lies below or above. `reversed`: it lies on the other side of 1 than the
#: claim. `not resolved`: it contains both the paper's figure and 1, or a bound.
Verdict = Literal["holds", "more", "less", "reversed", "not resolved"]
#: Problems of the text's "over 500 samples".
SAMPLES = 500
#: Problems of a run that replace them: 200 drawn by a seed, less the noisy ones.
FEWEST_SAMPLES = 150


@dataclass(frozen=True)
class Baselines:
    """Kernels that stand for the paper's baselines; None for a baseline that they lack."""

    words: str
    fa2: str | None = None
    fd: str | None = None
    flashinfer: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.fa2, self.fd, self.flashinfer)))

    def kernels(self, claim: Claim) -> tuple[str, ...]:
        """Return the kernels that the claim is about; none if a baseline of it is lacking."""
        by_role = {"LA": "lean", "FA2": self.fa2, "FD": self.fd, "FI": self.flashinfer}
        roles = (claim.of,) if claim.over is None else (claim.of, claim.over)
        names = tuple(name for role in roles if (name := by_role[role]))
        return names if len(names) == len(roles) else ()

    def others(self, claim: Claim) -> tuple[str, ...]:
        """Return the kernels of the claim but lean."""
        return tuple(name for name in self.kernels(claim) if name in self.names)


OWN = Baselines("this project's kernels", "fa2", "fixed_split")
#: A claim is evaluated with each of them that was measured.
BASELINES = (
    Baselines("the library flash-attn", "flash_attn", "flash_decoding"),
    Baselines("the library's code in torch", "torch_flash_no_split", "torch_flash"),
    Baselines("the library FlashInfer", flashinfer="flashinfer_best"),
    OWN,
)


@dataclass(frozen=True)
class Figure:
    """A figure and its 95% interval, or the model's error for a prediction."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, share: float) -> Figure:
        """Build a figure with a relative uncertainty."""
        return cls(value, value / (1 + share), value * (1 + share))

    @property
    def has_one(self) -> bool:
        """True if the interval contains 1: the direction of a ratio is not known."""
        return self.low <= 1 <= self.high

    def times(self, factor: float) -> Figure:
        return Figure(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, known: float) -> Figure:
        return Figure(self.value + known, self.low + known, self.high + known)

    def over(self, other: Figure) -> Figure:
        return Figure(self.value / other.value, self.low / other.high, self.high / other.low)


@dataclass(frozen=True)
class Claim:
    """A quantitative sentence of the paper."""

    figure: str
    words: str
    quantity: Quantity
    of: Role
    over: Role | None
    statistic: Statistic
    problems: tuple[AttentionProblem, ...]
    paper: float
    relation: Relation = "about"
    #: Tokens of a request's prompt. Each problem is the step in the middle of the output: the time
    #: of a step grows linearly with its context, so that step is the mean of all.
    prompt: int | None = None

    def prompt_of(self, problem: AttentionProblem) -> AttentionProblem:
        """Return the first step after the prompt of a request, given its middle step."""
        assert self.prompt is not None
        return replace(problem, context=self.prompt)

    def output_tokens(self, problem: AttentionProblem) -> int:
        """Return the output tokens of a request, given its middle step."""
        assert self.prompt is not None
        return 2 * (problem.max_context - self.prompt)

    @property
    def paper_words(self) -> str:
        sign = {"about": "", "at least": "≥ ", "at most": "≤ "}[self.relation]
        share = "%" if self.is_share else "x"
        return f"{sign}{self._number(self.paper, 2)}{share}"

    @property
    def is_of_samples(self) -> bool:
        """True if any `FEWEST_SAMPLES` problems of the kind will do: the paper names none."""
        return len(self.problems) == SAMPLES

    @property
    def is_share(self) -> bool:
        is_share = self.quantity in ("occupancy", "decode share")
        return is_share and self.statistic in ("mean", "lowest", "highest")

    def value(self, figures: Sequence[Figure]) -> Figure:
        """Return the claim's figure from one figure per problem."""
        values = [figure.value for figure in figures]
        lows, highs = [figure.low for figure in figures], [figure.high for figure in figures]
        if self.statistic == "last over first":
            return figures[-1].over(figures[0])
        if self.statistic == "highest over lowest":
            bounds = max(1.0, max(lows) / min(highs)), max(highs) / min(lows)
            return Figure(max(values) / min(values), *bounds)
        mean = statistics.fmean if self.is_share else statistics.geometric_mean
        statistic = {"mean": mean, "lowest": min, "highest": max}[self.statistic]
        return Figure(statistic(values), statistic(lows), statistic(highs))

    def verdict(self, figure: Figure) -> Verdict:
        """Judge a figure. The paper's figure includes all values that round to its digits."""
        if self._is_reversed(figure):
            return "reversed"
        is_about = self.relation == "about"
        unit = 10.0 ** int(Decimal(str(self.paper)).as_tuple().exponent)
        lowest, highest = self.paper - is_about * unit / 2, self.paper + is_about * unit / 2
        is_right = {
            "about": figure.low <= highest and figure.high >= lowest and not figure.has_one,
            "at least": figure.low >= self.paper,
            "at most": figure.high <= self.paper,
        }
        if is_right[self.relation]:
            return "holds"
        if figure.high < lowest:
            return "less"
        return "more" if figure.low > highest else "not resolved"

    def is_met(self, figure: Figure) -> bool:
        """Return True if the claim holds or the gain is larger than the paper's."""
        verdict = self.verdict(figure)
        return verdict == "holds" or (verdict == "more" and self._is_gain)

    @property
    def _is_gain(self) -> bool:
        """True if the claim puts the figure above 1, so that more is a larger gain."""
        return self.relation != "at most" and self.paper >= 1

    def _is_reversed(self, figure: Figure) -> bool:
        if self.is_share or self.statistic == "highest over lowest":
            return False
        return figure.high < 1 if self._is_gain else figure.low > 1

    @property
    def sweeps(self) -> tuple[str, ...]:
        """Names of the shipped sweeps made for the claim."""
        if self.is_of_samples:
            return ("paper-500",)
        if self.figure == "text":
            return ("paper-claims", "paper-500")
        figure = "7a" if self.figure == "abstract" else self.figure
        own = f"paper-fig{figure}"
        on_one_gpu = all(problem.parallel == NONE for problem in self.problems)
        return ("paper-claims", own) if self.quantity == "latency" and on_one_gpu else (own,)

    def words_of(self, figure: Figure) -> str:
        """Format a figure: ``1.82x (1.81 to 1.83)``.

        Digits suffice to separate the interval's ends from the paper's figure and from 1.
        """
        digits = next((digits for digits in (2, 3) if self._is_clear(figure, digits)), 4)
        value, *ends = [
            self._number(number, digits) for number in (figure.value, figure.low, figure.high)
        ]
        interval = f" ({' to '.join(ends)})" if figure.low < figure.high else ""
        return f"{value}{'%' if self.is_share else 'x'}{interval}"

    def _number(self, value: float, digits: int) -> str:
        return f"{100 * value:.{digits - 2}f}" if self.is_share else f"{value:.{digits}f}"

    def _is_clear(self, figure: Figure, digits: int) -> bool:
        """Return True if no end of the interval rounds to the paper's figure or to 1."""
        ends = (figure.low, figure.high)
        return all(
            end == bound or round(end, digits) != round(bound, digits)
            for end in ends
            for bound in (self.paper, 1.0)
        )
