"""Heat maps over batch x heads x context: which are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.decode import BOUND
from leanbench.report.frame import (
    THE_BASELINE,
    baseline_in_words,
    baseline_of,
    fastest_rows,
    has_values,
    latencies_by_kernel,
)
from leanbench.report.series import listed

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.compare.ratios import Margin


@dataclass(frozen=True)
class HeatMap:
    """One map; `key` says to the page what a cell holds."""

    key: str
    title: str
    note: str


FLOOR = HeatMap(
    "floor",
    "Share of the read floor",
    "time of a kernel that only reads K and V, over latency, in %",
)


def winner_map(margin: Margin) -> HeatMap:
    """Which kernel is the fastest by more than a margin."""
    return HeatMap(
        "winner",
        "Fastest kernel",
        f"how many times as long the second takes; grey: several within {margin.words}; blank: no"
        " two kernels timed",
    )


def maps_of(frame: DataFrame, margin: Margin) -> list[HeatMap]:
    """The maps that these rows fill: at least two rows and two columns of cells.

    If only one kernel beats the baseline anywhere, the map of speedups says who is the fastest.
    """
    timed = fastest_rows(frame)
    if (
        len(set(timed["max_context"])) < 2
        or len(timed.drop_duplicates(["batch", "q_heads", "kv_heads"])) < 2
    ):
        return []
    kernels = {*timed["kernel"]} - {BOUND}
    has_speedups = len(kernels) > 1 and bool(kernels & {*timed["baseline"]})
    fastest = {*latencies_by_kernel(frame).dropna(how="all").idxmin(axis=1)}
    few_win = has_speedups and len(fastest - {*timed["baseline"]}) < 2
    maps = [] if few_win or len(kernels) < 2 else [winner_map(margin)]
    if has_speedups:
        baseline = baseline_in_words(frame)
        note = f"blue: {baseline} is faster, orange: slower"
        if baseline == THE_BASELINE:
            note += f"; the baseline is {_by_run(timed)}"
        maps.append(HeatMap("speedup", f"Speedup of {baseline}", note))
    return [*maps, FLOOR] if has_values(timed, "read_floor_share") else maps


def _by_run(timed: DataFrame) -> str:
    """``lean, lean_mla in latent``: the runs are named whose baseline is not the usual one."""
    runs: dict[str, list[str]] = {}
    for baseline, run in dict.fromkeys(zip(timed["baseline"], timed["run"], strict=True)):
        runs.setdefault(baseline, []).append(run)
    usual = baseline_of(timed)
    others = [f"{name} in {listed(of)}" for name, of in runs.items() if name != usual]
    return ", ".join([usual, *others])
