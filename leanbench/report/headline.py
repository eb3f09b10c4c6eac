"""What a run comes to in four sentences: the fastest kernel where, by how much, energy, and what to beware of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leanbench.report.frame import SUBJECT
from leanbench.report.summary import status_counts
from leanbench.report.winners import MARGIN

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.summary import Ratios, Summary
    from leanbench.report.winners import Winner, Winners

#: Kernels named after the first; a run with more has them in the charts.
NAMED = 3


def headline(summary: Summary, rows: DataFrame, short: Mapping[str, str], model_error: str) -> list[tuple[str, str]]:
    """Sentences about one summary, each under a heading, without markup.

    Args:
        rows: those of the summary.
        short: short labels of problems by label.
        model_error: what is known of the performance model's error; said of predictions.
    """
    said = []
    if summary.winners:
        said.append(("Fastest", _fastest(summary.winners)))
    if summary.over_best:
        said.append(("By how much", _by_how_much(summary.over_best, short)))
    if summary.energies:
        said.append(("Energy", _energy(list(summary.energies.values()))))
    if caveats := _caveats(rows, model_error if summary.source == "predicted" else ""):
        said.append(("Beware", " ".join(caveats)))
    return said


def _fastest(found: Winners) -> str:
    first, *others = found.kernels
    if found.problems == 1:
        near = [each.kernel for each in found.kernels if each.near]
        return f"{' and '.join(near)}{f', within {MARGIN:.0%} of each other' if len(near) > 1 else ''}."
    words = [
        f"{first.kernel} is the fastest, or within {MARGIN:.0%} of it, on {first.near} of {found.problems} problems, "
        f"alone so on {first.alone}"
    ]
    losing = [_ahead(each) for each in others if each.alone]
    words += losing[:NAMED]
    if len(losing) > NAMED:
        words.append(f"{len(losing) - NAMED} other kernels on some")
    return f"{'; '.join(words)}."


def _ahead(winner: Winner) -> str:
    at = f" ({winner.at})" if winner.at else ""
    return f"{winner.kernel} is ahead of all others on {winner.alone}{at}"


def _by_how_much(over: Ratios, short: Mapping[str, str]) -> str:
    if over.problems == 1:
        return f"{SUBJECT} is {_times(over.geomean)} as fast as {over.baseline}."
    return (
        f"{SUBJECT} is {_times(over.geomean)} as fast as {over.baseline} (geometric mean); at worst "
        f"{_times(over.lowest)} ({short[over.lowest_at]}), at best {_times(over.highest)} ({short[over.highest_at]})."
    )


def _energy(energies: list[Ratios]) -> str:
    each = [f"{energy.baseline} takes {_times(energy.geomean)}" for energy in energies]
    mean = " (geometric means)" if max(energy.problems for energy in energies) > 1 else ""
    return f"Of a launch: {', '.join(each)} of what {SUBJECT} takes{mean}."


def _caveats(rows: DataFrame, model_error: str) -> list[str]:
    said = [f"Predicted by the performance model, nothing was measured. {model_error}".strip()] if model_error else []
    failed = {status: count for status, count in status_counts(rows).items() if status != "ok"}
    if failed:
        counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in failed.items())
        said.append(f"{sum(failed.values())} of {len(rows)} rows enter no statistic: {counts}.")
    if warned := rows["warnings"].notna().tolist().count(True):
        said.append(f"{warned} row{' has' if warned == 1 else 's have'} a warning.")
    return said


def _times(value: float) -> str:
    return f"{value:.2f}×"
