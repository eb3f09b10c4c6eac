"""The page's table of every row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import KINDS
from leanbench.core.quantities import Quantity
from leanbench.report.columns import COLUMNS, HIDDEN_WHEN_CONSTANT
from leanbench.report.frame import THE_BASELINE, baseline_in_words, has_values
from leanbench.report.series import VaryingAxis

if TYPE_CHECKING:
    from pandas import DataFrame

#: Columns that charts and maps read, whether or not a table shows them.
DATA = ("problem", "group_size", "read_floor_tb_s", "baseline")


def page_columns(frame: DataFrame, axes: list[VaryingAxis]) -> list[dict[str, Any]]:
    """The columns that the page holds, with all that its scripts need to know of each.

    Columns without any value are left out. A column of texts that repeat has them once, in `texts`,
    and rows hold their places there.
    """
    shown = [column for column in COLUMNS if column.is_in("page")]
    # Of most rows, the kinds of attention say none: a reader looks for kernel and figures first.
    shown.sort(key=lambda column: column.name in KINDS)
    columns = [_described(column, frame) for column in shown]
    known = {column["name"] for column in columns}
    for name in dict.fromkeys([*DATA, *(axis.name for axis in axes)]):
        if name not in known:
            columns.append({"name": name, "shown": False})
    held = [column for column in columns if has_values(frame, column["name"])]
    return [
        {**column, "texts": _texts(map(_json_value, frame[column["name"]].tolist()))}
        for column in held
    ]


def _described(column: Quantity, frame: DataFrame) -> dict[str, Any]:
    name = column.name
    baseline = baseline_in_words(frame)
    return {
        "name": name,
        "heading": column.heading.replace(THE_BASELINE, baseline),
        "unit": column.unit_text,
        "kind": column.kind,
        "is_number": column.is_number,
        "meaning": column.meaning.replace(THE_BASELINE, baseline),
        "notes": column.notes,
        "shown": name not in HIDDEN_WHEN_CONSTANT or len(set(frame[name].tolist())) > 1,
        "on_paper": column.is_in("paper"),
    }


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


def _json_value(value: Any) -> Any:
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    # The CSV has every digit; seven are more than any measurement has.
    return float(f"{value:.7g}") if isinstance(value, float) else value
