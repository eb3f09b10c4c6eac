"""Subject of a report: runs, their rows as a table, and the statistics of each part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from leanbench.core.errors import UserError, nearest
from leanbench.core.quantities import TIMED
from leanbench.core.registry import kernels
from leanbench.records.standing import Latency, Ratio, measured_spread, standing
from leanbench.report.compare.ratios import MEASURED, Margin, Ratios, geomean, margin_of, ratios_of
from leanbench.report.frame import (
    COMPARED,
    baseline_of,
    fastest_rows,
    floors_of,
    kernel_order,
    kinds_of,
    latencies_of,
    ratios_to_baseline,
    results_frame,
    where,
)
from leanbench.report.parts import add_part_columns
from leanbench.report.series import (
    VaryingAxis,
    add_series_columns,
    narrower_words,
    short_labels,
    varying_axes,
)
from leanbench.report.window import add_window

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from leanbench.records.reading import Run


@dataclass(frozen=True)
class Winner:
    """Problems on which a kernel is the fastest."""

    kernel: str
    #: Problems on which it is the fastest, or level with the fastest.
    near: int
    #: Problems on which it is ahead of all others.
    alone: int
    #: Ranges of `alone`, if narrower than those of all problems: ``context 1k to 4k``.
    at: str


@dataclass(frozen=True)
class Winners:
    """Fastest kernels over the problems that several kernels ran."""

    problems: int
    #: Kernels that ran one of the problems, most `near` first.
    kernels: tuple[Winner, ...]


@dataclass(frozen=True)
class OverPeers:
    """Latency of the fastest peer over the baseline's, over the problems that both timed."""

    #: Kernels of libraries.
    kernels: tuple[str, ...]
    ratios: Ratios
    #: Medians over these problems of the latency above the read floor, of the baseline and of the
    #: fastest peer; None if not measured.
    over_floor_us: tuple[float, float] | None


@dataclass(frozen=True)
class BestBandwidth:
    """The `ok` row with the highest bandwidth; with a warning only if every row has one."""

    kernel: str
    bandwidth_tb_s: float
    at: str
    read_floor_share: float | None
    warned: bool


@dataclass(frozen=True)
class BaselineEnergy:
    """Energy of the baseline and of only reading K and V, over the baseline's problems.

    A field is None if it was not measured.
    """

    problems: int
    #: Geometric mean of energy over the energy floor.
    over_floor: float | None
    #: Median and highest mean power.
    power_w: float | None
    highest_power_w: float | None
    #: Median of sustained over burst latency, less 1.
    slowdown: float | None


@dataclass(frozen=True)
class Summary:
    """Statistics of one run and source on one GPU in one state of the L2."""

    run: str
    source: str
    gpu: str
    cache: str
    margin: Margin
    #: Kernel that the others are compared with.
    baseline: str
    winners: Winners | None
    #: Latency of each other kernel over the baseline's.
    speedups: dict[str, Ratios]
    #: Latency of each problem's fastest other kernel over the baseline's; None if either did not
    #: run.
    over_best: Ratios | None
    over_peers: OverPeers | None
    #: By attention variant; empty if all problems are of one variant.
    over_peers_by_kind: dict[str, OverPeers]
    #: Energy of each other kernel over the baseline's.
    energies: dict[str, Ratios]
    baseline_energy: BaselineEnergy | None
    best: BestBandwidth | None


@dataclass(frozen=True)
class Part:
    """Rows of one run, source, GPU and state of the L2."""

    summary: Summary
    rows: DataFrame
    #: Short labels of the part's problems by label.
    short: Mapping[str, str]
    #: See `leanbench.records.reading.Run.unfinished`.
    unfinished: str = ""


@dataclass(frozen=True)
class Results:
    """Runs and their rows."""

    runs: Sequence[Run]
    #: Kernel that the others are compared with; None for the default of each part, see
    #: `leanbench.report.frame.baselines`.
    baseline: str | None = None

    def __post_init__(self) -> None:
        kernels = {row.kernel for run in self.runs for row, _ in run.results}
        if self.baseline is not None and kernels and self.baseline not in kernels:
            raise UserError(
                f"--baseline {self.baseline} is no kernel of these runs,"
                f" {nearest(self.baseline, kernels)}"
            )

    @cached_property
    def frame(self) -> DataFrame:
        """Rows as `results_frame`, with the columns of series."""
        frame = results_frame(*self.runs, baseline=self.baseline)
        return add_series_columns(
            frame.assign(read_floor_tb_s=frame["kv_bytes"] / frame["read_floor_us"] * 1e-6)
        )

    @cached_property
    def pictured(self) -> DataFrame:
        """Rows of `frame` with the columns that only pictures show."""
        return add_window(add_part_columns(self.frame, self.runs), self.runs)

    @cached_property
    def axes(self) -> list[VaryingAxis]:
        return varying_axes(self.frame)

    @cached_property
    def short(self) -> Mapping[str, str]:
        """Short labels of all problems by label."""
        return short_labels(self.frame, self.axes)

    @cached_property
    def parts(self) -> list[Part]:
        """Parts in the order of the rows."""
        parts = []
        unfinished = {run.name: run.unfinished for run in self.runs}
        spreads = {run.name: run.manifest.get("process_spread") for run in self.runs}
        keys = list(COMPARED)
        for key in dict.fromkeys(self.frame[keys].itertuples(index=False, name=None)):
            rows = where(self.frame, (self.frame[keys] == list(key)).all(axis=1))
            short = short_labels(rows, varying_axes(rows))
            summary = _summary(rows, spreads[key[0]])
            parts.append(Part(summary, rows, short, unfinished[key[0]]))
        return parts

    @property
    def margin(self) -> Margin:
        """Widest margin of the parts."""
        margins = [part.summary.margin for part in self.parts]
        return max(margins, key=lambda margin: margin.share, default=MEASURED)

    @property
    def are_several(self) -> bool:
        return len(self.runs) > 1

    @cached_property
    def sources(self) -> list[str]:
        """`measured`, `predicted` or both; without rows the first run's source."""
        return list(dict.fromkeys(self.frame["source"])) or [
            str(run.manifest.get("source", "measured")) for run in self.runs[:1]
        ]

    @cached_property
    def gpus(self) -> list[str]:
        """Products, each once."""
        return list(dict.fromkeys(self.frame["gpu"])) or [self.runs[0].gpu_name()]

    @cached_property
    def l2(self) -> str:
        """``warm L2`` or ``cold and warm L2``; empty for the default, a cold L2."""
        caches = sorted(set(self.frame["cache"]))
        return f"{' and '.join(caches)} L2" if "warm" in caches else ""


def status_counts(frame: DataFrame) -> dict[str, int]:
    """Count rows by status, `ok` first, then the most frequent."""
    counts = {str(status): int(count) for status, count in frame["status"].value_counts().items()}
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0])))


def _summary(rows: DataFrame, of_machine: float | None) -> Summary:
    run, source, gpu, cache = (str(rows[name].iloc[0]) for name in COMPARED)
    timed = where(rows, rows["status"].isin(TIMED))
    spread = measured_spread(timed["process_spread"].dropna(), of_machine)
    margin = margin_of(source, [gpu], dict.fromkeys(timed["kernel"]), spread)
    latencies, baseline = latencies_of(rows), baseline_of(rows)
    return Summary(
        run,
        source,
        gpu,
        cache,
        margin=margin,
        baseline=baseline,
        winners=winners(rows, margin),
        speedups={
            kernel: ratios
            for kernel in kernel_order(rows)
            if (ratios := _over(latencies, baseline, [kernel], margin))
        },
        over_best=_over(latencies, baseline, kernel_order(rows), margin),
        over_peers=_over_peers(rows, margin),
        over_peers_by_kind=_over_peers_by_kind(rows, margin),
        energies=_energies(rows),
        baseline_energy=_baseline_energy(rows),
        best=_best(rows),
    )


#: Latencies by a problem's label and kernel.
Latencies = Mapping[str, Mapping[str, Latency]]


def winners(rows: DataFrame, margin: Margin = MEASURED) -> Winners | None:
    """Count the problems that each kernel wins; None if no problem has two timed kernels."""
    latencies = {label: of for label, of in latencies_of(rows).items() if len(of) > 1}
    if not latencies:
        return None
    near: dict[str, list[str]] = {name: [] for of in latencies.values() for name in of}
    alone: dict[str, list[str]] = {name: [] for name in near}
    for label, of in latencies.items():
        fastest = min(of.values())
        level = [
            name
            for name, own in of.items()
            if own is fastest or standing(fastest.over(own), margin.share) == "level"
        ]
        for name in level:
            (near if len(level) > 1 else alone)[name].append(label)
    compared = where(rows, rows["problem"].isin([*latencies]))
    counted = []
    for kernel in kernel_order(rows):
        if kernel in near:
            wins = alone[kernel]
            at = narrower_words(where(compared, compared["problem"].isin(wins)), compared)
            counted.append(Winner(kernel, len(near[kernel]) + len(wins), len(wins), at))
    counted.sort(key=lambda winner: (-winner.near, -winner.alone))
    return Winners(len(latencies), tuple(counted))


def _over(
    latencies: Latencies, baseline: str, kernels: Sequence[str], margin: Margin
) -> Ratios | None:
    """Summarise the fastest of the kernels over the baseline, on the problems that both timed."""
    ratios: dict[str, Ratio] = {}
    for label, of in latencies.items():
        rivals = [of[name] for name in kernels if name in of and name != baseline]
        if rivals and baseline in of:
            ratios[label] = min(rivals).over(of[baseline])
    return ratios_of([*ratios], [*ratios.values()], margin)


def _energies(rows: DataFrame) -> dict[str, Ratios]:
    table, found = ratios_to_baseline(rows, "energy_mj"), {}
    for name in table:
        known = cast("Series", table[name]).dropna()
        labels = list(known.index.get_level_values("problem"))
        if ratios := ratios_of(labels, [Ratio.exactly(float(value)) for value in known]):
            found[str(name)] = ratios
    return found


def _over_peers_by_kind(rows: DataFrame, margin: Margin) -> dict[str, OverPeers]:
    kinds = kinds_of(rows)
    by_kind = {
        kind: _over_peers(where(rows, kinds == kind), margin) for kind in dict.fromkeys(kinds)
    }
    known = {kind: over for kind, over in by_kind.items() if over is not None}
    return known if len(by_kind) > 1 else {}


def _over_peers(rows: DataFrame, margin: Margin) -> OverPeers | None:
    known, latencies, baseline = kernels(), latencies_of(rows), baseline_of(rows)
    ran = {name for of in latencies.values() if baseline in of for name in of}
    peers = [name for name in kernel_order(rows) if name in ran and name in known]
    peers = [name for name in peers if known[name].is_peer]
    if not peers or (baseline in known and known[baseline].is_peer):
        return None
    ratios = _over(latencies, baseline, peers, margin)
    assert ratios is not None
    return OverPeers(tuple(peers), ratios, _over_floor(rows, peers, baseline))


def _over_floor(rows: DataFrame, peers: Sequence[str], baseline: str) -> tuple[float, float] | None:
    """Return the medians of the baseline and of the fastest peer above the read floor, in us."""
    above: list[tuple[float, float]] = []
    for of in floors_of(rows).values():
        rivals = [of[name] for name in peers if name in of]
        if rivals and baseline in of:
            above.append((of[baseline][1], min(rivals)[1]))
    if not above:
        return None
    own_us, peers_us = zip(*above, strict=True)
    return statistics.median(own_us), statistics.median(peers_us)


def _baseline_energy(rows: DataFrame) -> BaselineEnergy | None:
    of_baseline = fastest_rows(where(rows, rows["kernel"] == baseline_of(rows)))
    of_baseline = where(of_baseline, of_baseline["energy_mj"] > 0)
    if of_baseline.empty:
        return None
    over_floor = [float(value) for value in of_baseline["energy_over_floor"].dropna()]
    power, slowdown = of_baseline["sustained_power_w"], of_baseline["sustained_slowdown"]
    energy = BaselineEnergy(
        problems=len(of_baseline),
        over_floor=geomean(over_floor) if over_floor else None,
        power_w=_known(power.median()),
        highest_power_w=_known(power.max()),
        slowdown=_known(slowdown.median()),
    )
    # A prediction has the energy alone, which has no meaning without another.
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
