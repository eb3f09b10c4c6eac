"""Subject of a report: runs, their rows as a table, and the statistics of each part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from leanbench.core.errors import UserError, nearest
from leanbench.core.quantities import TIMED
from leanbench.core.registry import kernels
from leanbench.report.compare.ratios import MEASURED, Margin, Ratios, geomean, margin_of, ratios_of
from leanbench.report.frame import (
    COMPARED,
    baseline_of,
    by_kernel,
    fastest_rows,
    kernel_order,
    kinds_of,
    ratios_to_baseline,
    results_frame,
    where,
)
from leanbench.report.series import (
    VaryingAxis,
    add_series_columns,
    narrower_words,
    short_labels,
    varying_axes,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from leanbench.records.reading import Run


@dataclass(frozen=True)
class Winner:
    """Problems on which a kernel is the fastest."""

    kernel: str
    #: Problems on which it is the fastest, or ties with the fastest within the margin.
    near: int
    #: Problems of `near` on which no other kernel is within the margin.
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
    #: Problems on which the baseline takes no longer than the fastest of them.
    not_slower: int


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
        keys = list(COMPARED)
        for key in dict.fromkeys(self.frame[keys].itertuples(index=False, name=None)):
            rows = where(self.frame, (self.frame[keys] == list(key)).all(axis=1))
            short = short_labels(rows, varying_axes(rows))
            parts.append(Part(_summary(rows), rows, short, unfinished[key[0]]))
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


def _summary(rows: DataFrame) -> Summary:
    run, source, gpu, cache = (str(rows[name].iloc[0]) for name in COMPARED)
    timed = where(rows, rows["status"].isin(TIMED))
    margin = margin_of(source, [gpu], dict.fromkeys(timed["kernel"]))
    speedups = ratios_to_baseline(rows, "latency_us")
    return Summary(
        run,
        source,
        gpu,
        cache,
        margin=margin,
        baseline=baseline_of(rows),
        winners=winners(rows, margin),
        speedups=_ratios(speedups, margin),
        over_best=_ratios_of(cast("Series", speedups.min(axis=1)), margin),
        over_peers=_over_peers(rows, margin),
        over_peers_by_kind=_over_peers_by_kind(rows, margin),
        energies=_ratios(ratios_to_baseline(rows, "energy_mj"), MEASURED),
        baseline_energy=_baseline_energy(rows),
        best=_best(rows),
    )


def winners(rows: DataFrame, margin: Margin = MEASURED) -> Winners | None:
    """Count the problems that each kernel wins; None if no problem has two timed kernels."""
    table = by_kernel(rows, "latency_us")
    table = where(table, table.notna().sum(axis=1) > 1).dropna(axis="columns", how="all")
    if table.empty:
        return None
    near = table.le(table.min(axis=1) * (1 + margin.share), axis=0)
    alone = where(near, near.sum(axis=1) == 1)
    compared = where(rows, rows["problem"].isin(_problems(table)))
    counted = []
    for kernel in kernel_order(rows):
        if kernel in table:
            labels = _problems(where(alone, alone[kernel]))
            at = narrower_words(where(compared, compared["problem"].isin(labels)), compared)
            counted.append(Winner(kernel, near[kernel].tolist().count(True), len(labels), at))
    counted.sort(key=lambda winner: (-winner.near, -winner.alone))
    return Winners(len(table), tuple(counted))


def _problems(table: DataFrame | Series) -> list[str]:
    return list(table.index.get_level_values("problem"))


def _ratios(table: DataFrame, margin: Margin) -> dict[str, Ratios]:
    ratios = {str(name): _ratios_of(cast("Series", table[name]), margin) for name in table}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _ratios_of(over_baseline: Series, margin: Margin) -> Ratios | None:
    over_baseline = over_baseline.dropna()
    values = [float(value) for value in over_baseline]
    return ratios_of(_problems(over_baseline), values, margin)


def _over_peers_by_kind(rows: DataFrame, margin: Margin) -> dict[str, OverPeers]:
    kinds = kinds_of(rows)
    by_kind = {
        kind: _over_peers(where(rows, kinds == kind), margin) for kind in dict.fromkeys(kinds)
    }
    known = {kind: over for kind, over in by_kind.items() if over is not None}
    return known if len(by_kind) > 1 else {}


def _over_peers(rows: DataFrame, margin: Margin) -> OverPeers | None:
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
