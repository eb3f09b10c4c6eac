"""Charts and heat maps of the page, and the styles of kernels in them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.decode import BOUND
from leanbench.report.frame import (
    COMPARED,
    THE_BASELINE,
    baseline_in_words,
    baseline_of,
    by_kernel,
    fastest_rows,
    has_values,
    where,
)
from leanbench.report.parts import PARTS
from leanbench.report.series import listed

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.compare.ratios import Margin
    from leanbench.report.series import VaryingAxis

#: Wong's colour-blind-safe set, darkened where needed for a contrast of 3:1 on the white and on the
#: dark page.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#B85C93", "#A67C00", "#7B6FD0", "#8C7468", "#2E93A8")
#: Marks that `report_plot.js` draws.
MARKS: tuple[str, ...] = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "pentagon",
    "cross",
    "star",
)
#: Index of the colour and mark that a kernel has in every report.
FIXED = {
    name: index for index, name in enumerate(("lean", "fa2", "fixed_split", "cudnn", "flashinfer"))
}

#: Factor between the FLOPs per byte of a roofline's problems.
_LEAST_SPAN = 4


@dataclass(frozen=True)
class Chart:
    """A chart. Columns are those of the frame."""

    key: str
    title: str
    #: Meaning of the marks, one line under the title.
    note: str
    y: str
    y_title: str
    #: `log`, `linear` (from zero) or `auto`: log if the values span more than a factor of 5.
    y_scale: str
    #: Ends of the error bars.
    low: str | None = None
    high: str | None = None
    #: Dashed line, the same for every kernel.
    floor: str | None = None
    floor_name: str = "read floor"
    #: Dotted line in each kernel's colour.
    dotted: str | None = None
    dotted_name: str = ""
    #: Warning against a misreading of the dotted line.
    dotted_note: str = ""
    #: Horizontal line.
    line_at: float | None = None
    #: Column on the x axis, and its title; empty for the selected axis. With a column, every
    #: problem of the run is shown, whatever is selected.
    x: str = ""
    x_title: str = ""
    #: Axis that lines follow through the selected series; empty for the x axis.
    along: str = ""
    #: Limits of the GPU: memory's rate times x, and the rate of the tensor cores.
    has_roofs: bool = False
    #: Cumulative columns up to `y`, each with the name of its part: filled areas below the line of
    #: the baseline, which is the only one.
    stack: tuple[tuple[str, str], ...] = ()
    #: Place in each reading of the column `window`: these are drawn over their seconds. 0: none.
    reading: int = 0


_WINDOW = "read every 20 ms of the sustained window; of the problem furthest right in other charts"

CHARTS = (
    Chart(
        key="token_time",
        title="Where the time of a token goes",
        note="a step of a whole model with the baseline: the matrix products of a step without"
        " attention, all else in it, and what attention and appending add",
        y="latency_us",
        y_title="time per output token (µs)",
        y_scale="linear",
        stack=(
            ("gemm_us", "GEMMs"),
            ("no_attention_us", "all else"),
            ("latency_us", "attention"),
        ),
    ),
    Chart(
        key="pareto",
        title="Tokens per second, for a user and of a GPU",
        note="each line from the smallest batch to the largest, one for each value on the x axis of"
        " the other charts; up and to the right is better",
        y="tokens_per_s_gpu",
        y_title="tokens per second and GPU",
        y_scale="log",
        x="tokens_per_s_user",
        x_title="tokens per second and user",
        along="batch",
    ),
    Chart(
        key="energy_per_token",
        title="Energy per token",
        note="energy of a step over its batch, back to back for seconds",
        y="energy_per_token_j",
        y_title="energy per token (J)",
        y_scale="auto",
    ),
    Chart(
        key="latency",
        title="Latency",
        note="time of one launch, or of a whole model's step",
        y="latency_us",
        y_title="latency (µs)",
        y_scale="log",
        low="latency_p25_us",
        high="latency_p75_us",
        floor="read_floor_us",
    ),
    Chart(
        key="parts",
        title="Where the time of a launch goes",
        note="of the baseline: the performance model's shares of the latency; ramp: memory comes up"
        " to its rate; tail: SMs that have read their part wait for the last",
        y="merge_end",
        y_title="share of the latency (%)",
        y_scale="linear",
        stack=tuple((column.name, column.heading) for column in PARTS),
    ),
    Chart(
        key="speedup",
        title="Speedup of the baseline",
        note="latency of each other kernel over that of the baseline; above 1, the baseline is"
        " faster",
        y="speedup",
        y_title="speedup of the baseline (×)",
        y_scale="auto",
        line_at=1.0,
    ),
    Chart(
        key="share",
        title="Share of the read floor, all problems",
        note="time of a kernel that only reads K and V, over latency; 100% is the physical limit",
        y="read_floor_share",
        y_title="share of the read floor (%)",
        y_scale="linear",
        line_at=1.0,
        x="kv_bytes",
        x_title="K and V read (bytes)",
    ),
    Chart(
        key="roofline",
        title="Roofline, all problems",
        note="arithmetic of both matrix products over the bytes that must move; below the slope"
        " memory is the limit, below the level line the tensor cores are (16 bits, boost clock)",
        y="tflop_s",
        y_title="TFLOP/s",
        y_scale="log",
        x="flop_per_byte",
        x_title="FLOPs per byte",
        has_roofs=True,
    ),
    Chart(
        key="speedup_all",
        title="Speedup of the baseline, all problems",
        note="one mark a problem and kernel; above 1, the baseline is faster",
        y="speedup",
        y_title="speedup of the baseline (×)",
        y_scale="auto",
        line_at=1.0,
        x="kv_bytes",
        x_title="K and V read (bytes)",
    ),
    Chart(
        key="energy",
        title="Energy",
        note="of one launch, back to back for seconds: where measured, by NVML's energy counter",
        y="energy_mj",
        y_title="energy of one launch (mJ)",
        y_scale="log",
        floor="energy_floor_mj",
        floor_name="energy floor",
    ),
    Chart(
        key="power",
        title="Mean power",
        note="over the sustained window",
        y="sustained_power_w",
        y_title="mean power (W)",
        y_scale="linear",
        floor="idle_power_w",
        floor_name="idle GPU",
    ),
    Chart(
        key="clock_window",
        title="SM clock while energy was measured",
        note=_WINDOW,
        y="sustained_clock_mhz",
        y_title="SM clock (MHz)",
        y_scale="auto",
        reading=1,
    ),
    Chart(
        key="power_window",
        title="Power while energy was measured",
        note=_WINDOW,
        y="sustained_power_w",
        y_title="power (W)",
        y_scale="auto",
        reading=2,
    ),
    Chart(
        key="sustained",
        title="Sustained against burst latency",
        note="latency under power and heat over that in bursts of milliseconds, less 1",
        y="sustained_slowdown",
        y_title="sustained over burst (%)",
        y_scale="linear",
        line_at=0.0,
    ),
    Chart(
        key="sm_busy",
        title="SM busy share",
        note="share of SM time in which an SM had a CTA that was not waiting",
        y="sm_busy_share",
        y_title="SM busy share (%)",
        y_scale="linear",
        dotted="quantisation_efficiency",
        dotted_name="CTA slots with work, by the schedule",
        dotted_note="no limit, as one working CTA of several makes an SM busy",
        line_at=1.0,
    ),
)


@dataclass(frozen=True)
class HeatMap:
    """A map over batch x heads x context; `key` selects the value of its cells."""

    key: str
    title: str
    note: str


FLOOR = HeatMap(
    "floor",
    "Share of the read floor",
    "time of a kernel that only reads K and V, over latency, in %",
)


def drawn_rows(frame: DataFrame) -> DataFrame:
    """Select the rows that charts show."""
    return where(frame, frame["status"].isin(TIMED) & frame["latency_us"].notna())


def charts_of(drawn: DataFrame, axes: Sequence[VaryingAxis]) -> list[Chart]:
    """Return the charts that the rows have values for, with the baseline's name in their texts.

    With one series, the speedup chart already shows the speedups of all problems.
    """
    several_series = len(axes) > any(axis.is_x for axis in axes)
    baseline = baseline_in_words(drawn)
    pointless = {
        "speedup_all": not several_series,
        "pareto": not _follows_the_batch(drawn),
        "roofline": not _leaves_the_slope(drawn),
    }
    charts = []
    for chart in CHARTS:
        if _has_values(chart, drawn) and not pointless.get(chart.key):
            texts = {name: getattr(chart, name) for name in ("title", "note", "y_title")}
            named = {name: text.replace(THE_BASELINE, baseline) for name, text in texts.items()}
            charts.append(replace(chart, **named))
    return charts


def _follows_the_batch(drawn: DataFrame) -> bool:
    """Return True if steps of a model differ in their batch."""
    steps = drawn.dropna(subset=["tokens_per_s"])
    by_model = steps.groupby([*COMPARED, "whole_model"])["batch"]
    return any(len({*batches}) > 1 for _, batches in by_model)


def _leaves_the_slope(drawn: DataFrame) -> bool:
    """Return True if problems of a run differ in their FLOPs per byte: else, a roofline is a
    line.
    """
    by_run = drawn.dropna(subset=["flop_per_byte"]).groupby(list(COMPARED))["flop_per_byte"]
    return any(each.max() >= _LEAST_SPAN * each.min() for _, each in by_run)


def _has_values(chart: Chart, drawn: DataFrame) -> bool:
    """Return True if the rows have the chart's values, and the baseline one of its stack's sums."""
    of_baseline = where(drawn, drawn["kernel"] == drawn["baseline"])
    sums = [column for column, _ in chart.stack[:-1]]
    if chart.reading and not has_values(drawn, "window"):
        return False
    return has_values(drawn, chart.y) and (
        not sums or any(has_values(of_baseline, column) for column in sums)
    )


def note(chart: Chart, drawn: DataFrame) -> str:
    """Return the chart's note with the meaning of the marks that these rows have."""
    marks = [chart.note]
    if chart.low and has_values(drawn, chart.low):
        marks.append("median, bars: quartiles")
    if chart.floor and has_values(drawn, chart.floor):
        marks.append(f"dashed: the {chart.floor_name}")
    if chart.dotted and has_values(drawn, chart.dotted):
        marks.append(f"dotted, or a dash over bars: {chart.dotted_name} ({chart.dotted_note})")
    return "; ".join(marks)


def maps_of(frame: DataFrame, margin: Margin) -> list[HeatMap]:
    """Return the maps that the rows fill: at least two rows and two columns of cells.

    If at most one kernel beats the baseline anywhere, the map of speedups shows the fastest kernel.
    """
    timed = fastest_rows(frame)
    if (
        len(set(timed["max_context"])) < 2
        or len(timed.drop_duplicates(["batch", "q_heads", "kv_heads"])) < 2
    ):
        return []
    kernels = {*timed["kernel"]} - {BOUND}
    has_speedups = len(kernels) > 1 and bool(kernels & {*timed["baseline"]})
    winners = {*by_kernel(frame, "latency_us").dropna(how="all").idxmin(axis=1)}
    few_win = has_speedups and len(winners - {*timed["baseline"]}) < 2
    maps = []
    if len(kernels) > 1 and not few_win:
        note = (
            f"how many times as long the second takes; grey: level ({margin.level});"
            " blank: no two kernels timed"
        )
        maps.append(HeatMap("winner", "Fastest kernel", note))
    if has_speedups:
        baseline = baseline_in_words(frame)
        note = f"blue: {baseline} is faster, orange: slower"
        if baseline == THE_BASELINE:
            note += f"; the baseline is {_by_run(timed)}"
        maps.append(HeatMap("speedup", f"Speedup of {baseline}", note))
    return [*maps, FLOOR] if has_values(timed, "read_floor_share") else maps


def _by_run(timed: DataFrame) -> str:
    """Name the baselines, with the runs of those that are not the usual one."""
    runs: dict[str, list[str]] = {}
    for baseline, run in dict.fromkeys(zip(timed["baseline"], timed["run"], strict=True)):
        runs.setdefault(baseline, []).append(run)
    usual = baseline_of(timed)
    others = [f"{name} in {listed(of)}" for name, of in runs.items() if name != usual]
    return ", ".join([usual, *others])


def kernel_styles(
    names: Sequence[str], runs: Iterable[Collection[str]] = ()
) -> dict[str, tuple[str, str]]:
    """Choose colour and mark of each kernel.

    A kernel without a fixed style takes the colour that its name hashes to, or the next one that
    is free, or else is free in the kernel's runs. A colour that repeats has another mark.
    """
    taken: dict[str, int] = {name: FIXED[name] for name in names if name in FIXED}
    marks = {name: MARKS[index] for name, index in taken.items()}
    for name in sorted(set(names) - set(FIXED)):
        start = zlib.crc32(name.encode())
        candidates = [(start + step) % len(PALETTE) for step in range(len(PALETTE))]
        beside = {other for run in runs if name in run for other in run}
        near = {index for other, index in taken.items() if other in beside}
        free = [index for index in candidates if index not in taken.values()]
        apart = [index for index in candidates if index not in near]
        # The first entries belong to lean, fa2 and fixed_split even if those did not run.
        own = [index for index in free if index > 2] or [index for index in apart if index > 2]
        index = (own or free or apart or candidates)[0]
        repeats = list(taken.values()).count(index)
        taken[name], marks[name] = index, MARKS[(index + repeats) % len(MARKS)]
    return {name: (PALETTE[taken[name]], marks[name]) for name in names}
