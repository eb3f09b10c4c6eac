"""Headline of a run in a few sentences: the fastest kernel where, by how much, how far ahead of
libraries, energy, and caveats.

Many runs come to a sentence for each GPU and a line for each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.model import short_error
from leanbench.report.compare.pair import judge
from leanbench.report.compare.ratios import times
from leanbench.report.document import Sentence
from leanbench.report.facts.summary import status_counts
from leanbench.report.series import listed

if TYPE_CHECKING:
    from leanbench.report.compare.ratios import Margin, Ratios
    from leanbench.report.facts.results import Part
    from leanbench.report.facts.summary import OverPeers, Summary
    from leanbench.report.facts.winners import Winner, Winners

#: Kernels named after the first; a run with more has them in the charts.
NAMED = 3
#: More runs than this have an overview first.
FEW_RUNS = 3


@dataclass(frozen=True)
class Overview:
    """Of many runs."""

    #: What they come to, each under what it is about: the GPU, whether it is predicted, and the L2
    #: where that differs.
    sentences: tuple[Sentence, ...]
    #: Every part, by the run's name and whatever else distinguishes it.
    parts: tuple[tuple[str, Part], ...]


def title(runs: Sequence[str], overview: Overview | None) -> str:
    """The runs by name; of many their number and the GPUs."""
    if overview is None:
        return listed(runs)
    gpus = list(dict.fromkeys(part.summary.gpu for _, part in overview.parts))
    return f"{listed(gpus)}: {len(runs)} runs"


def headline(part: Part, *, under_banner: bool = False) -> list[Sentence]:
    """Return sentences about one part, each under a name.

    Args:
        under_banner: the document begins with a banner on what is predicted.
    """
    summary = part.summary
    sentences = []
    if summary.winners:
        sentences.append(Sentence(_fastest(summary.winners, summary.margin), "Fastest"))
    if summary.over_best:
        by_how_much = _by_how_much(summary, summary.over_best, part.short)
        sentences.append(Sentence(by_how_much, "By how much"))
    # One peer has its own line among the speedups.
    if summary.over_peers and len(summary.over_peers.kernels) > 1:
        over_peers = _over_peers(summary, summary.over_peers, part.short)
        sentences.append(Sentence(over_peers, "Over the fastest peer"))
    if summary.energies:
        sentences.append(Sentence(_energy(summary), "Energy"))
    if words := caveats(part, under_banner=under_banner):
        sentences.append(Sentence(" ".join(words), "Note"))
    return sentences


def caveats(part: Part, *, under_banner: bool = False) -> list[str]:
    """Return caveats of a part's figures."""
    sentences = [f"The run is not finished, {part.unfinished}."] if part.unfinished else []
    if part.summary.source == "predicted" and not under_banner:
        sentences.append("Predicted by the performance model, nothing was measured.")
        # A row without a latency has no error either.
        if timed := list(dict.fromkeys(part.rows.loc[part.rows["status"].isin(TIMED), "kernel"])):
            sentences.append(short_error(part.summary.gpu, timed))
    counted = status_counts(part.rows)
    if noisy := counted.get("noisy"):
        sentences.append(f"Rows that were timed with noise count, {noisy} of {len(part.rows)}.")
    failed = {status: count for status, count in counted.items() if status not in TIMED}
    if failed:
        counts = ", ".join(
            f"{count} {status.replace('_', ' ')}" for status, count in failed.items()
        )
        excluded = sum(failed.values())
        verb = "is" if excluded == 1 else "are"
        sentences.append(f"{excluded} of {len(part.rows)} rows {verb} excluded: {counts}.")
    if warned := part.rows["warnings"].notna().tolist().count(True):
        sentences.append(f"{warned} row{' has' if warned == 1 else 's have'} a warning.")
    return sentences


def near(part: Part) -> int:
    """Problems on which the baseline is the fastest, or within the margin of it."""
    kernels = part.summary.winners.kernels if part.summary.winners else ()
    return sum(kernel.near for kernel in kernels if kernel.kernel == part.summary.baseline)


def overview_of(parts: Sequence[Part]) -> Overview | None:
    """None where the runs are few."""
    if len({part.summary.run for part in parts}) <= FEW_RUNS:
        return None
    several_gpus = len({part.summary.gpu for part in parts}) > 1
    several_caches = len({part.summary.cache for part in parts}) > 1

    def about(summary: Summary) -> str:
        words = [summary.gpu] if several_gpus else []
        words += ["predicted"] if summary.source == "predicted" else []
        return ", ".join([*words, *([f"{summary.cache} L2"] if several_caches else [])])

    alike: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.summary.over_best:
            name = ", ".join(filter(None, (part.summary.baseline, about(part.summary))))
            alike[name].append(part)
    sentences = [Sentence(_of_many(group), name) for name, group in alike.items()]
    names = [", ".join(filter(None, (part.summary.run, about(part.summary)))) for part in parts]
    return Overview(tuple(sentences), tuple(zip(names, parts, strict=True)))


def _of_many(parts: Sequence[Part]) -> str:
    """Sentences on parts in which one baseline met other kernels."""
    problems = sum(part.summary.over_best.problems for part in parts if part.summary.over_best)
    margin = max((part.summary.margin for part in parts), key=lambda margin: margin.share)
    words = [
        f"The fastest, or within {margin.words} of it, on {sum(map(near, parts))} of {problems}"
        f" {'problem' if problems == 1 else 'problems'} (counted once a run)."
    ]
    libraries = [
        (over.ratios, over.not_slower, part.summary.run)
        for part in parts
        if (over := part.summary.over_peers)
    ]
    if libraries:
        lowest, _, lowest_in = min(libraries, key=lambda each: each[0].lowest)
        highest, _, highest_in = max(libraries, key=lambda each: each[0].highest)
        words.append(
            f"Against the fastest library: as fast or faster on"
            f" {sum(count for _, count, _ in libraries)} of"
            f" {sum(ratios.problems for ratios, _, _ in libraries)}; at worst"
            f" {times(lowest.lowest)} as fast ({lowest_in}), at best {times(highest.highest)}"
            f" ({highest_in})."
        )
    others = [
        (ratios.lowest, part.summary.run)
        for part in parts
        for kernel, ratios in part.summary.speedups.items()
        if not (part.summary.over_peers and kernel in part.summary.over_peers.kernels)
    ]
    if others:
        lowest, lowest_in = min(others)
        than = "kernels that are not libraries" if libraries else "the fastest other kernel"
        words.append(f"Against {than}: at worst {times(lowest)} as fast ({lowest_in}).")
    return " ".join(words)


def _fastest(winners: Winners, margin: Margin) -> str:
    first, *others = winners.kernels
    if winners.problems == 1:
        tied = [kernel.kernel for kernel in winners.kernels if kernel.near]
        how = f", within {margin.words} of each other" if len(tied) > 1 else ""
        return f"{' and '.join(tied)}{how}."
    if margin.is_model_error and not any(kernel.alone for kernel in winners.kernels):
        return (
            f"No kernel is ahead of all others by more than {margin.words} on any of"
            f" {winners.problems} problems."
        )
    words = [
        f"{first.kernel} is the fastest, or within {margin.words} of it, on {first.near} of"
        f" {winners.problems} problems, ahead of all others on {first.alone or 'none'}"
    ]
    losing = [_ahead(kernel) for kernel in others if kernel.alone]
    words += losing[:NAMED]
    if len(losing) > NAMED:
        words.append(f"{len(losing) - NAMED} other kernels on some")
    return f"{'; '.join(words)}."


def _ahead(winner: Winner) -> str:
    at = f" ({winner.at})" if winner.at else ""
    return f"{winner.kernel} is ahead of all others on {winner.alone}{at}"


def _by_how_much(summary: Summary, over: Ratios, short: Mapping[str, str]) -> str:
    baseline, margin = summary.baseline, summary.margin
    over_what, no_more = "the fastest other kernel", ""
    if margin.is_model_error and judge(over.geomean, over.geomean, margin.share) == "same":
        no_more = f", within {margin.words}"
    if over.problems == 1:
        return f"{baseline} is {times(over.geomean)} as fast as {over_what}{no_more}."
    return (
        f"{baseline} is {times(over.geomean)} as fast as {over_what} (geometric mean{no_more}); at"
        f" worst {times(over.lowest)} ({short[over.lowest_at]}), at best {times(over.highest)}"
        f" ({short[over.highest_at]})."
    )


def _over_peers(summary: Summary, over: OverPeers, short: Mapping[str, str]) -> str:
    ratios, peers = over.ratios, f"the fastest of {listed(over.kernels)}"
    if ratios.problems == 1:
        return f"{summary.baseline} is {times(ratios.geomean)} as fast as {peers}."
    share = over.not_slower / ratios.problems
    return (
        f"{summary.baseline} is {times(ratios.geomean)} as fast as {peers} (geometric mean of"
        f" {ratios.problems} problems); as fast or faster on {over.not_slower} ({share:.1%}), at"
        f" worst {times(ratios.lowest)} ({short[ratios.lowest_at]})."
    )


def _energy(summary: Summary) -> str:
    kernels = [
        f"{kernel} takes {times(energy.geomean)}" for kernel, energy in summary.energies.items()
    ]
    several = max(energy.problems for energy in summary.energies.values()) > 1
    mean = " (geometric means)" if several else ""
    return f"Per launch, {listed(kernels)} the energy of {summary.baseline}{mean}."
