"""How far the figures of a run can be trusted: what the measurement knows of its own precision, a
sentence each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from leanbench.report.document import Block, Section, Sentence, Sentences, Words, sentences
from leanbench.report.facts.config_lines import config_lines
from leanbench.report.facts.peer_lines import layout_line, mode_lines
from leanbench.report.facts.warnings import of_runs, warnings_table
from leanbench.report.frame import gpu_name
from leanbench.report.series import listed
from leanbench.report.warned import label, warned

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.report.facts.results import Results

Rows = Sequence[Mapping[str, Any]]

#: Below this latency a fixed cost of a launch weighs more than a share of it: differences are given
#: in microseconds.
SHORT_US = 20.0
#: Sustained may be shorter than the burst by this share before it is worth a sentence.
SUSTAINED_MARGIN = 0.01


def trust_section(results: Results) -> Section:
    """What is known of each run's GPUs and L2 states, and the warnings of its rows."""
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
    if warnings := of_runs(results, warned):
        hint = (
            "Rows with a warning enter statistics and are marked !. Sentences that differ in"
            " numbers alone are one line, with the worst."
        )
        shown = (sentences(hint, layout="hint"), warnings_table(warnings))
        blocks.append(Section("warnings", "Warnings", shown))
    return Section("trust", "How far to trust these numbers", tuple(blocks))


def _by_fact(known: Sequence[tuple[str, Sentence]]) -> list[Block]:
    """A section for each kind of fact: its note once, then a sentence for each run or group, equal
    ones once.
    """
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


def _settings(rows: Rows) -> list[Sentence]:
    layout = layout_line(rows)
    return [
        *(Sentence(line, "launch settings") for line in config_lines(rows)),
        *(Sentence(line, "best mode") for line in mode_lines(rows)),
        *([Sentence(layout, "layout")] if layout else []),
    ]


def _groups(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Rows by GPU and L2 state."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row, _ in run.results:
        name = f"{gpu_name(run.manifest, row.environment)}, {row.cache} L2"
        groups.setdefault(name, []).append(row.model_dump())
    return groups


def facts(rows: Rows) -> list[Sentence]:
    """What is known about measured rows of one GPU and one state of the L2, a sentence each with a
    note on what was done; nothing about predictions.

    Args:
        rows: as in results.jsonl. Only `ok` ones enter a median or a worst case.
    """
    measured = [
        row for row in rows if row["source"] == "measured" and row.get("latency_us") is not None
    ]
    ok = [row for row in measured if row["status"] == "ok"]
    of_latency = [_stopping(measured, ok), _crosscheck(ok), _repeated(measured), _lowered(ok)]
    known = [*of_latency, _sustained(ok), _energy(ok), _stamps(ok)]
    return [sentence for sentence in known if sentence is not None]


def _fact(name: str, text: str, note: str) -> Sentence:
    return Sentence(f"{text[0].upper()}{text[1:]}.", name, note)


def _stopping(measured: Rows, ok: Rows) -> Sentence | None:
    reaches = [reach for row in ok if (reach := _interval_reach(row)) is not None]
    timed = len(ok) + sum(row["status"] == "noisy" for row in measured)
    suspect = sum(row["status"] == "suspect" for row in measured)
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


def _crosscheck(ok: Rows) -> Sentence | None:
    checked = _with(ok, "crosscheck_us")
    long = [row for row in checked if row["latency_us"] > SHORT_US]
    short = [row for row in checked if row["latency_us"] <= SHORT_US]
    parts = []
    if long:
        off, worst = _differences(long, "crosscheck_us", "latency_us")
        parts.append(
            f"by {percent(median(off))} in the median of {_rows(long, f'above {SHORT_US:g} µs')}"
            f" and {worst}"
        )
    if short:
        off = [abs(row["crosscheck_us"] - row["latency_us"]) for row in short]
        worst = short[off.index(max(off))]
        parts.append(
            f"by {max(off):.2f} µs in the worst of {_rows(short, f'below {SHORT_US:g} µs')}"
            f" ({_named(worst)})"
        )
    if not parts:
        return None
    note = (
        "The same launches in a graph between two readings of the GPU's own clock, by a kernel, and"
        " the graph's kernels, counted. Runs of 2026-11-23 and before: under torch's profiler,"
        " after which replays are slower."
    )
    return _fact(
        "cross-check", f"the cross-check differs from the latency {'; '.join(parts)}", note
    )


def _repeated(measured: Rows) -> Sentence | None:
    known = _with(measured, "throttled_samples")
    if not known:
        return None
    samples = sum(row["throttled_samples"] for row in known)
    hit = sum(row["throttled_samples"] > 0 for row in known)
    text = "no sample was thrown away for lowered clocks"
    if samples:
        were = "sample was" if samples == 1 else "samples were"
        text = (
            f"{samples} {were} thrown away and repeated for lowered clocks, in {hit} of"
            f" {_rows(known)}"
        )
    return _fact("throttling", text, "Samples are repeated where the GPU had lowered its clocks.")


def _lowered(ok: Rows) -> Sentence | None:
    hit = [row for row in ok if row.get("throttle_reasons")]
    if not hit:
        return None
    reasons = Counter(reason for row in hit for reason in row["throttle_reasons"])
    named = ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common())
    text = f"clocks were lowered in samples that were kept of {len(hit)} of {_rows(ok)}: {named}"
    return _fact(
        "lowered clocks",
        text,
        "Reasons NVML gave for lowered clocks during the samples that were kept.",
    )


def _sustained(ok: Rows) -> Sentence | None:
    read = _with(ok, "sustained_us")
    over_burst = [row["sustained_us"] / row["latency_us"] - 1 for row in read]
    below = sum(share < -SUSTAINED_MARGIN for share in over_burst)
    if not below:
        return None
    worst = read[over_burst.index(min(over_burst))]
    text = (
        f"sustained latency is below the burst's by more than {SUSTAINED_MARGIN:.0%} in {below} of"
        f" {_rows(read)}, by {percent(-min(over_burst))} in the worst ({_named(worst)}); the cause"
        " is not known"
    )
    return _fact(
        "sustained",
        text,
        "Heat and the power limit make sustained launches longer than a burst's, not shorter.",
    )


def _energy(ok: Rows) -> Sentence | None:
    read = [row for row in _with(ok, "energy_by_power_mj") if (row.get("energy_mj") or 0) > 0]
    if not read:
        return None
    off, worst = _differences(read, "energy_by_power_mj", "energy_mj")
    text = (
        f"the two readings of energy differ by {percent(median(off))} in the median of"
        f" {_rows(read)} and {worst}"
    )
    note = (
        "The figures come from NVML's energy counter; the second reading is the instantaneous power"
        " integrated over the same window."
    )
    return _fact("energy", text, note)


def _stamps(ok: Rows) -> Sentence | None:
    read = _with(ok, "instrumentation_cost")
    if not read:
        return None
    costs = [row["instrumentation_cost"] for row in read]
    worst = read[costs.index(max(costs))]
    text = (
        f"the events behind the SM busy share made launches {median(costs):.3f}x as long in the"
        f" median of {_rows(read)} and {max(costs):.3f}x in the worst ({_named(worst)})"
    )
    note = "Instrumented latency over plain latency; every other figure is of the plain kernel."
    return _fact("instrumentation", text, note)


def percent(share: float) -> str:
    """``0.12%``, ``12.3%``."""
    return f"{100 * share:.2f}%" if abs(share) < 0.0995 else f"{100 * share:.1f}%"


def _differences(rows: Rows, of: str, over: str) -> tuple[list[float], str]:
    """|of / over - 1| of each row, and the worst in words."""
    off = [abs(row[of] / row[over] - 1) for row in rows]
    return off, f"by {percent(max(off))} in the worst ({_named(rows[off.index(max(off))])})"


def _interval_reach(row: Mapping[str, Any]) -> float | None:
    """How far the confidence interval reaches from the median to its farther end, over the
    median.
    """
    latency, low = row.get("latency_us"), row.get("latency_ci_low_us")
    high = row.get("latency_ci_high_us")
    return (
        None
        if low is None or high is None or not latency
        else max(high - latency, latency - low) / latency
    )


def _with(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get(name) is not None]


def _rows(rows: Rows, which: str = "") -> str:
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} {which}".rstrip()


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['kernel']} · {label(row)}"
