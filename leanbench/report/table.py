"""The page's table of every row."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from leanbench.report.columns import DATA, HIDDEN_WHEN_CONSTANT, LEFT_OUT, ON_PAPER, SHOWN, Column
from leanbench.report.frame import has_values
from leanbench.report.series import Axis

if TYPE_CHECKING:
    from pandas import DataFrame


def page_columns(frame: DataFrame, axes: list[Axis]) -> list[dict[str, Any]]:
    """The columns that the page holds: the fields of `Column`, and whether the table shows it, on paper too.

    Columns without any value are not shown; one that `Row` gains later is shown last under its own name.
    """
    varying = {axis.name for axis in axes}
    known = [column.name for column in SHOWN]
    more = [name for name in frame.columns if name not in {*known, *DATA, *LEFT_OUT}]
    columns = []
    for column in (*SHOWN, *(Column(name, name, kind=_kind(frame, name)) for name in more)):
        hidden = column.name in HIDDEN_WHEN_CONSTANT and len(set(frame[column.name].tolist())) < 2
        shown = has_values(frame, column.name) and not hidden
        columns.append({**asdict(column), "shown": shown, "on_paper": column.name in ON_PAPER})
    for name in dict.fromkeys([*DATA, *varying]):
        if name not in known and name not in more:
            columns.append({**asdict(Column(name, name)), "shown": False})
    return columns


def page_rows(frame: DataFrame, columns: list[dict[str, Any]]) -> list[list[Any]]:
    """The values of `columns`, as JSON types; null for not measured."""
    lists = [[_json_value(value) for value in frame[column["name"]].tolist()] for column in columns]
    return [list(row) for row in zip(*lists, strict=True)]


def _kind(frame: DataFrame, name: str) -> str:
    from pandas.api.types import is_numeric_dtype

    return "figures" if is_numeric_dtype(frame[name]) else "text"


def _json_value(value: Any) -> Any:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value
