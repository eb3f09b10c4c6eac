"""What a run comes to in four sentences: the fastest kernel where, by how much, energy, and what to beware of.

Many runs come to a sentence for each GPU and a line for each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.frame import SUBJECT
from leanbench.report.series import listed, short_labels, varying_axes
from leanbench.report.summary import rows_of, status_counts, summaries
from leanbench.report.winners import MARGIN

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.summary import Ratios, Summary
    from leanbench.report.winners import Winner, Winners

#: Kernels named after the first; a run with more has them in the charts.
NAMED = 3
#: More runs than this have an overview first.
FEW_RUNS = 3


@dataclass(frozen=True)
class Part:
    """A summary, the rows that it is of, and the short labels of their problems by label."""

    summary: Summary
    rows: DataFrame
    short: Mapping[str, str]

    @property
    def near(self) -> int:
        """Problems on which the subject is the fastest, or within `MARGIN` of it."""
        kernels = self.summary.winners.kernels if self.summary.winners else ()
        return sum(each.near for each in kernels if each.kernel == SUBJECT)

    @property
    def caveats(self) -> str:
        return " ".join(_caveats(self.rows, ""))


@dataclass(frozen=True)
class Overview:
    """Of many runs."""

    #: What they come to, each under the GPU (and, where that differs, the source and the L2) that it is about.
    sentences: tuple[tuple[str, str], ...]
    #: A line each.
    parts: tuple[Part, ...]


def parts_of(frame: DataFrame) -> list[Part]:
    """One for each summary. `frame` has the columns of `add_series_columns`."""
    found = [(each, rows_of(frame, each)) for each in summaries(frame)]
    return [Part(each, rows, short_labels(rows, varying_axes(rows))) for each, rows in found]


def title(runs: Sequence[str], gpus: Sequence[str]) -> str:
    """The runs by name; of many their number and the GPUs."""
    return listed(runs) if len(runs) <= FEW_RUNS else f"{listed(gpus)}: {len(runs)} runs"


def headline(part: Part, model_error: str) -> list[tuple[str, str]]:
    """Sentences about one summary, each under a heading, without markup.

    Args:
        model_error: what is known of the performance model's error; said of predictions.
    """
    summary, rows, short = part.summary, part.rows, part.short
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


def overview(parts: Sequence[Part]) -> Overview | None:
    """None where the runs are few."""
    if len({part.summary.run for part in parts}) <= FEW_RUNS:
        return None
    alike: dict[tuple[str, str, str], list[Part]] = defaultdict(list)
    for part in parts:
        alike[part.summary.gpu, part.summary.source, part.summary.cache].append(part)
    _, sources, caches = map(set, zip(*alike, strict=True))
    sentences = []
    for (gpu, source, cache), group in alike.items():
        if said := _of_many(group):
            apart = [gpu, *([source] if len(sources) > 1 else []), *([f"{cache} L2"] if len(caches) > 1 else [])]
            sentences.append((", ".join(apart), said))
    return Overview(tuple(sentences), tuple(parts))


def _of_many(parts: Sequence[Part]) -> str:
    """Nothing where the subject met no other kernel."""
    overs = [part.summary.over_best for part in parts if part.summary.over_best]
    if not overs:
        return ""
    near = sum(part.near for part in parts)
    problems = sum(part.summary.winners.problems for part in parts if part.summary.winners)
    lowest, highest = min(over.lowest for over in overs), max(over.highest for over in overs)
    return (
        f"{SUBJECT} is the fastest, or within {MARGIN:.0%} of it, on {near} of {problems} problems (one of several "
        f"runs counts in each); at worst {_times(lowest)} as fast as the fastest other kernel, at best "
        f"{_times(highest)}."
    )


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
