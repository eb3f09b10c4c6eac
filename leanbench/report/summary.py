"""What a busy person reads first: speedups of lean, the best bandwidth, and how the rows ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.frame import baselines, best_ok_rows, speedups, where

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Speedup:
    """How many times faster lean is than `baseline`, over the problems where both are `ok`."""

    baseline: str
    problems: int
    geomean: float
    lowest: float
    lowest_at: str
    highest: float
    highest_at: str
    #: Problems on which lean is the faster one.
    won: int


@dataclass(frozen=True)
class BestBandwidth:
    """The row that moved KV bytes fastest."""

    kernel: str
    bandwidth_tb_s: float
    at: str
    read_floor_share: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of one source on one GPU."""

    source: str
    gpu: str
    speedups: tuple[Speedup, ...]
    best: BestBandwidth | None


def summaries(frame: DataFrame) -> list[Summary]:
    """One summary for each source and GPU that has rows, in the order they first appear."""
    return [
        Summary(source, gpu, tuple(_speedups(rows)), _best(rows))
        for source, gpu in dict.fromkeys(zip(frame["source"], frame["gpu"], strict=True))
        for rows in [where(frame, (frame["source"] == source) & (frame["gpu"] == gpu))]
    ]


def status_counts(frame: DataFrame) -> dict[str, int]:
    """Rows by status, `ok` first, then the most frequent."""
    counts = {str(status): int(count) for status, count in frame["status"].value_counts().items()}
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0])))


def geomean(values: list[float]) -> float:
    """The mean for ratios: doubling and halving cancel out."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _speedups(rows: DataFrame) -> list[Speedup]:
    table = speedups(rows)
    found = []
    for baseline in baselines(rows):
        if baseline not in table:
            continue
        column = table[baseline].dropna()
        if column.empty:
            continue
        labels, values = list(column.index.get_level_values("problem")), [float(value) for value in column]
        lowest, highest = min(values), max(values)
        found.append(
            Speedup(
                baseline=baseline,
                problems=len(values),
                geomean=geomean(values),
                lowest=lowest,
                lowest_at=labels[values.index(lowest)],
                highest=highest,
                highest_at=labels[values.index(highest)],
                won=sum(value > 1 for value in values),
            )
        )
    return found


def _best(rows: DataFrame) -> BestBandwidth | None:
    ok = best_ok_rows(rows)
    ok = where(ok, ok["bandwidth_tb_s"].notna())
    if ok.empty:
        return None
    best = ok.sort_values(by=["bandwidth_tb_s"], ascending=False, kind="stable").iloc[0]
    share = float(best["read_floor_share"])
    return BestBandwidth(
        str(best["kernel"]), float(best["bandwidth_tb_s"]), str(best["problem"]), None if math.isnan(share) else share
    )
