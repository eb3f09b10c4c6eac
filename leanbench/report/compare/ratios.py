"""Ratios of latencies or energies over problems."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanbench.measure.timing import median_interval
from leanbench.model.error import model_error, scaled_from
from leanbench.records.standing import SPREAD, Ratio, standings


@dataclass(frozen=True)
class Margin:
    """A relative difference within which two latencies are level."""

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
        return f"{self.share * 100:.2g}%"

    @property
    def level(self) -> str:
        """Condition under which two latencies are level."""
        return (
            f"within {self.words}"
            if self.is_model_error
            else f"intervals overlap, or within {self.words}"
        )

    @property
    def ahead(self) -> str:
        """Condition under which a latency is ahead of another."""
        intervals = "" if self.is_model_error else ", and no intervals overlap"
        return f"by more than {self.words}{intervals}"


MEASURED = Margin(SPREAD)


def margin_of(
    source: str, gpus: Iterable[str], kernels: Iterable[str], least: float = SPREAD
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
    median: float
    #: Ends of the median's 95% confidence interval over the problems; None for fewer than six.
    interval: tuple[float, float] | None
    lowest: float
    #: Label of a problem.
    lowest_at: str
    highest: float
    highest_at: str
    #: Number of problems by `leanbench.records.standing.standing`.
    ahead: int
    level: int
    behind: int

    @property
    def middle(self) -> str:
        """Median, with its interval if there is one: ``1.20× (95% 1.12× to 1.26×)``."""
        if self.interval is None:
            return times(self.median)
        low, high = self.interval
        return f"{times(self.median)} (95% {times(low)} to {times(high)})"


#: Fewest problems whose extremes enclose the median with 95%.
_FEWEST_FOR_INTERVAL = 6


def ratios_of(
    labels: Sequence[str], ratios: Sequence[Ratio], margin: Margin = MEASURED
) -> Ratios | None:
    """Summarise one ratio per problem; None without any."""
    if not ratios:
        return None
    values = [ratio.value for ratio in ratios]
    lowest, highest = min(values), max(values)
    has_interval = len(values) >= _FEWEST_FOR_INTERVAL
    return Ratios(
        problems=len(values),
        geomean=geomean(values),
        median=statistics.median(values),
        interval=median_interval(values) if has_interval else None,
        lowest=lowest,
        lowest_at=labels[values.index(lowest)],
        highest=highest,
        highest_at=labels[values.index(highest)],
        **standings(ratios, margin.share),
    )


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def times(value: float | None) -> str:
    """Format a ratio: ``1.08×``; empty for None."""
    return "" if value is None else f"{value:.2f}×"
