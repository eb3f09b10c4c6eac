"""Heat maps over batch x heads x context: which are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.decode import BOUND
from leanbench.report.frame import baseline_of, fastest_rows, has_values

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
    """The maps that these rows fill: at least two rows and two columns of cells."""
    timed = fastest_rows(frame)
    if (
        len(set(timed["max_context"])) < 2
        or len(timed.drop_duplicates(["batch", "q_heads", "kv_heads"])) < 2
    ):
        return []
    kernels = {*timed["kernel"]} - {BOUND}
    maps = [winner_map(margin)] if len(kernels) > 1 else []
    baseline = baseline_of(frame)
    if len(kernels) > 1 and baseline in kernels:
        note = f"blue: {baseline} is faster, orange: slower"
        maps.append(HeatMap("speedup", f"Speedup of {baseline}", note))
    return [*maps, FLOOR] if has_values(timed, "read_floor_share") else maps
