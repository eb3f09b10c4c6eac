"""The page's table of every row, and the rows that did not end `ok`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.report.frame import has_values, where
from leanbench.report.series import Axis

if TYPE_CHECKING:
    from pandas import DataFrame

#: Column, heading, unit, and how the page writes it (`formats` in report_table.js).
SHOWN = (
    ("max_context", "context", "tokens", "tokens"),
    ("batch", "batch", "", "int"),
    ("q_heads", "query heads", "", "int"),
    ("kv_heads", "KV heads", "", "int"),
    ("head_dim", "head_dim", "", "int"),
    ("q_len", "q_len", "", "int"),
    ("ragged", "batch lengths", "", "text"),
    ("dtype", "dtype", "", "text"),
    ("kv_layout", "layout", "", "text"),
    ("gpu", "GPU", "", "text"),
    ("source", "source", "", "text"),
    ("kernel", "kernel", "", "text"),
    ("status", "status", "", "text"),
    ("latency_us", "latency", "µs", "figures"),
    ("latency_p25_us", "p25", "µs", "figures"),
    ("latency_p75_us", "p75", "µs", "figures"),
    ("bandwidth_tb_s", "bandwidth", "TB/s", "fixed"),
    ("read_floor_us", "read floor", "µs", "figures"),
    ("read_floor_share", "of the floor", "%", "percent"),
    ("lean_speedup", "speedup of lean", "×", "fixed"),
    ("kv_bytes", "K and V", "MB", "mega"),
    ("quantisation_efficiency", "schedule efficiency", "%", "percent"),
    ("relative_error", "relative error", "", "exponent"),
    ("sm_clock_mhz", "SM clock", "MHz", "int"),
    ("power_w", "power", "W", "figures"),
    ("temperature_c", "temperature", "°C", "int"),
    ("throttle_reasons", "throttled by", "", "text"),
    ("config", "config", "", "text"),
    ("config_choice", "config choice", "", "text"),
)
#: Stated in the page's header when the same in every row.
HIDDEN_WHEN_CONSTANT = {
    *("batch", "q_heads", "kv_heads", "head_dim", "q_len", "ragged", "dtype", "kv_layout", "gpu", "source")
}
#: For the charts only.
DATA = ("problem", "group_size", "latency_ci_low_us", "latency_ci_high_us", "read_floor_tb_s")
#: In the CSV, and of no use here.
LEFT_OUT = {"cell", "decomposition", "reason", "context", "mean_context", "is_ragged", "samples", "launches_per_sample",
            "lse_error", "checked_heads", "total_heads", "wall_s", "time", "environment"}  # fmt: skip
#: Problems named in full for one group of flagged rows.
NAMED = 20


@dataclass(frozen=True)
class FlaggedGroup:
    """Rows of one kernel that ended the same way for the same reason."""

    kernel: str
    status: str
    reason: str
    #: Labels of the first `NAMED` problems.
    problems: tuple[str, ...]
    count: int


def page_columns(frame: DataFrame, axes: list[Axis]) -> list[dict[str, Any]]:
    """The columns that the page holds: name, heading, unit, kind, and whether the table shows it.

    Columns without any value are not shown; one that `Row` gains later is shown last under its own name.
    """
    varying = {axis.name for axis in axes}
    known = [column[0] for column in SHOWN]
    more = [name for name in frame.columns if name not in {*known, *DATA, *LEFT_OUT}]
    columns = []
    for name, heading, unit, kind in (*SHOWN, *((name, name, "", _kind(frame, name)) for name in more)):
        hidden = name in HIDDEN_WHEN_CONSTANT and len(set(frame[name].tolist())) < 2
        shown = has_values(frame, name) and not hidden
        columns.append({"name": name, "heading": heading, "unit": unit, "kind": kind, "shown": shown})
    for name in dict.fromkeys([*DATA, *varying]):
        if name not in known and name not in more:
            columns.append({"name": name, "heading": name, "unit": "", "kind": "text", "shown": False})
    return columns


def page_rows(frame: DataFrame, columns: list[dict[str, Any]]) -> list[list[Any]]:
    """The values of `columns`, as JSON types; null for not measured."""
    lists = [[_json_value(value) for value in frame[column["name"]].tolist()] for column in columns]
    return [list(row) for row in zip(*lists, strict=True)]


def flagged_groups(frame: DataFrame) -> list[FlaggedGroup]:
    """Every row whose status is not `ok`, gathered by kernel, status and reason, in the run's order."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    flagged = where(frame, frame["status"] != "ok")
    for kernel, status, reason, problem in zip(
        *(flagged[name].tolist() for name in ("kernel", "status", "reason", "problem")), strict=True
    ):
        key = (kernel, status, reason if isinstance(reason, str) else "no reason given")
        groups.setdefault(key, []).append(problem)
    return [FlaggedGroup(*key, tuple(labels[:NAMED]), len(labels)) for key, labels in groups.items()]


def _kind(frame: DataFrame, name: str) -> str:
    from pandas.api.types import is_numeric_dtype

    return "figures" if is_numeric_dtype(frame[name]) else "text"


def _json_value(value: Any) -> Any:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value
