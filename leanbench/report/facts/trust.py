"""Precision of a run's measurements, a sentence each, and rows with a warning or another status."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from leanbench.core.registry import kernels
from leanbench.report.document import (
    Block,
    Section,
    Sentence,
    Sentences,
    Table,
    Text,
    Words,
    sentences,
    table,
)
from leanbench.report.series import listed
from leanbench.report.warned import Warned, flagged, label, warned

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

Rows = Sequence["Row"]

#: Latency below which differences are given in microseconds: fixed costs of a launch dominate.
SHORT_US = 20.0
#: Sustained latency below the burst's by at most this share gets no sentence.
SUSTAINED_MARGIN = 0.01

#: Phrases of `config_choice` in sentences about cells.
_CHOICES = {
    "tuned": "with tuned configs",
    "heuristic": "by the heuristic",
    "given": "with the given config",
}
#: Part of a reason that differs from cell to cell: a timing's position in its file.
_POSITION = re.compile(r" at \d+ x \d+ tokens")


def trust_section(results: Results) -> Section:
    """Describe each run's precision by GPU and L2 state, and the warnings of its rows."""
    known: list[tuple[str, Sentence]] = []
    for run in results.runs:
        groups = _groups(run)
        for name, rows in groups.items():
            words = [run.name] if results.are_several else []
            words += [name] if len(groups) > 1 else []
            known += [(", ".join(words), fact) for fact in (*_settings(rows), *facts(rows))]
    blocks: list[Block] = _by_fact(known) if any(about for about, _ in known) else []
    if known and not blocks:
        blocks = [Sentences(tuple(fact for _, fact in known), "facts")]
    if warnings := warned(_run_rows(results)):
        hint = (
            "Rows with a warning enter statistics and are marked !. Sentences that differ in"
            " numbers alone are one line, with the worst."
        )
        shown = (sentences(hint, layout="hint"), warnings_table(warnings))
        blocks.append(Section("warnings", "Warnings", shown))
    return Section("trust", "How far to trust these numbers", tuple(blocks))


def flagged_section(results: Results) -> Section:
    """List the reasons of rows that are not `ok`."""
    hint = (
        "Every row whose status is not ok. Noisy rows count where kernels are compared, none of the"
        " others enters a statistic. Reasons that differ in numbers alone are one line, with the"
        " worst."
    )
    rows = flagged(_run_rows(results))
    blocks = (sentences(hint, layout="hint"), warnings_table(rows)) if rows else ()
    return Section("flagged", "Flagged rows", blocks)


def _run_rows(results: Results) -> list[tuple[Row, str]]:
    return [
        (row, run.name if results.are_several else "")
        for run in results.runs
        for row, _ in run.results
    ]


def warnings_table(warnings: Sequence[Warned]) -> Table:
    """Make a row for each group."""
    rows = []
    for group in warnings:
        first, *more = group.problems
        before = ""
        if group.varies:
            # No refusal is worse than another.
            before = "for example, " if group.kind == "unsupported" else "at worst, "
        rows.append(
            [
                Text(group.kind, "status"),
                group.kernel,
                f"{before}{group.sentence}",
                str(group.count),
                Text(first, more=tuple(more), unnamed=group.count - len(group.problems)),
                ", ".join(group.runs),
            ]
        )
    return table(["status", "kernel", "reason", "rows:", "problems", "runs"], rows, layout="list")


def _by_fact(known: Sequence[tuple[str, Sentence]]) -> list[Block]:
    """Make a section for each kind of fact: its note, then the distinct sentences with names."""
    notes: dict[str, str] = {}
    about: dict[str, dict[Words, list[str]]] = {}
    for name, fact in known:
        notes[fact.name] = fact.note
        about.setdefault(fact.name, {}).setdefault(fact.words, []).append(name)
    blocks: list[Block] = []
    for fact, of_words in about.items():
        items = [Sentence(words, listed(names)) for words, names in of_words.items()]
        hint = [sentences(notes[fact], layout="hint")] if notes[fact] else []
        blocks.append(Section("", fact, (*hint, Sentences(tuple(items), "facts"))))
    return blocks


def _groups(run: Run) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row, _ in run.results:
        name = f"{run.gpu_name(row.environment)}, {row.cache} L2"
        groups.setdefault(name, []).append(row)
    return groups


def _settings(rows: Rows) -> list[Sentence]:
    layout = layout_line(rows)
    return [
        *(Sentence(line, "launch settings") for line in config_lines(rows)),
        *(Sentence(line, "best mode") for line in mode_lines(rows)),
        *([Sentence(layout, "layout")] if layout else []),
    ]


def config_lines(rows: Rows) -> list[str]:
    """Describe the origin of launch settings, a line for each kernel.

    ``lean: 9 of 12 cells with tuned configs (measured 2026-11-21 on NVIDIA H200, shipped), 3 by
    the heuristic.`` Rows without a reason do not count.
    """
    by_kernel: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        if row.config_reason and row.config_choice in _CHOICES:
            entry = row.config_choice, row.config_reason
            by_kernel.setdefault(row.kernel, []).append(entry)
    return [f"{kernel}: {_config_line(entries)}." for kernel, entries in by_kernel.items()]


def _config_line(entries: Sequence[tuple[str, str]]) -> str:
    counts = Counter(choice for choice, _ in entries)
    parts = []
    for choice in (choice for choice in _CHOICES if choice in counts):
        reasons = [reason for of, reason in entries if of == choice]
        why = ""
        if choice == "tuned":
            # The file comes before the colon; the rest is about one cell.
            why = "; ".join(dict.fromkeys(reason.partition(": ")[0] for reason in reasons))
        # Together with tuned configs, the same files led to the heuristic.
        elif choice == "heuristic" and "tuned" not in counts:
            why = "; ".join(_refusals(reasons))
        parts.append((counts[choice], f"{_CHOICES[choice]}{f' ({why})' if why else ''}"))
    total = counts.total()
    cells = f"{total} cell{'s' if total > 1 else ''}"
    if len(parts) == 1:
        return f"{'all ' if total > 1 else ''}{cells} {parts[0][1]}"
    (first, words), *others = parts
    return ", ".join(
        [f"{first} of {cells} {words}", *(f"{count} {words}" for count, words in others)]
    )


def _refusals(reasons: Sequence[str]) -> list[str]:
    """Count the reasons for the heuristic by file of tuned configs."""
    by_file: dict[str, Counter[str]] = {}
    for reason in reasons:
        file, colon, why = reason.partition(": ")
        by_file.setdefault(file, Counter())[_POSITION.sub("", why) if colon else ""] += 1
    lines = []
    for file, whys in by_file.items():
        several = len(whys) > 1
        words = [f"{why} ({count})" if several else why for why, count in whys.most_common()]
        refusal = f"not with tuned configs, {file}: {', '.join(words)}"
        lines.append(file if "" in whys else refusal)
    return lines


def mode_lines(rows: Rows) -> list[str]:
    """Count the modes of libraries: ``flashinfer_best: flashinfer in 30 of 42 cells, ...``."""
    modes: dict[str, Counter[str]] = {}
    for row in rows:
        mode = (row.config or {}).get("mode")
        if mode is not None:
            modes.setdefault(row.kernel, Counter())[str(mode)] += 1
    lines = []
    for kernel, counts in modes.items():
        (first, most), *others = counts.most_common()
        parts = [f"{first} in {most} of {counts.total()} cells"]
        parts += [f"{mode} in {count}" for mode, count in others]
        lines.append(f"{kernel}: {', '.join(parts)}.")
    return lines


def layout_line(rows: Rows) -> str | None:
    """Name the layouts of K and V if a library's kernel ran."""
    registered = kernels()
    ran = {row.kernel for row in rows if row.latency_us is not None}
    if not any(name in registered and registered[name].is_peer for name in ran):
        return None
    layouts = {row.problem.get("kv_layout", "HND") for row in rows}
    return (
        f"All kernels of a problem read the same K and V, in the layout of the problem"
        f" ({', '.join(sorted(layouts))}): none is given the layout that it prefers."
    )


def facts(rows: Rows) -> list[Sentence]:
    """Describe the precision of the measured rows of one GPU and one state of the L2.

    Only `ok` rows enter a median or a worst case.
    """
    measured = [row for row in rows if row.source == "measured" and row.latency_us is not None]
    ok = [row for row in measured if row.status == "ok"]
    of_latency = [_stopping(measured, ok), _crosscheck(ok), _repeated(measured), _lowered(ok)]
    known = [*of_latency, _sustained(ok), _energy(ok), _instrumentation(ok)]
    return [sentence for sentence in known if sentence is not None]


def _fact(name: str, text: str, note: str) -> Sentence:
    return Sentence(f"{text[0].upper()}{text[1:]}.", name, note)


def _stopping(measured: Rows, ok: Rows) -> Sentence | None:
    reaches = [reach for row in ok if (reach := _interval_reach(row)) is not None]
    timed = len(ok) + sum(row.status == "noisy" for row in measured)
    suspect = sum(row.status == "suspect" for row in measured)
    if not reaches:
        return None
    more = f" ({suspect} more {'is' if suspect == 1 else 'are'} suspect)" if suspect else ""
    text = (
        f"{len(ok)} of {timed} timed rows met the stopping rule{more}; half-width of the 95%"
        f" interval of the median: {percent(median(reaches))} in the median row,"
        f" {percent(max(reaches))} in the worst"
    )
    note = (
        "Samples are taken until the 95% confidence interval of the median is narrow enough; its"
        " half-width is that to its farther end. Where it stayed wide, or something else used the"
        " GPU, a row is noisy. Suspect figures contradict a physical limit."
    )
    return _fact("stopping rule", text, note)


def _interval_reach(row: Row) -> float | None:
    """Return the distance from the median to the farther end of its interval, over the median."""
    latency, low, high = row.latency_us, row.latency_ci_low_us, row.latency_ci_high_us
    if low is None or high is None or not latency:
        return None
    return max(high - latency, latency - low) / latency


def _crosscheck(ok: Rows) -> Sentence | None:
    apart = [
        (row, row.latency_us, abs(row.crosscheck_us - row.latency_us))
        for row in ok
        if row.crosscheck_us is not None and row.latency_us
    ]
    long = [(row, off / latency) for row, latency, off in apart if latency > SHORT_US]
    short = [(row, off) for row, latency, off in apart if latency <= SHORT_US]
    parts = []
    if long:
        row, off = _worst(long)
        parts.append(
            f"by {percent(_median(long))} in the median of {_rows(long, f'above {SHORT_US:g} µs')}"
            f" and by {percent(off)} in the worst ({_named(row)})"
        )
    if short:
        row, off = _worst(short)
        parts.append(
            f"by {off:.2f} µs in the worst of {_rows(short, f'below {SHORT_US:g} µs')}"
            f" ({_named(row)})"
        )
    if not parts:
        return None
    note = (
        "The same launches in a graph between two readings of the GPU's own clock, by a kernel, and"
        " the graph's kernels, counted. Runs of 2026-11-23 and before: under torch's profiler,"
        " after which replays are slower."
    )
    text = f"the cross-check differs from the latency {'; '.join(parts)}"
    return _fact("cross-check", text, note)


def _repeated(measured: Rows) -> Sentence | None:
    samples = [row.throttled_samples for row in measured if row.throttled_samples is not None]
    if not samples:
        return None
    text = "no sample was thrown away for lowered clocks"
    if total := sum(samples):
        were = "sample was" if total == 1 else "samples were"
        hit = sum(count > 0 for count in samples)
        text = (
            f"{total} {were} thrown away and repeated for lowered clocks, in {hit} of"
            f" {_rows(samples)}"
        )
    return _fact("throttling", text, "Samples are repeated where the GPU had lowered its clocks.")


def _lowered(ok: Rows) -> Sentence | None:
    hit = [row.throttle_reasons for row in ok if row.throttle_reasons]
    if not hit:
        return None
    reasons = Counter(reason for of_row in hit for reason in of_row)
    named = ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common())
    text = f"clocks were lowered in samples that were kept of {len(hit)} of {_rows(ok)}: {named}"
    note = "Reasons NVML gave for lowered clocks during the samples that were kept."
    return _fact("lowered clocks", text, note)


def _sustained(ok: Rows) -> Sentence | None:
    shorter = [
        (row, 1 - row.sustained_us / row.latency_us)
        for row in ok
        if row.sustained_us is not None and row.latency_us
    ]
    below = sum(share > SUSTAINED_MARGIN for _, share in shorter)
    if not below:
        return None
    row, share = _worst(shorter)
    text = (
        f"sustained latency is below the burst's by more than {SUSTAINED_MARGIN:.0%} in {below} of"
        f" {_rows(shorter)}, by {percent(share)} in the worst ({_named(row)}); the cause is not"
        " known"
    )
    note = "Heat and the power limit make sustained launches longer than a burst's, not shorter."
    return _fact("sustained", text, note)


def _energy(ok: Rows) -> Sentence | None:
    apart = [
        (row, abs(row.energy_by_power_mj / row.energy_mj - 1))
        for row in ok
        if row.energy_by_power_mj is not None and row.energy_mj is not None and row.energy_mj > 0
    ]
    if not apart:
        return None
    row, share = _worst(apart)
    text = (
        f"the two readings of energy differ by {percent(_median(apart))} in the median of"
        f" {_rows(apart)} and by {percent(share)} in the worst ({_named(row)})"
    )
    note = (
        "The figures come from NVML's energy counter; the second reading is the instantaneous power"
        " integrated over the same window."
    )
    return _fact("energy", text, note)


def _instrumentation(ok: Rows) -> Sentence | None:
    costs = [(row, row.instrumentation_cost) for row in ok if row.instrumentation_cost is not None]
    if not costs:
        return None
    row, cost = _worst(costs)
    text = (
        f"the events behind the SM busy share made launches {_median(costs):.3f}x as long in the"
        f" median of {_rows(costs)} and {cost:.3f}x in the worst ({_named(row)})"
    )
    note = "Instrumented latency over plain latency; every other figure is of the plain kernel."
    return _fact("instrumentation", text, note)


def percent(share: float) -> str:
    """Format a share: ``0.12%``, ``12.3%``."""
    return f"{100 * share:.2f}%" if abs(share) < 0.0995 else f"{100 * share:.1f}%"


def _worst(values: Sequence[tuple[Row, float]]) -> tuple[Row, float]:
    return max(values, key=lambda value: value[1])


def _median(values: Sequence[tuple[Row, float]]) -> float:
    return median(value for _, value in values)


def _rows(rows: Sequence[object], which: str = "") -> str:
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} {which}".rstrip()


def _named(row: Row) -> str:
    return f"{row.kernel} · {label(row)}"
