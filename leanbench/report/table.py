"""The page's table of every row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from leanbench.report.columns import DATA, HIDDEN_WHEN_CONSTANT, LEFT_OUT, ON_PAPER, SHOWN, Column
from leanbench.report.frame import has_values
from leanbench.report.series import Axis

if TYPE_CHECKING:
    from pandas import DataFrame


def page_columns(frame: DataFrame, axes: list[Axis]) -> list[dict[str, Any]]:
    """The columns that the page holds: the fields of `Column`, and whether the table shows it, on
    paper too.

    Columns without any value are left out; one that `Row` gains later is shown last under its own
    name. A column of texts that repeat has them once, in `texts`, and rows hold their places there.
    """
    varying = {axis.name for axis in axes}
    known = [column.name for column in SHOWN]
    more = [name for name in frame.columns if name not in {*known, *DATA, *LEFT_OUT}]
    columns = []
    for column in (*SHOWN, *(Column(name, name, kind=_kind(frame, name)) for name in more)):
        hidden = column.name in HIDDEN_WHEN_CONSTANT and len(set(frame[column.name].tolist())) < 2
        columns.append({**asdict(column), "shown": not hidden, "on_paper": column.name in ON_PAPER})
    for name in dict.fromkeys([*DATA, *varying]):
        if name not in known and name not in more:
            columns.append({**asdict(Column(name, name)), "shown": False})
    held = [column for column in columns if has_values(frame, column["name"])]
    return [
        {**column, "texts": _texts(map(_json_value, frame[column["name"]].tolist()))}
        for column in held
    ]


def page_rows(frame: DataFrame, columns: list[dict[str, Any]]) -> list[list[Any]]:
    """The values of `columns`, as JSON types or places in their `texts`; null for not measured."""
    lists = []
    for column in columns:
        values = [_json_value(value) for value in frame[column["name"]].tolist()]
        places = {text: place for place, text in enumerate(column["texts"] or ())}
        lists.append([places.get(value) for value in values] if places else values)
    return [list(row) for row in zip(*lists, strict=True)]


def _texts(values: Iterable[Any]) -> list[str] | None:
    """The different texts of a column, where there are at most half as many as texts; null for
    other columns.
    """
    known = [value for value in values if value is not None]
    texts = list(dict.fromkeys(known))
    return (
        texts
        if all(isinstance(text, str) for text in texts) and 2 * len(texts) <= len(known)
        else None
    )


def _kind(frame: DataFrame, name: str) -> str:
    from pandas.api.types import is_numeric_dtype

    return "figures" if is_numeric_dtype(frame[name]) else "text"


def _json_value(value: Any) -> Any:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    # The CSV has every digit; seven are more than any measurement has.
    return float(f"{value:.7g}") if isinstance(value, float) else value
