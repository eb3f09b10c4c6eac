"""Published problems near a problem, and latencies estimated from them.

A kernel's latency is the read floor of the problem, times the ratio of `lean` to its floor, times
the ratio of the kernel to `lean`. Each ratio is a weighted mean over the nearest problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from leanbench.core.axes import AXES
from leanbench.core.axis import Axis
from leanbench.core.kinds import SAME
from leanbench.core.parallel import NONE
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find
from leanbench.model.calibration import calibration_for
from leanbench.model.rates import floor_us
from leanbench.records.published import PublishedRow, published

Source = Literal["measured", "neighbours", "model"]

#: Numbers that change a latency, with their weights in a distance: octaves, or yes and no. Chosen
#: so that problems alike in speed are near; the shares in docs/recommend.md barely depend on them.
_FEATURES: dict[str, tuple[float, Callable[[AttentionProblem], float]]] = {
    "size": (1.0, lambda problem: math.log2(problem.kv_bytes)),
    "output tiles": (0.5, lambda problem: math.log2(problem.batch * problem.kv_heads)),
    "rows": (0.7, lambda problem: math.log2(problem.group_size * problem.q_len)),
    "head_dim": (2.0, lambda problem: math.log2(problem.head_dim)),
    "raggedness": (
        0.7,
        lambda problem: math.log2(problem.max_context * problem.batch / problem.total_context),
    ),
    "room": (0.3, lambda problem: math.log2(problem.cache_capacity / problem.max_context)),
    "q_len": (1.0, lambda problem: math.log2(problem.q_len)),
    "paged": (1.0, lambda problem: problem.page_size is not None),
    "page size": (0.3, lambda problem: math.log2((problem.page_size or 16) / 16)),
    "lengths": (0.5, lambda problem: problem.lengths_on == "device"),
    "fp8": (4.0, lambda problem: problem.kv_dtype != SAME),
    "scales": (1.0, lambda problem: problem.kv_dtype != SAME and problem.scaled),
    "dtype": (0.1, lambda problem: problem.dtype == "bf16"),
    "layout": (0.3, lambda problem: problem.kv_layout == "NHD"),
    "latent": (9.0, lambda problem: problem.latent),
    "window": (1.5, lambda problem: problem.most_behind >= 0),
    "sinks": (1.5, lambda problem: problem.sinks),
    "softcap": (2.0, lambda problem: problem.softcap > 0),
    "alibi": (3.0, lambda problem: problem.alibi),
    "leftpad": (3.0, lambda problem: problem.leftpad),
    "batch_idx": (3.0, lambda problem: problem.batch_idx),
    "append": (3.0, lambda problem: problem.append > 0),
    "rotary": (3.0, lambda problem: problem.rotary_dim > 0),
    "tensor": (3.0, lambda problem: math.log2(problem.gpus.tensor)),
    "context": (3.0, lambda problem: math.log2(problem.gpus.context)),
}
#: Distance of a difference, whatever its size.
_PER_DIFFERENCE = 0.3
#: Maximum distance of a kernel's nearest problem.
_FAR = 3.0
#: Width of the weights, at least, and the neighbour that sets it with a share of its distance.
_WIDTH, _NTH, _SHARE = 0.5, 3, 0.7
#: Problems that tell how good an estimate is.
_ALIKE = 20
#: Loss up to which a choice counts as right.
WITHIN = 0.03
#: Kernels that the others are compared with.
REFERENCES = ("lean", "lean_mla")


@cache
def _features(problem: AttentionProblem) -> tuple[float, ...]:
    return tuple(weight * value(problem) for weight, value in _FEATURES.values())


def nearest(
    problem: AttentionProblem, others: Iterable[AttentionProblem], count: int
) -> list[AttentionProblem]:
    """Return the nearest problems, the nearest first. Of two alike in speed, that with fewer
    differences is nearer.
    """
    candidates = [
        other
        for other in dict.fromkeys(others)
        if other != problem and other.whole_model == problem.whole_model
    ]

    def farness(other: AttentionProblem) -> float:
        distance = math.dist(_features(problem), _features(other))
        return distance + _PER_DIFFERENCE * len(_differing(problem, other))

    return sorted(candidates, key=farness)[:count]


def differences(problem: AttentionProblem, other: AttentionProblem) -> str:
    """Say how another problem differs: ``batch 4 instead of 8, bf16 instead of fp16``."""
    phrases = []
    for axis in _differing(problem, other):
        one, two = (axis.describe(str(_written(axis.name, each))) for each in (problem, other))
        phrases.append(f"{two} instead of {one.removeprefix(f'{axis.title} ')}")
    return ", ".join(phrases)


def _differing(problem: AttentionProblem, other: AttentionProblem) -> list[Axis]:
    return [
        axis for axis in AXES.values() if _written(axis.name, problem) != _written(axis.name, other)
    ]


def _written(name: str, problem: AttentionProblem) -> str | None:
    """Write an axis of a problem; None for an axis of sweeps alone."""
    if name == "heads":
        return AXES[name].write((problem.q_heads, problem.kv_heads))
    if name == "context":
        word = next(word for word in problem.label.split() if word.startswith("n"))
        return word[1:]
    return AXES[name].write(getattr(problem, name)) if hasattr(problem, name) else None


@dataclass(frozen=True)
class Estimate:
    """Latency of a kernel on a problem."""

    latency_us: float
    source: Source
    #: Half of the interval, as a share of the latency; None if unknown.
    error: float | None = None
    row: PublishedRow | None = None


@dataclass(frozen=True)
class Trial:
    """A published problem, estimated without its rows: latencies by kernel."""

    estimated: dict[str, float]
    measured: dict[str, float]

    @property
    def loss(self) -> float:
        """Return the latency of the choice over the best, less 1."""
        choice = min(self.estimated, key=lambda kernel: self.estimated[kernel])
        return self.measured[choice] / min(self.measured.values()) - 1

    def error(self, kernel: str, reference: str | None = None) -> float | None:
        """Return the error of an estimate, or of its ratio to that of another kernel."""
        names = [kernel] if reference is None else [kernel, reference]
        if not all(name in self.estimated for name in names):
            return None
        logs = [math.log(self.estimated[name] / self.measured[name]) for name in names]
        return abs(math.expm1(logs[0] - sum(logs[1:])))


class Measured:
    """Published rows of one GPU, each kernel's newest of a problem. Runs from before the kernels'
    hash was recorded, and whole models, are left out.
    """

    def __init__(self, gpu: str) -> None:
        self.rows: dict[AttentionProblem, dict[str, PublishedRow]] = {}
        self._spec = find(gpu)
        self._ratios: dict[str, np.ndarray] = {}
        rows = [row for row in published() if row.run.gpu == gpu and row.run.kernels]
        for row in sorted(rows, key=lambda row: row.run.day):
            if row.problem.whole_model is None:
                self.rows.setdefault(row.problem, {})[row.kernel] = row

    @cached_property
    def problems(self) -> list[AttentionProblem]:
        """Problems of one GPU, with a reference."""
        return [
            problem
            for problem, rows in self.rows.items()
            if problem.parallel == NONE and rows.keys() & set(REFERENCES)
        ]

    @cached_property
    def _points(self) -> np.ndarray:
        return np.array([_features(problem) for problem in self.problems])

    @cached_property
    def _over_floor(self) -> np.ndarray:
        """Log of the reference's latency over the model's read floor."""
        return np.log(
            [self._reference_us(problem) / self._floor_us(problem) for problem in self.problems]
        )

    def _over_reference(self, kernel: str) -> np.ndarray:
        """Log of a kernel's latency over the reference's; NaN if it was not measured."""
        if kernel not in self._ratios:
            self._ratios[kernel] = np.log(
                [
                    self.rows[problem][kernel].latency_us / self._reference_us(problem)
                    if kernel in self.rows[problem]
                    else math.nan
                    for problem in self.problems
                ]
            )
        return self._ratios[kernel]

    def _reference_us(self, problem: AttentionProblem) -> float:
        rows = self.rows[problem]
        return next(rows[name].latency_us for name in REFERENCES if name in rows)

    def _floor_us(self, problem: AttentionProblem) -> float:
        constants = calibration_for(self._spec).constants
        return floor_us(problem.kv_bytes, self._spec, constants)

    def estimates(self, problem: AttentionProblem, kernels: Iterable[str]) -> dict[str, Estimate]:
        """Return measured latencies, else those of neighbours. Kernels that were measured on no
        near problem are left out.
        """
        rows = self.rows.get(problem, {})
        kernels = list(kernels)
        neighbours = self._from_neighbours(problem, [name for name in kernels if name not in rows])
        estimates = {}
        for name in kernels:
            if name in rows:
                row = rows[name]
                ends = (row.low_us or row.latency_us, row.high_us or row.latency_us)
                error = (ends[1] - ends[0]) / 2 / row.latency_us
                estimates[name] = Estimate(row.latency_us, "measured", error, row)
            elif name in neighbours:
                estimates[name] = Estimate(neighbours[name], "neighbours")
        return estimates

    def _from_neighbours(
        self, problem: AttentionProblem, kernels: Sequence[str]
    ) -> dict[str, float]:
        """Estimate latencies without the problem's own rows."""
        if not self.problems or not kernels:
            return {}
        distances = np.linalg.norm(self._points - np.array(_features(problem)), axis=1)
        own = np.array([other == problem for other in self.problems])
        distances[own] = np.inf
        over_floor = _weighted(self._over_floor, distances)
        if over_floor is None:
            return {}
        reference_us = self._floor_us(problem) * math.exp(over_floor)
        ratios = {name: _weighted(self._over_reference(name), distances) for name in kernels}
        return {
            name: reference_us * math.exp(ratio)
            for name, ratio in ratios.items()
            if ratio is not None
        }

    def alike(self, problem: AttentionProblem) -> list[AttentionProblem]:
        """Return the nearest published problems."""
        return nearest(problem, self.problems, _ALIKE)

    def trial(self, problem: AttentionProblem, kernels: Iterable[str]) -> Trial:
        """Estimate a published problem without its rows."""
        rows = self.rows[problem]
        measured = [name for name in kernels if name in rows]
        estimated = self._from_neighbours(problem, measured)
        return Trial(estimated, {name: rows[name].latency_us for name in measured})


def _weighted(values: np.ndarray, distances: np.ndarray) -> float | None:
    """Return the mean over the nearest problems with a value; None if none is near."""
    distances = np.where(np.isnan(values), np.inf, distances)
    near = np.sort(distances)[:_NTH]
    near = near[np.isfinite(near)]
    if not len(near) or near[0] > _FAR:
        return None
    width = max(_WIDTH, _SHARE * near[-1])
    weights = np.exp(-((distances / width) ** 2))
    return float(np.nansum(weights * np.nan_to_num(values)) / weights.sum())


measured_on = cache(Measured)
