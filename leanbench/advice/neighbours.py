"""Published problems near a problem, and latencies estimated from them.

A latency is the model's read floor, times the ratio of `lean` to its floor, times the kernel's
ratio to `lean`. Each ratio is a weighted mean over the nearest published problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from operator import ne
from statistics import quantiles
from typing import Literal

import numpy as np

from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.kinds import SAME
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.model.calibration import calibration_for
from leanbench.model.rates import floor_us
from leanbench.records.published import PublishedRow, published

Source = Literal["measured", "neighbours", "model"]

#: Distance of a problem from its default in each of these axes.
_VARIANTS = {
    "latent": 9.0,
    "window_left": 1.5,
    "sinks": 1.5,
    "softcap": 2.0,
    **dict.fromkeys(("alibi", "leftpad", "batch_idx", "append", "rotary_dim"), 3.0),
}
#: Rows that a tile over a latent cache has at least: fewer query heads take as long.
_LATENT_ROWS = 16
#: Distance of a difference of any size, for fewer of them among problems of similar speed.
_PER_DIFFERENCE = 0.3
#: A kernel needs _NTH problems within _FAR. The farthest of them sets the width of the weights.
_NTH, _FAR = 3, 3.0
_LEAST_WIDTH, _WIDTH_SHARE = 0.5, 0.7
#: Problems that tell how good an estimate is, and the fewest errors that do.
_NEAR, _ENOUGH = 20, 5
#: Median difference between two runs of the same command on two GPUs of a product.
BETWEEN_GPUS = 0.021
#: Kernels that the others are compared with.
REFERENCES = ("lean", "lean_mla")


@cache
def _point(problem: AttentionProblem) -> tuple[float, ...]:
    """Return the numbers that a latency depends on: octaves and switches, weighted so that problems
    of similar speed are near.
    """
    # Either reads the last tokens alone.
    rows = problem.group_size * problem.q_len
    variants = {name.replace("attention_chunk", "window_left") for name in problem.special}
    return (
        math.log2(problem.kv_bytes),
        0.5 * math.log2(problem.batch * problem.kv_heads),
        0.7 * math.log2(max(rows, _LATENT_ROWS if problem.latent else 1)),
        2.0 * math.log2(problem.head_dim),
        0.7 * math.log2(problem.max_context * problem.batch / problem.total_context),
        4.0 * (problem.kv_dtype != SAME),
        *(weight * (name in variants) for name, weight in _VARIANTS.items()),
    )


@cache
def _kind(problem: AttentionProblem) -> tuple[bool, ...]:
    """Return what makes estimates of two problems equally good."""
    switches = (problem.is_ragged, problem.page_size is not None, problem.kv_dtype != SAME)
    return (*switches, *(weight > 0 for weight in _point(problem)[-len(_VARIANTS) :]))


def nearest(
    problem: AttentionProblem, others: Iterable[AttentionProblem], count: int
) -> list[AttentionProblem]:
    """Return the nearest other problems, the nearest first."""

    def farness(other: AttentionProblem) -> float:
        distance = math.dist(_point(problem), _point(other))
        return distance + _PER_DIFFERENCE * sum(map(ne, astuple(problem), astuple(other)))

    candidates = [
        other
        for other in dict.fromkeys(others)
        if other != problem
        and other.whole_model == problem.whole_model
        and (other.parallel == NONE) == (problem.parallel == NONE)
    ]
    return sorted(candidates, key=farness)[:count]


@dataclass(frozen=True)
class Estimate:
    """Latency of a kernel on a problem."""

    latency_us: float
    source: Source
    #: Half of the interval, as a share of the latency; None if unknown.
    error: float | None = None
    row: PublishedRow | None = None
    #: Plain problem that the model predicted instead, which reads the same tokens.
    plain: AttentionProblem | None = None


@dataclass(frozen=True)
class Trial:
    """Latencies of a published problem by kernel, estimated without its rows and measured."""

    estimated: dict[str, float]
    measured: dict[str, float]

    def error(self, kernel: str, over: str | None = None) -> float | None:
        """Return the error of an estimate, or of its ratio to another kernel's."""
        if not {kernel, over or kernel} <= self.estimated.keys():
            return None
        ratio = self.estimated[kernel] / self.measured[kernel]
        return abs(ratio / (self.estimated[over] / self.measured[over] if over else 1) - 1)


class Measured:
    """Published rows of one GPU: each kernel's newest of a problem. Whole models are left out, and
    runs from before kernels were hashed.

    Args:
        own: Rows that were measured here. They replace published ones.
    """

    def __init__(self, spec: GpuSpec, own: tuple[PublishedRow, ...] = ()) -> None:
        self.rows: dict[AttentionProblem, dict[str, PublishedRow]] = {}
        rows = [row for row in published() if row.run.gpu == spec.name and row.run.kernels]
        for row in [*sorted(rows, key=lambda row: row.run.day), *own]:
            if row.problem.whole_model is None:
                self.rows.setdefault(row.problem, {})[row.kernel] = row
        #: Problems of one GPU, with the latency of a reference.
        self.references = {
            problem: next(of[name].latency_us for name in REFERENCES if name in of)
            for problem, of in self.rows.items()
            if problem.parallel == NONE and of.keys() & set(REFERENCES)
        }
        self._spec, self._own = spec, frozenset(own)
        self._points = np.array([_point(problem) for problem in self.references])
        self._places = {problem: place for place, problem in enumerate(self.references)}
        self._trials: dict[AttentionProblem, list[Trial]] = {}
        over_floor = [us / self._floor_us(problem) for problem, us in self.references.items()]
        self._over_floor = np.log(over_floor)
        self._over_reference: dict[str, np.ndarray] = {}

    def _floor_us(self, problem: AttentionProblem) -> float:
        return floor_us(problem.kv_bytes, self._spec, calibration_for(self._spec).constants)

    def estimates(self, problem: AttentionProblem, kernels: Sequence[str]) -> dict[str, Estimate]:
        """Return measured latencies, else those of neighbours. Kernels with too few trials near the
        problem are left out.
        """
        found = {}
        for name, us in self.from_neighbours(problem, kernels).items():
            if (error := self.error(problem, name)) is not None:
                found[name] = Estimate(us, "neighbours", error)
        for name, row in self.rows.get(problem, {}).items():
            if name in kernels:
                spread = (row.high_us or 0) - (row.low_us or 0)
                other_gpu = 0.0 if row in self._own else BETWEEN_GPUS
                error = spread / 2 / row.latency_us + other_gpu
                found[name] = Estimate(row.latency_us, "measured", error, row)
        return found

    def from_neighbours(
        self, problem: AttentionProblem, kernels: Iterable[str]
    ) -> dict[str, float]:
        """Estimate latencies without the problem's own rows."""
        if not self.references:
            return {}
        distances = self._distances(problem)
        over_floor = _weighted(self._over_floor, distances)
        estimated = {}
        for name in kernels:
            ratio = _weighted(self._ratios(name), distances)
            if ratio is not None and over_floor is not None:
                estimated[name] = self._floor_us(problem) * math.exp(over_floor + ratio)
        return estimated

    def _ratios(self, kernel: str) -> np.ndarray:
        """Return logs of a kernel's latency over the reference's; NaN if it was not measured."""
        if kernel not in self._over_reference:
            ratios = [
                self.rows[problem][kernel].latency_us / us
                if kernel in self.rows[problem]
                else math.nan
                for problem, us in self.references.items()
            ]
            self._over_reference[kernel] = np.log(ratios)
        return self._over_reference[kernel]

    def _distances(self, problem: AttentionProblem) -> np.ndarray:
        distances = np.linalg.norm(self._points - np.array(_point(problem)), axis=1)
        if problem in self._places:
            distances[self._places[problem]] = np.inf
        return distances

    def near(self, problem: AttentionProblem) -> list[AttentionProblem]:
        """Return the nearest published problems."""
        return nearest(problem, self.references, _NEAR)

    def trial(self, problem: AttentionProblem, kernels: Iterable[str]) -> Trial:
        measured = {
            name: row.latency_us for name, row in self.rows[problem].items() if name in kernels
        }
        return Trial(self.from_neighbours(problem, measured), measured)

    def trials(self, problem: AttentionProblem) -> list[Trial]:
        """Try the nearest published problems of the same kind."""
        if problem not in self._trials and self.references:
            every = list(self.references)
            is_same = [_kind(other) == _kind(problem) for other in every]
            distances = np.where(is_same, self._distances(problem), np.inf)
            near = [place for place in np.argsort(distances)[:_NEAR] if distances[place] < np.inf]
            tried = [self.trial(every[place], self.rows[every[place]]) for place in near]
            self._trials[problem] = tried
        return self._trials.get(problem, [])

    def error(
        self, problem: AttentionProblem, kernel: str, over: str | None = None, share: int = 9
    ) -> float | None:
        """Return the error that nine of ten trials near a problem have at most, or another share of
        ten; None if there are too few.
        """
        tried = (trial.error(kernel, over) for trial in self.trials(problem))
        errors = [error for error in tried if error is not None]
        if len(errors) < _ENOUGH:
            return None
        return quantiles(errors, n=10, method="inclusive")[share - 1]


def _weighted(values: np.ndarray, distances: np.ndarray) -> float | None:
    """Return the mean over the nearest problems with a value; None if too few are near."""
    distances = np.where(np.isnan(values), np.inf, distances)
    near = np.sort(distances)[:_NTH]
    if len(near) < _NTH or near[-1] > _FAR:
        return None
    weights = np.exp(-((distances / max(_LEAST_WIDTH, _WIDTH_SHARE * near[-1])) ** 2))
    return float(np.sum(weights * np.nan_to_num(values)) / np.sum(weights))


measured_on = cache(Measured)
