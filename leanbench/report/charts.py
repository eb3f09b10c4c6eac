"""Which charts the page can hold: what each draws, and the words around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.report.frame import THE_BASELINE, baseline_in_words, has_values, where

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.report.series import VaryingAxis


@dataclass(frozen=True)
class Chart:
    """One chart. Columns are those of the frame."""

    key: str
    title: str
    #: What the marks mean, one line under the title.
    note: str
    y: str
    y_title: str
    #: `log`, `linear` (from zero) or `auto`: log when the values span more than a factor of 5.
    y_scale: str
    #: Error bars, from and to.
    low: str | None = None
    high: str | None = None
    #: Drawn dashed: the same for every kernel.
    floor: str | None = None
    floor_name: str = "read floor"
    #: Drawn dotted in each kernel's colour.
    dotted: str | None = None
    dotted_name: str = ""
    #: What a reader may take it for.
    dotted_note: str = ""
    #: A horizontal line.
    line_at: float | None = None
    #: Every problem of the run against `kv_bytes`, whatever is selected.
    all_problems: bool = False
    #: Columns that add up to `y`, from the lowest sum to `y` itself, each with the name of what it
    #: adds: filled below the line of the baseline, which is the only one.
    stack: tuple[tuple[str, str], ...] = ()


CHARTS = (
    Chart(
        key="token_time",
        title="Where the time of a token goes",
        note="a step of a whole model with the baseline: the matrix products of a step without"
        " attention, all else in it, and what attention adds",
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
        key="tokens",
        title="Tokens per second",
        note="of all sequences of the batch together",
        y="tokens_per_s",
        y_title="tokens per second",
        y_scale="auto",
    ),
    Chart(
        key="attention_share",
        title="Share of attention",
        note="of a step's time: what it takes less the same step without attention",
        y="attention_share",
        y_title="share of attention (%)",
        y_scale="linear",
        line_at=1.0,
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
        note="time of one launch",
        y="latency_us",
        y_title="latency (µs)",
        y_scale="log",
        low="latency_p25_us",
        high="latency_p75_us",
        floor="read_floor_us",
    ),
    Chart(
        key="bandwidth",
        title="Bandwidth",
        note="bytes of K and V over latency",
        y="bandwidth_tb_s",
        y_title="bandwidth (TB/s)",
        y_scale="linear",
        floor="read_floor_tb_s",
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
        all_problems=True,
    ),
    Chart(
        key="speedup_all",
        title="Speedup of the baseline, all problems",
        note="one mark a problem and kernel; above 1, the baseline is faster",
        y="speedup",
        y_title="speedup of the baseline (×)",
        y_scale="auto",
        line_at=1.0,
        all_problems=True,
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


def drawn_rows(frame: DataFrame) -> DataFrame:
    """The rows that charts show: `noisy` ones are drawn hollow."""
    return where(frame, frame["status"].isin(TIMED) & frame["latency_us"].notna())


def charts_of(drawn: DataFrame, axes: Sequence[VaryingAxis]) -> list[Chart]:
    """The charts that these rows have values for.

    With one series, the speedups of all problems are those that the speedup chart shows already.
    """
    several_series = len(axes) > any(axis.is_x for axis in axes)
    candidates = [chart for chart in CHARTS if several_series or chart.key != "speedup_all"]
    return [_named(chart, drawn) for chart in candidates if _is_filled(chart, drawn)]


def _is_filled(chart: Chart, drawn: DataFrame) -> bool:
    """Return True if the rows have its values, and the baseline's one of its stack's sums."""
    sums = [column for column, _ in chart.stack[:-1]]
    own = where(drawn, drawn["kernel"] == drawn["baseline"])
    return has_values(drawn, chart.y) and (
        not sums or any(has_values(own, column) for column in sums)
    )


def _named(chart: Chart, drawn: DataFrame) -> Chart:
    baseline = baseline_in_words(drawn)
    words = {name: getattr(chart, name) for name in ("title", "note", "y_title")}
    named = {name: text.replace(THE_BASELINE, baseline) for name, text in words.items()}
    return replace(chart, **named)


def note(chart: Chart, drawn: DataFrame) -> str:
    """The chart's note, with what its marks mean where these rows have them."""
    marks = [chart.note]
    if chart.low and has_values(drawn, chart.low):
        marks.append("median, bars: quartiles")
    if chart.floor and has_values(drawn, chart.floor):
        marks.append(f"dashed: the {chart.floor_name}")
    if chart.dotted and has_values(drawn, chart.dotted):
        marks.append(f"dotted, or a dash over bars: {chart.dotted_name} ({chart.dotted_note})")
    return "; ".join(marks)
