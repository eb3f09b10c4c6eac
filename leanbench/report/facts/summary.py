"""Summary of a run: speedups, energy, the best bandwidth, and how the rows ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from leanbench.core.quantities import TIMED
from leanbench.core.registry import kernels
from leanbench.report.compare.ratios import MEASURED, Margin, Ratios, geomean, margin_of, ratios_of
from leanbench.report.facts.winners import Winners, winners
from leanbench.report.frame import (
    COMPARED,
    baseline_of,
    fastest_rows,
    kinds_of,
    ratios_to_baseline,
    where,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series


@dataclass(frozen=True)
class OverPeers:
    """Latency of the fastest peer over the baseline's, over the problems that both timed."""

    #: Libraries' kernels that ran.
    kernels: tuple[str, ...]
    ratios: Ratios
    #: Problems on which the baseline takes no longer than the fastest of them.
    not_slower: int


@dataclass(frozen=True)
class BestBandwidth:
    """The `ok` row that moved KV bytes fastest; one with a warning only where every row has one."""

    kernel: str
    bandwidth_tb_s: float
    at: str
    read_floor_share: float | None
    warned: bool


@dataclass(frozen=True)
class OwnEnergy:
    """The baseline's energy and that of only reading K and V, over the problems that it timed."""

    problems: int
    #: Geometric mean of energy over the energy floor; null where no floor was measured.
    over_floor: float | None
    #: Median and highest mean power; null where not measured.
    power_w: float | None
    highest_power_w: float | None
    #: Median of sustained over burst latency, less 1.
    slowdown: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of one run and source on one GPU in one state of the L2."""

    run: str
    source: str
    gpu: str
    cache: str
    #: A difference within it is none.
    margin: Margin
    #: The kernel that the others are compared with.
    baseline: str
    winners: Winners | None
    #: How many times the baseline's latency each other kernel needs, over the problems that both
    #: timed.
    speedups: dict[str, Ratios]
    #: Of the fastest other kernel of each problem; null where no other ran, or the baseline did
    #: not.
    over_best: Ratios | None
    #: Of the fastest peer of each problem; None where none ran.
    over_peers: OverPeers | None
    #: The same for each kind of attention, of one peer or more; empty where all problems are of one
    #: kind.
    over_peers_by_kind: dict[str, OverPeers]
    #: The same of energy.
    energies: dict[str, Ratios]
    own_energy: OwnEnergy | None
    best: BestBandwidth | None


def summaries(frame: DataFrame) -> list[Summary]:
    """One summary for each run, source, GPU and state of the L2 that has rows, in the order they
    first appear.
    """
    keys = list(COMPARED)
    return [
        Summary(
            *key,
            margin=margin,
            baseline=baseline_of(rows),
            winners=winners(rows, margin),
            speedups=_ratios(speedups, margin),
            over_best=_ratios_of(cast("Series", speedups.min(axis=1)), margin),
            over_peers=_over_peers(rows, margin),
            over_peers_by_kind=_over_peers_by_kind(rows, margin),
            energies=_ratios(ratios_to_baseline(rows, "energy_mj"), MEASURED),
            own_energy=_own_energy(rows),
            best=_best(rows),
        )
        for key in dict.fromkeys(frame[keys].itertuples(index=False, name=None))
        for rows in [where(frame, (frame[keys] == list(key)).all(axis=1))]
        for margin in [_margin(rows)]
        for speedups in [ratios_to_baseline(rows, "latency_us")]
    ]


def _margin(rows: DataFrame) -> Margin:
    """Of the rows of one source and GPU; a kernel that has no prediction widens nothing."""
    timed = where(rows, rows["status"].isin(TIMED))
    source, gpu = rows["source"].iloc[0], rows["gpu"].iloc[0]
    return margin_of(str(source), [str(gpu)], dict.fromkeys(timed["kernel"]))


def rows_of(frame: DataFrame, summary: Summary) -> DataFrame:
    """The rows that a summary is of."""
    return where(
        frame, (frame[list(COMPARED)] == [getattr(summary, name) for name in COMPARED]).all(axis=1)
    )


def status_counts(frame: DataFrame) -> dict[str, int]:
    """Rows by status, `ok` first, then the most frequent."""
    counts = {str(status): int(count) for status, count in frame["status"].value_counts().items()}
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0])))


def _ratios(table: DataFrame, margin: Margin) -> dict[str, Ratios]:
    ratios = {str(name): _ratios_of(cast("Series", table[name]), margin) for name in table}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _over_peers_by_kind(rows: DataFrame, margin: Margin) -> dict[str, OverPeers]:
    kinds = kinds_of(rows)
    of_each = {
        kind: _over_peers(where(rows, kinds == kind), margin) for kind in dict.fromkeys(kinds)
    }
    told = {kind: over for kind, over in of_each.items() if over is not None}
    return told if len(of_each) > 1 else {}


def _over_peers(rows: DataFrame, margin: Margin) -> OverPeers | None:
    """None where no peer ran beside the baseline."""
    known = kernels()
    table = ratios_to_baseline(rows, "latency_us").dropna(axis="columns", how="all")
    peers = [str(name) for name in table if name in known and known[str(name)].is_peer]
    baseline = known.get(baseline_of(rows))
    if not peers or (baseline is not None and baseline.is_peer):
        return None
    fastest = table[peers].min(axis=1).dropna()
    ratios = _ratios_of(cast("Series", fastest), margin)
    assert ratios is not None
    return OverPeers(tuple(peers), ratios, int((fastest >= 1).sum()))


def _ratios_of(over_baseline: Series, margin: Margin) -> Ratios | None:
    """`over_baseline` has a value for each problem, or null."""
    over_baseline = over_baseline.dropna()
    labels = list(over_baseline.index.get_level_values("problem"))
    return ratios_of(labels, [float(value) for value in over_baseline], margin)


def _own_energy(rows: DataFrame) -> OwnEnergy | None:
    own = fastest_rows(where(rows, rows["kernel"] == baseline_of(rows)))
    own = where(own, own["energy_mj"] > 0)
    if own.empty:
        return None
    over_floor = [float(value) for value in own["energy_over_floor"].dropna()]
    power, slowdown = own["sustained_power_w"], own["sustained_slowdown"]
    energy = OwnEnergy(
        problems=len(own),
        over_floor=geomean(over_floor) if over_floor else None,
        power_w=_known(power.median()),
        highest_power_w=_known(power.max()),
        slowdown=_known(slowdown.median()),
    )
    # A prediction has the energy alone, which says nothing without another.
    return None if energy.over_floor is energy.power_w is energy.slowdown is None else energy


def _best(rows: DataFrame) -> BestBandwidth | None:
    ok = where(rows, (rows["status"] == "ok") & rows["bandwidth_tb_s"].notna())
    if ok.empty:
        return None
    unwarned = where(ok, ok["warnings"].isna())
    warned = unwarned.empty
    ok = ok if warned else unwarned
    best = ok.sort_values(by=["bandwidth_tb_s"], ascending=False, kind="stable").iloc[0]
    share = _known(best["read_floor_share"])
    return BestBandwidth(
        str(best["kernel"]), float(best["bandwidth_tb_s"]), str(best["problem"]), share, warned
    )


def _known(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)
