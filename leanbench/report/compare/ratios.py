"""Ratios of latencies or energies over problems, as every comparison sums them up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanbench.model.error import model_error, scaled_from
from leanbench.report.compare.pair import judge

#: A relative difference within this is none, unless another margin is chosen.
MARGIN = 0.01


@dataclass(frozen=True)
class Margin:
    """A relative difference within which two latencies have no order."""

    share: float
    #: The performance model is as wrong: the latencies are predicted.
    is_model_error: bool = False
    #: The GPU that this error was measured on, if it is another one than the rows'.
    scaled_from: str = ""

    @property
    def words(self) -> str:
        """Text behind ``within``."""
        if self.is_model_error:
            of = f"{self.scaled_from} error" if self.scaled_from else "error"
            return f"the model's {of} of {self.share:.1%}"
        return f"{self.share * 100:g}%"


MEASURED = Margin(MARGIN)


def margin_of(
    source: str, gpus: Iterable[str], kernels: Iterable[str], least: float = MARGIN
) -> Margin:
    """The margin of rows of one source: for predictions, what those of these kernels were wrong by
    on the GPU that is known worst, if it is more than `least`.
    """
    names = list(kernels)
    errors = {gpu: model_error(gpu, names) for gpu in gpus} if source == "predicted" else {}
    worst = max(errors, key=errors.__getitem__, default="")
    if errors.get(worst, 0.0) <= least:
        return Margin(least)
    return Margin(errors[worst], is_model_error=True, scaled_from=scaled_from(worst))


@dataclass(frozen=True)
class Ratios:
    """Ratios of one side over another, over the problems where both have a figure."""

    problems: int
    geomean: float
    lowest: float
    #: Label of the problem.
    lowest_at: str
    highest: float
    highest_at: str
    #: Problems with a ratio above 1, within the margin of 1, and below it.
    above: int
    same: int
    below: int


def ratios_of(
    labels: Sequence[str], values: Sequence[float], margin: Margin = MEASURED
) -> Ratios | None:
    """The statistics of one value a problem; None without any."""
    if not values:
        return None
    lowest, highest = min(values), max(values)
    # Of the base over the other, as a speedup's reader asks: how much less does the base need?
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
    """The mean for ratios: doubling and halving cancel out."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def times(value: float | None) -> str:
    """``1.08×``; empty for None."""
    return "" if value is None else f"{value:.2f}×"
