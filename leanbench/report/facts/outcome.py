"""The summary's section: sentences first, then the figures behind them as cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.decode import BOUND
from leanbench.report.compare.ratios import MARGIN, times
from leanbench.report.document import Block, Section, Sentences, Table, Text, sentences, table
from leanbench.report.facts.headline import caveats, headline, near, overview_of
from leanbench.report.facts.summary import status_counts
from leanbench.report.frame import THE_BASELINE, baseline_in_words
from leanbench.report.series import listed

if TYPE_CHECKING:
    from leanbench.report.compare.ratios import Ratios
    from leanbench.report.document import Words
    from leanbench.report.facts.headline import Overview
    from leanbench.report.facts.results import Part, Results
    from leanbench.report.facts.summary import BestBandwidth, OwnEnergy, Summary


def summary_section(results: Results, *, under_banner: bool = False) -> Section:
    """Make the conclusion of the runs; see `leanbench.report.facts.headline.headline`."""
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
    margin = max(
        (part.summary.margin for _, part in overview.parts), key=lambda margin: margin.share
    )
    baselines = list(dict.fromkeys(part.summary.baseline for _, part in overview.parts))
    several = len(baselines) > 1
    headings = [
        "run",
        f"{THE_BASELINE if several else baselines[0]} fastest, or within {margin.words}:",
        "over the fastest other, mean:",
        *("lowest:", "at", "highest:", "at"),
        *("over the fastest library, mean:", "as fast or faster:", "note"),
    ]
    rows = []
    for number, (name, part) in enumerate(overview.parts, 1):
        baseline, over, peers = (
            part.summary.baseline,
            part.summary.over_best,
            part.summary.over_peers,
        )
        figures = [f"{baseline} met no other kernel", *[""] * 5]
        if over:
            of = f" ({baseline})" if baseline != baselines[0] else ""
            figures = [
                f"{near(part)} of {over.problems}{of}",
                times(over.geomean),
                times(over.lowest),
                part.short[over.lowest_at],
                times(over.highest),
                part.short[over.highest_at],
            ]
        figures += ["", ""]
        if peers:
            figures[-2:] = [
                times(peers.ratios.geomean),
                f"{peers.not_slower} of {peers.ratios.problems}",
            ]
        words = " ".join(caveats(part, under_banner=under_banner))
        rows.append([Text(name, link=f"run-{number}"), *figures, words])
    return [Sentences(overview.sentences, "headline"), table(headings, rows)]


def _parts(results: Results, folded: str, *, under_banner: bool) -> list[Section]:
    """A section for each part, its cards folded away below the sentences that begin it."""
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
    if summary.own_energy:
        blocks.append(_energy(summary.own_energy, summary.baseline))
    if part is results.parts[-1]:
        blocks.append(_statuses(results))
    return blocks


def _speedups(part: Part) -> Table:
    of_many = any(speedup.problems > 1 for speedup in part.summary.speedups.values())
    mean = "geometric mean:" if of_many else "on one problem:"
    headings = [f"{part.summary.baseline} over", _mark(mean, part.summary)]
    headings += ["problems:", "faster on:", "highest:", "lowest:", "energy:"]
    rows = []
    for kernel, ratios in part.summary.speedups.items():
        energy = part.summary.energies.get(kernel)
        figures: list[Words] = ["", "", "", ""]
        if ratios.problems > 1:
            within = f"within {part.summary.margin.words} on {ratios.same}"
            figures = [
                str(ratios.problems),
                f"{ratios.above}, {within}, slower on {ratios.below}",
                _extreme(ratios.highest, ratios.highest_at, part),
                _extreme(ratios.lowest, ratios.lowest_at, part),
            ]
        taken = _energy_over(kernel, part.summary.baseline, energy) if energy else ""
        rows.append([kernel, times(ratios.geomean), *figures, taken])
    return table(headings, rows, layout="cards")


def _by_kind(part: Part) -> Table:
    """How far ahead of libraries the baseline is, for each kind of attention."""
    headings = ["over the fastest peer", _mark("geometric mean:", part.summary)]
    headings += ["problems:", "as fast or faster on:", "lowest:", "peers"]
    rows = []
    for kind, over in part.summary.over_peers_by_kind.items():
        ratios = over.ratios
        lowest = _extreme(ratios.lowest, ratios.lowest_at, part)
        counts = [str(ratios.problems), str(over.not_slower)]
        rows.append([kind, times(ratios.geomean), *counts, lowest, listed(over.kernels)])
    return table(headings, rows, layout="cards")


def _mark(heading: str, summary: Summary) -> str:
    """A heading of numbers that says so where they are predicted."""
    return heading.replace(":", ", predicted:") if summary.source == "predicted" else heading


def _extreme(value: float, label: str, part: Part) -> Text:
    return Text(times(value), note=part.short[label], title=label)


def _energy_over(kernel: str, baseline: str, energy: Ratios) -> Text:
    note = f"{kernel}'s over {baseline}'s"
    if energy.problems > 1:
        note += (
            f"; {baseline} needs less on {energy.above} of {energy.problems},"
            f" within {MARGIN:.0%} on {energy.same}, more on {energy.below}"
        )
    return Text(times(energy.geomean), note=note)


def _best(best: BestBandwidth, part: Part) -> Table:
    share = "" if best.read_floor_share is None else f"{best.read_floor_share:.1%}"
    kernel = f"{best.kernel}, has a warning" if best.warned else best.kernel
    row = [kernel, f"{best.bandwidth_tb_s:.2f}", share, Text(part.short[best.at], title=best.at)]
    headings = ["best bandwidth of", _mark("TB/s:", part.summary), "of the read floor:", "at"]
    return table(headings, [row], layout="cards")


def _energy(energy: OwnEnergy, baseline: str) -> Table:
    several = energy.problems > 1
    over = "over only reading K and V, geometric mean:" if several else "over only reading K and V:"
    power = sustained = ""
    if energy.power_w is not None:
        note = f"median; highest {energy.highest_power_w:.0f} W" if several else ""
        power = Text(f"{energy.power_w:.0f} W", note=note)
    if energy.slowdown is not None:
        note = "against burst latency, median" if several else "against burst latency"
        sustained = Text(f"{energy.slowdown:+.1%}", note=note)
    headings = ["energy of", over, "mean power:", "sustained:"]
    return table(headings, [[baseline, times(energy.over_floor), power, sustained]], layout="cards")


def _statuses(results: Results) -> Table:
    counts = status_counts(results.frame)
    about = "all runs" if results.are_several else "this run"
    rows = [[about, str(len(results.frame)), *map(str, counts.values())]]
    headings = ["rows of", "in all:", *(f"{status}:" for status in counts)]
    return table(headings, rows, layout="cards")
