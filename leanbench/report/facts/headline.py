"""Head and summary of a report: which runs, their conclusion in sentences, and the figures behind.

More than `FEW_RUNS` runs get a sentence per GPU and a line per run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.decode import BOUND
from leanbench.model import known_error, short_error
from leanbench.records.standing import SPREAD, Ratio, standing
from leanbench.report.compare.ratios import times
from leanbench.report.document import (
    Block,
    Section,
    Sentence,
    Sentences,
    Table,
    Text,
    sentences,
    table,
)
from leanbench.report.facts.environment import environments_of
from leanbench.report.facts.results import status_counts
from leanbench.report.frame import PROBLEM_COLUMNS, THE_BASELINE, baseline_in_words, kernel_order
from leanbench.report.series import fixed_words, listed

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.compare.ratios import Margin, Ratios
    from leanbench.report.document import Words
    from leanbench.report.facts.results import (
        BaselineEnergy,
        BestBandwidth,
        OverPeers,
        Part,
        Results,
        Summary,
        Winners,
    )

#: Maximum number of kernels named after the first.
NAMED = 3
#: Maximum number of runs without an overview.
FEW_RUNS = 3


def title(runs: Sequence[str], overview: Overview | None) -> str:
    """Name the runs; with an overview, their number and the GPUs."""
    if overview is None:
        return listed(runs)
    gpus = list(dict.fromkeys(part.summary.gpu for _, part in overview.parts))
    return f"{listed(gpus)}: {len(runs)} runs"


def banner_section(results: Results) -> Section:
    """Warn of predictions, with the names of their runs."""
    runs_of: dict[tuple[str, str], list[str]] = {}
    for run in results.runs:
        if banner := _banner(run):
            runs_of.setdefault(banner, []).append(run.name)
    banners = [
        Sentence(Text(words, "strong"), listed(runs) if results.are_several else "", note)
        for (words, note), runs in runs_of.items()
    ]
    return Section("banner", "", (Sentences(tuple(banners), "banner"),) if banners else ())


def _banner(run: Run) -> tuple[str, str] | None:
    sources = _sources(run)
    if sources == ["predicted"]:
        words = (
            f"Predicted by the performance model for {listed(_gpus(run))}; nothing was measured."
        )
        # A row without a latency has no error.
        kernels = dict.fromkeys(row.kernel for row, _ in run.results if row.status in TIMED)
        return words, known_error(run.gpu_name(), kernels) if kernels else ""
    if "predicted" in sources:
        words = "Some rows are measured, some predicted by the performance model."
        return words, "They are never mixed in one figure."
    return None


def head_section(results: Results) -> Section:
    """Describe the runs with their commands, versions and notes, and the problems in one line."""
    versions = [_versions(run) for run in results.runs]
    # Versions that several runs share are listed once.
    are_equal = results.are_several and versions.count(versions[0]) == len(versions)
    shared = versions[0] if are_equal else []
    about: list[Sentence] = []
    for run, of_run in zip(results.runs, versions, strict=True):
        words = [_on(run), *([] if shared else of_run)]
        if created := str(run.manifest.get("created") or ""):
            words.append(f"{created[:16].replace('T', ' ')} UTC")
        about.append(Sentence(" · ".join(words), run.name if results.are_several else ""))
        if command := run.manifest.get("command"):
            about.append(Sentence(Text(str(command), "code")))
    runs: Block = Sentences(tuple(about))
    if overview_of(results.parts):
        runs = Section("", "The runs and their commands", (runs,), "closed")
    lines = [" · ".join(shared)] if shared else []
    notes = [f"Note: {note}." for run in results.runs for note in run.notes]
    blocks = [runs, sentences(*lines, _problems(results))]
    blocks += [sentences(*notes, layout="note")] if notes else []
    return Section("head", "", tuple(blocks))


def _on(run: Run) -> str:
    sources = _sources(run)
    on = "for" if sources == ["predicted"] else "on"
    return f"{' and '.join(sources).capitalize()} {on} {' and '.join(_gpus(run))}"


def _sources(run: Run) -> list[str]:
    return list(dict.fromkeys(row.source for row, _ in run.results)) or [
        str(run.manifest.get("source", "measured"))
    ]


def _gpus(run: Run) -> list[str]:
    gpus = dict.fromkeys(run.gpu_name(row.environment) for row, _ in run.results)
    return list(gpus) or [run.gpu_name()]


def _versions(run: Run) -> list[str]:
    """List versions, each value once: ``torch 2.11.0``."""
    environments = environments_of(run).values()
    words = []
    for field in ("driver", "torch", "triton", "leanbench", "kernels"):
        values = dict.fromkeys(fields[field] for fields in environments if fields.get(field))
        words += [f"{field} {', '.join(values)}"] if values else []
    return words


def _problems(results: Results) -> str:
    problems = len(results.frame.drop_duplicates([*PROBLEM_COLUMNS]))
    kernels = len(kernel_order(results.frame))
    counts = (
        f"{problems} {'problem' if problems == 1 else 'problems'},"
        f" {kernels} {'kernel' if kernels == 1 else 'kernels'}"
    )
    fixed = fixed_words(results.frame)
    return f"{counts}: {fixed}" if fixed else counts


@dataclass(frozen=True)
class Overview:
    """Conclusion of many runs."""

    #: Each named by baseline, GPU and source, and by the L2 if that differs.
    sentences: tuple[Sentence, ...]
    #: Every part with a distinctive name.
    parts: tuple[tuple[str, Part], ...]


def overview_of(parts: Sequence[Part]) -> Overview | None:
    """Make an overview; None for few runs."""
    if len({part.summary.run for part in parts}) <= FEW_RUNS:
        return None
    several_gpus = len({part.summary.gpu for part in parts}) > 1
    several_caches = len({part.summary.cache for part in parts}) > 1

    def name(first: str, summary: Summary) -> str:
        words = [first]
        words += [summary.gpu] if several_gpus else []
        words += ["predicted"] if summary.source == "predicted" else []
        words += [f"{summary.cache} L2"] if several_caches else []
        return ", ".join(words)

    groups: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.summary.over_best:
            groups[name(part.summary.baseline, part.summary)].append(part)
    return Overview(
        tuple(Sentence(_of_many(group), title) for title, group in groups.items()),
        tuple((name(part.summary.run, part.summary), part) for part in parts),
    )


def _of_many(parts: Sequence[Part]) -> str:
    """Describe parts of one baseline."""
    problems = sum(part.summary.over_best.problems for part in parts if part.summary.over_best)
    words = [
        f"The fastest, or level with it, on {sum(map(near, parts))} of"
        f" {problems} {'problem' if problems == 1 else 'problems'} (counted once a run; level:"
        f" {_widest(parts).level})."
    ]
    libraries = [
        (over.ratios, part.summary.run) for part in parts if (over := part.summary.over_peers)
    ]
    if libraries:
        lowest, lowest_in = min(libraries, key=lambda each: each[0].lowest)
        highest, highest_in = max(libraries, key=lambda each: each[0].highest)
        words.append(
            f"Against the fastest library: {_counts([ratios for ratios, _ in libraries])}; at worst"
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


def _widest(parts: Sequence[Part]) -> Margin:
    return max((part.summary.margin for part in parts), key=lambda margin: margin.share)


def near(part: Part) -> int:
    """Count the problems on which the baseline is the fastest, or level with it."""
    kernels = part.summary.winners.kernels if part.summary.winners else ()
    return sum(kernel.near for kernel in kernels if kernel.kernel == part.summary.baseline)


def headline(part: Part, *, under_banner: bool = False) -> list[Sentence]:
    """Return the conclusion of a part.

    Args:
        under_banner: the document begins with a banner on predictions.
    """
    summary = part.summary
    sentences = []
    if summary.winners:
        sentences.append(Sentence(_fastest(summary.winners, summary.margin), "Fastest"))
    peers = summary.over_peers
    if peers and len(peers.kernels) == 1:
        peers = None  # it has its line among the speedups
    # Among peers alone, the fastest other kernel is the fastest peer.
    if summary.over_best and not (peers and peers.ratios == summary.over_best):
        by_how_much = _by_how_much(summary, summary.over_best, part.short)
        sentences.append(Sentence(by_how_much, "By how much"))
    if peers:
        over_peers = _over_peers(summary, peers, part.short)
        sentences.append(Sentence(over_peers, "Over the fastest peer"))
    if energies := summary.energies:
        taken = [f"{kernel} takes {times(energy.geomean)}" for kernel, energy in energies.items()]
        several = max(energy.problems for energy in energies.values()) > 1
        mean = " (geometric means)" if several else ""
        words = f"{listed(taken)} the energy of {summary.baseline}{mean}."
        sentences.append(Sentence(words, "Energy"))
    if notes := caveats(part, under_banner=under_banner):
        sentences.append(Sentence(" ".join(notes), "Note"))
    return sentences


def caveats(part: Part, *, under_banner: bool = False) -> list[str]:
    """Return caveats of a part's figures."""
    sentences = [f"The run is not finished, {part.unfinished}."] if part.unfinished else []
    if part.summary.source == "predicted" and not under_banner:
        sentences.append("Predicted by the performance model, nothing was measured.")
        # A row without a latency has no error.
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


def _fastest(winners: Winners, margin: Margin) -> str:
    first, *others = winners.kernels
    if winners.problems == 1:
        tied = [kernel.kernel for kernel in winners.kernels if kernel.near]
        how = f", level ({margin.level})" if len(tied) > 1 else ""
        return f"{' and '.join(tied)}{how}."
    if margin.is_model_error and not any(kernel.alone for kernel in winners.kernels):
        return (
            f"No kernel is ahead of all others by more than {margin.words} on any of"
            f" {winners.problems} problems."
        )
    words = [
        f"{first.kernel} is ahead of all others on {first.alone or 'none'} of {winners.problems}"
        f" problems, level with the fastest on {first.near - first.alone or 'none'}"
        f" ({margin.level})"
    ]
    ahead = [
        f"{winner.kernel} is ahead of all others on {winner.alone}{winner.at and f' ({winner.at})'}"
        for winner in others
        if winner.alone
    ]
    words += ahead[:NAMED]
    if len(ahead) > NAMED:
        words.append(f"{len(ahead) - NAMED} other kernels on some")
    return f"{'; '.join(words)}."


def _by_how_much(summary: Summary, over: Ratios, short: Mapping[str, str]) -> str:
    baseline, margin = summary.baseline, summary.margin
    over_what, no_more = "the fastest other kernel", ""
    if margin.is_model_error and standing(Ratio.exactly(over.geomean), margin.share) == "level":
        no_more = f", within {margin.words}"
    if over.problems == 1:
        return f"{baseline} is {times(over.geomean)} as fast as {over_what}{no_more}."
    return (
        f"{baseline} is {times(over.geomean)} as fast as {over_what} (geometric mean{no_more};"
        f" median {over.middle}); at worst {times(over.lowest)} ({short[over.lowest_at]}), at best"
        f" {times(over.highest)} ({short[over.highest_at]})."
    )


def _over_peers(summary: Summary, over: OverPeers, short: Mapping[str, str]) -> str:
    ratios, peers = over.ratios, f"the fastest of {listed(over.kernels)}"
    if ratios.problems == 1:
        return f"{summary.baseline} is {times(ratios.geomean)} as fast as {peers}."
    above = ""
    if over.over_floor_us is not None:
        own_us, peer_us = over.over_floor_us
        above = f" Above the read floor: {own_us:.1f} and {peer_us:.1f} µs (medians)."
    return (
        f"{summary.baseline} is {times(ratios.geomean)} as fast as {peers} (geometric mean; median"
        f" {ratios.middle}); {_counts([ratios])}, at worst {times(ratios.lowest)}"
        f" ({short[ratios.lowest_at]}), at best {times(ratios.highest)}"
        f" ({short[ratios.highest_at]}).{above}"
    )


def _counts(ratios: Sequence[Ratios]) -> str:
    """Format how often the baseline is ahead: ``ahead on 40, level on 1, behind on 3 of 44``."""
    counts = [
        f"{name} on {sum(getattr(each, name) for each in ratios)}"
        for name in ("ahead", "level", "behind")
    ]
    return f"{', '.join(counts)} of {sum(each.problems for each in ratios)}"


def summary_section(results: Results, *, under_banner: bool = False) -> Section:
    """Make the conclusion of the runs: sentences first, then the figures behind them as cards."""
    blocks: list[Block] = []
    overview = overview_of(results.parts)
    if results.frame.empty:
        blocks.append(sentences("This run has no rows yet.", layout="empty"))
    if overview:
        blocks += _overview(overview, under_banner=under_banner)
        sections = _parts(results, folded="", under_banner=under_banner)
        blocks.append(Section("figures", "Figures of each run", tuple(sections), "closed"))
    elif len(results.parts) > 1:
        blocks += _parts(results, folded="closed", under_banner=under_banner)
    else:
        for part in results.parts:
            blocks += _part(part, results, under_banner=under_banner)
    if results.parts and not any(part.summary.speedups for part in results.parts):
        baseline = baseline_in_words(results.frame)
        nothing = f"No speedups: no problem has a timed row of {baseline} and of another kernel."
        if BOUND in {*results.frame["kernel"]}:
            nothing += f" {BOUND} is the bound of all kernels and compared with none."
        blocks.append(sentences(nothing, layout="empty"))
    return Section("summary", "", tuple(blocks))


def _overview(overview: Overview, *, under_banner: bool) -> list[Block]:
    baselines = list(dict.fromkeys(part.summary.baseline for _, part in overview.parts))
    several = len(baselines) > 1
    headings = [
        "run",
        f"{THE_BASELINE if several else baselines[0]} fastest, or level:",
        "over the fastest other, mean:",
        *("lowest:", "at", "highest:", "at"),
        *("over the fastest library, mean:", "ahead, level, behind:", "note"),
    ]
    rows = []
    for number, (name, part) in enumerate(overview.parts, 1):
        summary = part.summary
        figures = [f"{summary.baseline} met no other kernel", *[""] * 5]
        if over := summary.over_best:
            of = f" ({summary.baseline})" if summary.baseline != baselines[0] else ""
            figures = [
                f"{near(part)} of {over.problems}{of}",
                times(over.geomean),
                times(over.lowest),
                part.short[over.lowest_at],
                times(over.highest),
                part.short[over.highest_at],
            ]
        libraries = ["", ""]
        if peers := summary.over_peers:
            libraries = [times(peers.ratios.geomean), _three(peers.ratios)]
        words = " ".join(caveats(part, under_banner=under_banner))
        rows.append([Text(name, link=f"run-{number}"), *figures, *libraries, words])
    return [Sentences(overview.sentences, "headline"), table(headings, rows)]


def _parts(results: Results, folded: str, *, under_banner: bool) -> list[Section]:
    """Make a section per part, with its cards folded away below its sentences."""
    sections = []
    for number, part in enumerate(results.parts, 1):
        summary = part.summary
        name = f"{summary.run}, {summary.source}"
        name = name if results.are_several else summary.source.capitalize()
        l2 = f", {summary.cache} L2" if results.l2 else ""
        blocks = _part(part, results, under_banner=under_banner)
        if folded and isinstance(blocks[0], Sentences):
            of = summary.run if results.are_several else summary.source
            blocks[1:] = [Section("", f"Figures of {of}", tuple(blocks[1:]), folded)]
        sections.append(Section(f"run-{number}", f"{name}: {summary.gpu}{l2}", tuple(blocks)))
    return sections


def _part(part: Part, results: Results, *, under_banner: bool) -> list[Block]:
    summary = part.summary
    blocks: list[Block] = []
    if words := headline(part, under_banner=under_banner):
        blocks.append(Sentences(tuple(words), "headline"))
    if summary.speedups:
        blocks.append(_speedups(part))
    if summary.over_peers_by_kind:
        blocks.append(_by_kind(part))
    if summary.best:
        blocks.append(_best(summary.best, part))
    if summary.baseline_energy:
        blocks.append(_energy(summary.baseline_energy, summary.baseline))
    if part is results.parts[-1]:
        counts = status_counts(results.frame)
        about = "all runs" if results.are_several else "this run"
        row = [about, str(len(results.frame)), *map(str, counts.values())]
        blocks.append(_cards(["rows of", "in all:", *(f"{name}:" for name in counts)], [row]))
    return blocks


def _cards(headings: Sequence[str], rows: Sequence[Sequence[Words]]) -> Table:
    return table(headings, rows, layout="cards")


def _speedups(part: Part) -> Table:
    summary = part.summary
    of_many = any(speedup.problems > 1 for speedup in summary.speedups.values())
    mean = "geometric mean:" if of_many else "on one problem:"
    headings = [f"{summary.baseline} over", _mark(mean, summary)]
    headings += ["median:", "problems:", "ahead, level, behind:", "highest:", "lowest:", "energy:"]
    rows = []
    for kernel, ratios in summary.speedups.items():
        figures: list[Words] = ["", "", "", "", ""]
        if ratios.problems > 1:
            figures = [
                ratios.middle,
                str(ratios.problems),
                _three(ratios),
                _extreme(ratios.highest, ratios.highest_at, part),
                _extreme(ratios.lowest, ratios.lowest_at, part),
            ]
        energy = summary.energies.get(kernel)
        taken = _energy_over(kernel, summary.baseline, energy) if energy else ""
        rows.append([kernel, times(ratios.geomean), *figures, taken])
    return _cards(headings, rows)


def _by_kind(part: Part) -> Table:
    headings = ["over the fastest peer", _mark("geometric mean:", part.summary)]
    headings += ["median:", "problems:", "ahead, level, behind:", "lowest:", "peers"]
    rows = []
    for kind, over in part.summary.over_peers_by_kind.items():
        ratios = over.ratios
        lowest = _extreme(ratios.lowest, ratios.lowest_at, part)
        counts = [ratios.middle, str(ratios.problems), _three(ratios)]
        rows.append([f"({kind})", times(ratios.geomean), *counts, lowest, listed(over.kernels)])
    return _cards(headings, rows)


def _three(ratios: Ratios) -> str:
    return f"{ratios.ahead}, {ratios.level}, {ratios.behind}"


def _mark(heading: str, summary: Summary) -> str:
    """Mark a heading of predicted numbers."""
    return heading.replace(":", ", predicted:") if summary.source == "predicted" else heading


def _extreme(value: float, label: str, part: Part) -> Text:
    return Text(times(value), note=part.short[label], title=label)


def _energy_over(kernel: str, baseline: str, energy: Ratios) -> Text:
    note = f"{kernel}'s over {baseline}'s"
    if energy.problems > 1:
        note += (
            f"; {baseline} needs less on {energy.ahead} of {energy.problems},"
            f" within {SPREAD:.0%} on {energy.level}, more on {energy.behind}"
        )
    return Text(times(energy.geomean), note=note)


def _best(best: BestBandwidth, part: Part) -> Table:
    share = "" if best.read_floor_share is None else f"{best.read_floor_share:.1%}"
    kernel = f"{best.kernel}, has a warning" if best.warned else best.kernel
    row = [kernel, f"{best.bandwidth_tb_s:.2f}", share, Text(part.short[best.at], title=best.at)]
    headings = ["best bandwidth of", _mark("TB/s:", part.summary), "of the read floor:", "at"]
    return _cards(headings, [row])


def _energy(energy: BaselineEnergy, baseline: str) -> Table:
    several = energy.problems > 1
    over = "over only reading K and V, geometric mean:" if several else "over only reading K and V:"
    power = sustained = ""
    if energy.power_w is not None:
        note = f"median; highest {energy.highest_power_w:.0f} W" if several else ""
        power = Text(f"{energy.power_w:.0f} W", note=note)
    if energy.slowdown is not None:
        note = "against burst latency, median" if several else "against burst latency"
        sustained = Text(f"{energy.slowdown:+z.1%}", note=note)
    headings = ["energy of", over, "mean power:", "sustained:"]
    return _cards(headings, [[baseline, times(energy.over_floor), power, sustained]])
