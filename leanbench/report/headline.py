"""What a run comes to in four sentences: the fastest kernel where, by how much, energy, and what to
beware of.

Many runs come to a sentence for each GPU and a line for each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.model import known_error
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
    def caveats(self) -> list[str]:
        said = []
        if self.summary.source == "predicted":
            model_error = known_error(self.summary.gpu)
            said.append(
                f"Predicted by the performance model, nothing was measured. {model_error}".strip()
            )
        failed = {
            status: count for status, count in status_counts(self.rows).items() if status != "ok"
        }
        if failed:
            counts = ", ".join(
                f"{count} {status.replace('_', ' ')}" for status, count in failed.items()
            )
            said.append(
                f"{sum(failed.values())} of {len(self.rows)} rows enter no statistic: {counts}."
            )
        if warned := self.rows["warnings"].notna().tolist().count(True):
            said.append(f"{warned} row{' has' if warned == 1 else 's have'} a warning.")
        return said


@dataclass(frozen=True)
class Overview:
    """Of many runs."""

    #: What they come to, each under what it is about: the GPU, whether it is predicted, and the L2
    #: where that differs.
    sentences: tuple[tuple[str, str], ...]
    #: Every part, by the run's name and whatever else tells it from the others.
    parts: tuple[tuple[str, Part], ...]


def parts_of(frame: DataFrame) -> list[Part]:
    """One for each summary. `frame` has the columns of `add_series_columns`."""
    found = [(each, rows_of(frame, each)) for each in summaries(frame)]
    return [Part(each, rows, short_labels(rows, varying_axes(rows))) for each, rows in found]


def title(runs: Sequence[str], found: Overview | None) -> str:
    """The runs by name; of many their number and the GPUs."""
    if found is None:
        return listed(runs)
    return (
        f"{listed(list(dict.fromkeys(part.summary.gpu for _, part in found.parts)))}: {len(runs)}"
        " runs"
    )


def headline(part: Part) -> list[tuple[str, str]]:
    """Sentences about one summary, each under a heading, without markup."""
    summary, short = part.summary, part.short
    said = []
    if summary.winners:
        said.append(("Fastest", _fastest(summary.winners)))
    if summary.over_best:
        said.append(("By how much", _by_how_much(summary.over_best, short)))
    if summary.energies:
        said.append(("Energy", _energy(list(summary.energies.values()))))
    if caveats := part.caveats:
        said.append(("Beware", " ".join(caveats)))
    return said


def overview(parts: Sequence[Part]) -> Overview | None:
    """None where the runs are few."""
    if len({part.summary.run for part in parts}) <= FEW_RUNS:
        return None
    gpus, caches = ({getattr(part.summary, name) for part in parts} for name in ("gpu", "cache"))

    def about(summary: Summary, *, gpu: bool) -> str:
        words = [summary.gpu] if gpu else []
        words += ["predicted"] if summary.source == "predicted" else []
        return ", ".join([*words, *([f"{summary.cache} L2"] if len(caches) > 1 else [])])

    alike: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.summary.over_best:
            alike[about(part.summary, gpu=True)].append(part)
    sentences = [(words, _of_many(group)) for words, group in alike.items()]
    names = [
        ", ".join(filter(None, (part.summary.run, about(part.summary, gpu=len(gpus) > 1))))
        for part in parts
    ]
    return Overview(tuple(sentences), tuple(zip(names, parts, strict=True)))


def _of_many(parts: Sequence[Part]) -> str:
    """Of parts in which the subject met another kernel."""
    overs = [part.summary.over_best for part in parts if part.summary.over_best]
    near, problems = sum(part.near for part in parts), sum(over.problems for over in overs)
    lowest, highest = min(over.lowest for over in overs), max(over.highest for over in overs)
    noun = "problem" if problems == 1 else "problems"
    return (
        f"{SUBJECT} is the fastest, or within {MARGIN:.0%} of it, on {near} of {problems} {noun}"
        f" (one of several runs counts in each); at worst {_times(lowest)} as fast as the fastest"
        f" other kernel, at best {_times(highest)}."
    )


def _fastest(found: Winners) -> str:
    first, *others = found.kernels
    if found.problems == 1:
        near = [each.kernel for each in found.kernels if each.near]
        how = f", within {MARGIN:.0%} of each other" if len(near) > 1 else ""
        return f"{' and '.join(near)}{how}."
    words = [
        f"{first.kernel} is the fastest, or within {MARGIN:.0%} of it, on {first.near} of"
        f" {found.problems} problems, alone so on {first.alone}"
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
        f"{SUBJECT} is {_times(over.geomean)} as fast as {over.baseline} (geometric mean); at worst"
        f" {_times(over.lowest)} ({short[over.lowest_at]}), at best {_times(over.highest)}"
        f" ({short[over.highest_at]})."
    )


def _energy(energies: list[Ratios]) -> str:
    each = [f"{energy.baseline} takes {_times(energy.geomean)}" for energy in energies]
    mean = " (geometric means)" if max(energy.problems for energy in energies) > 1 else ""
    return f"Of a launch: {', '.join(each)} of what {SUBJECT} takes{mean}."


def _times(value: float) -> str:
    return f"{value:.2f}×"
