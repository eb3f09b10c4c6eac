"""Ratios of latencies or energies over problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanbench.model.error import model_error, scaled_from
from leanbench.report.compare.pair import judge

#: Default margin: a relative difference within it is none.
MARGIN = 0.01


@dataclass(frozen=True)
class Margin:
    """A relative difference within which two latencies have no order."""

    share: float
    #: True if the latencies are predicted and the margin is the model's error.
    is_model_error: bool = False
    #: GPU on which the error was measured, if not the rows' GPU.
    scaled_from: str = ""

    @property
    def words(self) -> str:
        """Text after ``within``."""
        if self.is_model_error:
            of = f"{self.scaled_from} error" if self.scaled_from else "error"
            return f"the model's {of} of {self.share:.1%}"
        return f"{self.share * 100:g}%"


MEASURED = Margin(MARGIN)


def margin_of(
    source: str, gpus: Iterable[str], kernels: Iterable[str], least: float = MARGIN
) -> Margin:
    """Return the margin of rows of one source.

    For predictions it is the model's largest error of these kernels on one of the GPUs, if that
    exceeds `least`.
    """
    names = list(kernels)
    errors = {gpu: model_error(gpu, names) for gpu in gpus} if source == "predicted" else {}
    worst = max(errors, key=errors.__getitem__, default="")
    if errors.get(worst, 0.0) <= least:
        return Margin(least)
    return Margin(errors[worst], is_model_error=True, scaled_from=scaled_from(worst))


@dataclass(frozen=True)
class Ratios:
    """Statistics of the ratios of two sides over the problems that both have."""

    problems: int
    geomean: float
    lowest: float
    #: Label of a problem.
    lowest_at: str
    highest: float
    highest_at: str
    #: Number of problems with a ratio above 1, within the margin of 1, and below it.
    above: int
    same: int
    below: int


def ratios_of(
    labels: Sequence[str], values: Sequence[float], margin: Margin = MEASURED
) -> Ratios | None:
    """Summarise one value per problem; None without values."""
    if not values:
        return None
    lowest, highest = min(values), max(values)
    # Judged as base over the other, like a speedup.
    verdicts = Counter(judge(1 / value, 1 / value, margin.share) for value in values)
    return Ratios(
        problems=len(values),
        geomean=geomean(values),
        lowest=lowest,
        lowest_at=labels[values.index(lowest)],
        highest=highest,
        highest_at=labels[values.index(highest)],
        above=verdicts["faster"],
        same=verdicts["same"],
        below=verdicts["slower"],
    )


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def times(value: float | None) -> str:
    """Format a ratio: ``1.08×``; empty for None."""
    return "" if value is None else f"{value:.2f}×"
