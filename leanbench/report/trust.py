"""How far the figures of a run can be trusted: what the measurement knows of its own precision, a
sentence each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from leanbench.report.warnings import label

Rows = Sequence[Mapping[str, Any]]

#: Below this latency a fixed cost of a launch weighs more than a share of it: differences are told
#: in microseconds.
SHORT_US = 20.0
#: Sustained may be shorter than the burst by this share before it is told.
SUSTAINED_MARGIN = 0.01


@dataclass(frozen=True)
class Fact:
    """One thing to know about a run's figures."""

    name: str
    #: Stands alone.
    text: str
    #: What was done, or what the words mean.
    note: str


def facts(rows: Rows) -> list[Fact]:
    """What is known about measured rows of one GPU and one state of the L2; nothing about
    predictions.

    Args:
        rows: as in results.jsonl. Only `ok` ones enter a median or a worst case.
    """
    measured = [
        row for row in rows if row["source"] == "measured" and row.get("latency_us") is not None
    ]
    ok = [row for row in measured if row["status"] == "ok"]
    of_latency = [_stopping(measured, ok), _crosscheck(ok), _repeated(measured), _lowered(ok)]
    found = [*of_latency, _sustained(ok), _energy(ok), _stamps(ok)]
    return [fact for fact in found if fact is not None]


def _stopping(measured: Rows, ok: Rows) -> Fact | None:
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
    return Fact("stopping rule", text, note)


def _crosscheck(ok: Rows) -> Fact | None:
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
        "The same launches in a graph under torch's profiler: from one launch's first kernel to the"
        " next one's, by CUPTI's time stamps."
    )
    return Fact("cross-check", f"the cross-check differs from the latency {'; '.join(parts)}", note)


def _repeated(measured: Rows) -> Fact | None:
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
    return Fact("throttling", text, "Samples are repeated where the GPU had lowered its clocks.")


def _lowered(ok: Rows) -> Fact | None:
    hit = [row for row in ok if row.get("throttle_reasons")]
    if not hit:
        return None
    reasons = Counter(reason for row in hit for reason in row["throttle_reasons"])
    named = ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common())
    text = f"clocks were lowered in samples that were kept of {len(hit)} of {_rows(ok)}: {named}"
    return Fact(
        "lowered clocks",
        text,
        "Reasons NVML gave for lowered clocks during the samples that were kept.",
    )


def _sustained(ok: Rows) -> Fact | None:
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
    return Fact(
        "sustained",
        text,
        "Heat and the power limit make sustained launches longer than a burst's, not shorter.",
    )


def _energy(ok: Rows) -> Fact | None:
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
    return Fact("energy", text, note)


def _stamps(ok: Rows) -> Fact | None:
    read = _with(ok, "instrumentation_cost")
    if not read:
        return None
    costs = [row["instrumentation_cost"] for row in read]
    worst = read[costs.index(max(costs))]
    text = (
        f"the stamps behind the SM busy share made launches {median(costs):.3f}x as long in the"
        f" median of {_rows(read)} and {max(costs):.3f}x in the worst ({_named(worst)})"
    )
    note = "Instrumented latency over plain latency; every other figure is of the plain kernel."
    return Fact("instrumentation", text, note)


def percent(share: float) -> str:
    """``0.12%``, ``12.3%``."""
    return f"{100 * share:.2f}%" if abs(share) < 0.0995 else f"{100 * share:.1f}%"


def _differences(rows: Rows, one: str, other: str) -> tuple[list[float], str]:
    """|one / other - 1| of each row, and the worst in words."""
    off = [abs(row[one] / row[other] - 1) for row in rows]
    return off, f"by {percent(max(off))} in the worst ({_named(rows[off.index(max(off))])})"


def _interval_reach(row: Mapping[str, Any]) -> float | None:
    """How far the confidence interval reaches from the median to its farther end, over the
    median.
    """
    low, high, latency = (row.get(f"latency_{name}us") for name in ("ci_low_", "ci_high_", ""))
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
