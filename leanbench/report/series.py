"""Series of problems: axes that vary in a run, and short descriptions of problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import KINDS, LENGTHS
from leanbench.core.axis import Axis
from leanbench.core.problem import PLAIN_AXES, PROBLEM_AXES
from leanbench.core.syntax import short_count
from leanbench.report.frame import COMPARED, PROBLEM_COLUMNS, where

if TYPE_CHECKING:
    from pandas import DataFrame

#: Names for people.
LABELS = {
    **{axis.name: axis.label or axis.name for axis in PROBLEM_AXES},
    "max_context": "context (tokens)",
    "group_size": "query heads per KV head",
    LENGTHS.name: LENGTHS.label,
    "gpu": "GPU",
    "source": "source",
    "cache": "L2",
    "run": "run",
}
#: Value of the axis `lengths`: all sequences of the batch have the same context.
EQUAL = "equal"
#: Maximum number of an axis's values, and of axes with values, that one line names.
FEW_VALUES, FEW_KINDS = 4, 4
#: Candidates for the x axis. The first that varies is the default.
X_AXES = ("max_context", "q_heads", "batch", *(axis.name for axis in PLAIN_AXES if axis.is_number))


@dataclass(frozen=True)
class VaryingAxis:
    """An axis on which the problems of a run differ."""

    name: str
    label: str
    #: In ascending order (text: as first seen).
    values: tuple[Any, ...]
    #: May stand on the x axis.
    is_x: bool


def add_series_columns(frame: DataFrame) -> DataFrame:
    """Add the column `lengths` in words, so that batches of one shape form one series."""
    shares = (100 * frame["mean_context"] / frame["max_context"].astype("float64")).round()
    words = [
        f"ragged, mean {share:.0f}% of longest" if is_ragged else EQUAL
        for share, is_ragged in zip(shares, frame["is_ragged"], strict=True)
    ]
    return frame.assign(lengths=words)


def varying_axes(frame: DataFrame) -> list[VaryingAxis]:
    """Return the axes with more than one value, x axes first.

    `max_context` with `lengths` replaces `context`, `q_heads` with `group_size` replaces
    `kv_heads`.
    """
    # A field that AttentionProblem gains later becomes an axis by itself.
    names = dict.fromkeys([*X_AXES, "group_size", "lengths", *PROBLEM_COLUMNS, *COMPARED])
    axes = []
    for name in names:
        if name in ("context", "kv_heads"):
            continue
        # Lengths that differ are on the device anyway.
        rows = where(frame, frame["is_ragged"].eq(False)) if name == "lengths_on" else frame
        values = list(dict.fromkeys(rows[name].tolist()))
        if len(values) > 1:
            ordered = values if any(isinstance(value, str) for value in values) else sorted(values)
            axes.append(VaryingAxis(name, LABELS.get(name, name), tuple(ordered), name in X_AXES))
    return axes


def short_labels(frame: DataFrame, axes: list[VaryingAxis]) -> dict[str, str]:
    """Shorten each label of the column `problem` to its varying axes: ``context 64k, heads 32/8``.

    Attention variants are named only where they differ from the default.
    """
    varying = {axis.name for axis in axes}
    short = {}
    for row in frame.drop_duplicates("problem").to_dict("records"):
        words = []
        if "max_context" in varying:
            words.append(f"context {short_count(row['max_context'])}")
        if varying & {"q_heads", "group_size"}:
            words.append(f"heads {heads(row['q_heads'], row['kv_heads'])}")
        words += [f"batch {row['batch']}"] if "batch" in varying else []
        # As on the x axis: numbers first.
        plain = [
            axis
            for axis in PLAIN_AXES
            if axis.name in varying
            and (axis.name not in KINDS or str(row[axis.name]) != axis.write(axis.default))
        ]
        words += [axis.describe(str(row[axis.name])) for axis in plain if axis.is_number]
        words += [row["lengths"]] if "lengths" in varying and row["lengths"] != EQUAL else []
        words += [axis.describe(row[axis.name]) for axis in plain if not axis.is_number]
        short[row["problem"]] = ", ".join(words) or row["problem"]
    return short


def heads(q_heads: int, kv_heads: int) -> str:
    """Format heads: ``56``, or ``32/8`` if query heads share KV heads."""
    return f"{q_heads}" if q_heads == kv_heads else f"{q_heads}/{kv_heads}"


def listed(names: Sequence[str]) -> str:
    """Join names: ``a``, ``a and b``, ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def fixed_words(frame: DataFrame) -> str:
    """Describe the values and ranges of all problems in one line."""
    if frame.empty:
        return ""
    shown = [axis for axis in PLAIN_AXES if not _is_implied(axis, frame)]
    varying = [axis for axis in shown if not axis.is_number and len({*frame[axis.name]}) > 1]
    # Many variants are named without their values.
    unnamed = varying if len(varying) > FEW_KINDS else []
    words = [
        _range("batch", frame["batch"]),
        _heads(frame),
        _range("context", frame["max_context"], short_count),
        *(_fixed(axis, frame) for axis in shown if axis not in unnamed),
    ]
    if unnamed:
        words.append(f"various {', '.join(axis.label or axis.title for axis in unnamed)}")
    lengths = set(frame["is_ragged"].tolist())
    if True in lengths:
        words.append("equal and ragged batches" if False in lengths else "ragged batches")
    if "warm" in (caches := set(frame["cache"])):
        words.append("cold and warm L2" if "cold" in caches else "warm L2")
    return " · ".join(words)


def _is_implied(axis: Axis, frame: DataFrame) -> bool:
    """Return True if every problem has the default and labels omit it."""
    is_named = axis.is_required or axis.always_in_label
    return not is_named and {*map(str, frame[axis.name])} == {axis.write(axis.default)}


def _fixed(axis: Axis, frame: DataFrame) -> str:
    """Describe an axis's values: ``head_dim 64 to 128``, ``fp16/bf16``, ``page size 16``."""
    if axis.is_number:
        return _range(axis.title, frame[axis.name])
    values = list(dict.fromkeys(frame[axis.name]))
    if len(values) > FEW_VALUES:
        return f"{axis.title} ({len(values)} choices)"
    texts = "/".join(values)
    return axis.describe(texts) if axis.values.is_word else f"{axis.title} {texts}"


def narrower_words(part: DataFrame, whole: DataFrame) -> str:
    """Describe the ranges of `part` that are narrower than in `whole`: ``context 1k to 4k``."""
    if part.empty:
        return ""
    both = ((_span(column, part), _span(column, whole)) for column in X_AXES)
    return ", ".join(words for words, of_whole in both if words != of_whole)


def _span(column: str, frame: DataFrame) -> str:
    if column == "q_heads":
        texts = _heads_of(frame)
        return f"heads {texts[0]}" if len(texts) == 1 else f"heads {texts[0]} to {texts[-1]}"
    name, text = ("context", short_count) if column == "max_context" else (column, str)
    return _range(name, frame[column], text)


def _range(name: str, column: Any, text: Any = str) -> str:
    low, high = column.min(), column.max()
    return f"{name} {text(low)}" if low == high else f"{name} {text(low)} to {text(high)}"


def _heads_of(frame: DataFrame) -> list[str]:
    """List each choice of heads once, from the fewest query heads on."""
    pairs = sorted(set(zip(frame["q_heads"].tolist(), frame["kv_heads"].tolist(), strict=True)))
    return [heads(*pair) for pair in pairs]


def _heads(frame: DataFrame) -> str:
    texts = _heads_of(frame)
    return (
        f"heads {', '.join(texts)}"
        if len(texts) <= FEW_VALUES
        else f"heads {texts[0]} to {texts[-1]} ({len(texts)} choices)"
    )
