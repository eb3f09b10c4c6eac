"""Rows as a flat table.

Only timed rows (`ok` or `noisy`) enter a statistic, with or without warnings: without a noisy
rival, the slowest might pass for the fastest other kernel. A statistic never spans two runs, two
sources (`measured`, `predicted`), two GPUs or two states of the L2 (`cold`, `warm`). The bound of
whole models is not compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from leanbench.core.axes import KINDS
from leanbench.core.problem import PROBLEM_AXES, AttentionProblem
from leanbench.core.quantities import TIMED, Quantity
from leanbench.core.work import flops
from leanbench.decode import BOUND
from leanbench.records.standing import Latency
from leanbench.report.command import sweep_command

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Default baseline: the kernel that others are compared with.
BASELINE = "lean"
#: Placeholder in headings and titles.
THE_BASELINE = "the baseline"
#: Text that spreadsheets run as a formula, and such text after `csv_cell` quoted it.
_FORMULA = re.compile(r"['\s]*[=+\-@＝＋－＠]|'*[\t\n]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
#: Columns that identify a problem: its fields. A column is text if not every value is a number:
#: `context` has a number per sequence of a ragged batch, `page_size` is a number or none.
PROBLEM_COLUMNS = tuple(axis.name for axis in PROBLEM_AXES)
DERIVED_COLUMNS = (
    *("problem", "group_size", "max_context", "mean_context", "is_ragged"),
    *("flops", "flop_per_byte", "model_gpus"),
)
#: Those of `DERIVED_COLUMNS` that are floating-point numbers.
_FLOATS = ("mean_context", "flops", "flop_per_byte")
#: No statistic spans two values of these.
COMPARED = ("run", "source", "gpu", "cache")
#: Rows compare only within the same of these.
COMPARABLE = (*COMPARED, *PROBLEM_COLUMNS)


@dataclass(frozen=True)
class Derived:
    """A column computed from others."""

    #: Name of the preceding column.
    after: str
    values: Callable[[DataFrame], Series]
    quantity: Quantity


def results_frame(*runs: Run, baseline: str | None = None) -> DataFrame:
    """Build a table with one line per row, in the runs' order.

    Columns: the problem's fields and `DERIVED_COLUMNS`; the quantities of `Row` (`config` and lists
    as text) with those of `DERIVED`; `gpu`, `run` (name), `command` (repeats the row), `baseline`
    (the kernel that speedup and ratios refer to). A value that was not measured is null, never 0.

    Args:
        baseline: None for the default of each part, see `baselines`.
    """
    import pandas as pd

    from leanbench.records.row import QUANTITIES

    columns = [
        *DERIVED_COLUMNS[:1],
        *PROBLEM_COLUMNS,
        *DERIVED_COLUMNS[1:],
        *(quantity.name for quantity in QUANTITIES),
        "gpu",
        "run",
        "command",
    ]
    records = [_record(run, *result) for run in runs for result in run.results]
    frame = pd.DataFrame(records, columns=columns)
    for name in columns:
        if kind := _numeric_type(name):
            frame[name] = frame[name].astype(kind)
    frame["baseline"] = baselines(frame, baseline)
    for derived in DERIVED:
        index = list(frame.columns).index(derived.after) + 1
        frame.insert(index, derived.quantity.name, derived.values(frame))
    return frame


def csv_text(frame: DataFrame) -> str:
    """Return a frame as CSV: every row, every column, full precision. Not measured is empty."""
    cells = frame.copy()
    for name in cells.select_dtypes(exclude=["number", "bool"]):
        cells[name] = cells[name].map(csv_cell)
    return cells.to_csv(index=False, lineterminator="\n")


def csv_cell(value: Any) -> Any:
    """Return text that a spreadsheet would run as a formula with a quote in front.

    To read it back, drop the first quote of a cell that begins with quotes or spaces and one of
    these.
    """
    if not isinstance(value, str):
        return value
    # Writers quote a line feed, but not every carriage return.
    value = value.replace("\r\n", "\n").replace("\r", "\n")
    is_formula = _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def problem_values(problem: AttentionProblem) -> dict[str, Any]:
    """Return the values of `PROBLEM_COLUMNS`."""
    values = {axis.name: getattr(problem, axis.name) for axis in PROBLEM_AXES}
    texts = {
        axis.name: axis.write(values[axis.name]) for axis in PROBLEM_AXES if not axis.is_number
    }
    lengths = problem.contexts if problem.is_ragged else (problem.max_context,)
    return {**values, **texts, "context": " ".join(map(str, lengths))}


def kinds_of(frame: DataFrame) -> Series:
    """Name each row's attention variant: ``window, sinks``, ``e4m3 KV cache``, or ``plain``."""
    import pandas as pd

    kinds = pd.Series("", index=frame.index, dtype="object")
    for axis in PROBLEM_AXES:
        if axis.name not in (*KINDS, "q_len"):
            continue
        texts = frame[axis.name].map(axis.write if axis.is_number else str)
        describe = axis.describe if axis.values.is_word else lambda text, title=axis.title: title
        words = texts.map(describe)
        departs = texts != axis.write(axis.default)
        kinds += words.where(departs, "").map(lambda word: f", {word}" if word else "")
    return kinds.str.removeprefix(", ").replace("", "plain")


def where(frame: DataFrame, mask: Any) -> DataFrame:
    """Select the rows where `mask` is true."""
    return cast("DataFrame", frame[mask])


def has_values(frame: DataFrame, column: str) -> bool:
    """Return True if any row has a value in `column`."""
    return bool(frame[column].notna().to_numpy().any())


def kernel_order(frame: DataFrame) -> list[str]:
    """List kernels for legends and tables: the baseline first, then as they first ran."""
    names = list(dict.fromkeys(frame["kernel"]))
    return sorted(names, key=lambda name: name != baseline_of(frame))


def baselines(frame: DataFrame, chosen: str | None = None) -> Series:
    """Return each row's baseline, the same for all rows that a statistic may span.

    The chosen one, else `BASELINE`, or the first kernel that was timed if that did not run.
    """
    import pandas as pd

    parts = list(frame[list(COMPARED)].itertuples(index=False, name=None))
    of_part = {
        part: chosen or _default_baseline(where(frame, [other == part for other in parts]))
        for part in dict.fromkeys(parts)
    }
    return pd.Series([of_part[part] for part in parts], index=frame.index, dtype="object")


def _default_baseline(rows: DataFrame) -> str:
    timed = where(rows, rows["status"].isin(TIMED) & (rows["kernel"] != BOUND))["kernel"]
    ran = {*where(rows, rows["status"] != "unsupported")["kernel"]}
    return BASELINE if BASELINE in ran or timed.empty else str(timed.iloc[0])


def baseline_of(frame: DataFrame) -> str:
    """Return the rows' baseline; if they have several, `BASELINE` or the first of them."""
    names = dict.fromkeys(frame["baseline"])
    return BASELINE if BASELINE in names or not names else str(next(iter(names)))


def baseline_in_words(frame: DataFrame) -> str:
    """Return the rows' baseline for headings; `THE_BASELINE` if they have several."""
    return THE_BASELINE if len({*frame["baseline"]}) > 1 else baseline_of(frame)


def fastest_rows(frame: DataFrame) -> DataFrame:
    """Select the fastest timed row of each kernel on each problem, as `reading.fastest`."""
    timed = where(frame, frame["status"].isin(TIMED) & frame["latency_us"].notna())
    fastest_first = timed.sort_values(by=["latency_us"], kind="stable")
    return fastest_first.drop_duplicates([*COMPARABLE, "kernel"]).sort_index()


def latencies_of(frame: DataFrame) -> dict[str, dict[str, Latency]]:
    """Return the latencies of the fastest rows, by the problem's label and then by kernel."""
    latencies: dict[str, dict[str, Latency]] = {}
    rows = fastest_rows(where(frame, (frame["kernel"] != BOUND) & (frame["latency_us"] > 0)))
    columns = ["problem", "kernel", "latency_us", "latency_ci_low_us", "latency_ci_high_us"]
    order = kernel_order(frame)
    found = rows[columns].itertuples(index=False, name=None)
    for label, name, us, low, high in sorted(found, key=lambda each: order.index(each[1])):
        ends = [us if math.isnan(end) else end for end in (low, high)]
        latencies.setdefault(label, {})[name] = Latency(us, *ends)
    return latencies


def floors_of(frame: DataFrame) -> dict[str, dict[str, tuple[float, float]]]:
    """Return latency, and latency above the read floor, by the problem's label and by kernel."""
    rows = where(frame, frame["over_floor_us"].notna() & (frame["kernel"] != BOUND))
    floors: dict[str, dict[str, tuple[float, float]]] = {}
    columns = ["problem", "kernel", "latency_us", "over_floor_us"]
    for label, name, us, above_us in fastest_rows(rows)[columns].itertuples(index=False, name=None):
        floors.setdefault(label, {})[name] = us, above_us
    return floors


def ratios_to_baseline(frame: DataFrame, column: str) -> DataFrame:
    """Divide each kernel's values by the baseline's, in rows that have one baseline.

    Args:
        column: such as `energy_mj`.

    Returns:
        One line per problem that the baseline ran and one column per other kernel, as `by_kernel`.
    """
    values = by_kernel(frame, column)
    baseline = baseline_of(frame)
    if baseline not in values:
        return values.iloc[:0]
    ran = where(values, values[baseline].notna())
    return ran.drop(columns=baseline).div(ran[baseline], axis=0)


def by_kernel(frame: DataFrame, column: str) -> DataFrame:
    """Pivot the fastest rows: one line per problem, one column per kernel.

    A value is null if the kernel has no timed row with a value. The index is `COMPARABLE` plus
    `problem`, the label.
    """
    index = [*COMPARABLE, "problem"]
    values = fastest_rows(frame).pivot(index=index, columns="kernel", values=column)
    values = values.reindex(columns=[name for name in kernel_order(frame) if name != BOUND])
    return values.where(values > 0)


def _over_baseline(frame: DataFrame, column: str) -> Series:
    """Divide each row's value by that of the baseline's fastest row of its problem."""
    import pandas as pd

    of_baseline = fastest_rows(where(frame, frame["kernel"] == frame["baseline"]))
    of_baseline = where(of_baseline, of_baseline[column] > 0)
    keys = list(COMPARABLE)
    problems = of_baseline[keys].itertuples(index=False, name=None)
    values = dict(zip(problems, of_baseline[column], strict=True))
    compared = frame["status"].isin(TIMED) & (frame["kernel"] != frame["baseline"])
    compared &= (frame["kernel"] != BOUND) & (frame["baseline"] != BOUND)
    ratios = [
        value / values[key] if compare and key in values else None
        for key, value, compare in zip(
            frame[keys].itertuples(index=False, name=None), frame[column], compared, strict=True
        )
    ]
    return pd.Series(ratios, index=frame.index, dtype="float64")


def _ratio(frame: DataFrame, column: str, over: str) -> Series:
    return cast("Series", frame[column] / frame[over]).astype("float64")


#: In the order of tables.
DERIVED = (
    Derived(
        "bandwidth_tb_s",
        lambda frame: _ratio(frame, "flops", "latency_us") * 1e-6,
        Quantity(
            "tflop_s",
            "arithmetic",
            "latency",
            "figure",
            "floating-point operations of both matrix products over latency; none of masked tokens",
            "TFLOP/s",
        ),
    ),
    Derived(
        "read_floor_share",
        lambda frame: _over_baseline(frame, "latency_us"),
        Quantity(
            "speedup",
            "speedup of the baseline",
            "latency",
            "fixed",
            "this row's latency over that of the baseline",
            "x",
            shown="paper",
        ),
    ),
    Derived(
        "speedup",
        lambda frame: cast("Series", frame["latency_us"] - frame["read_floor_us"]),
        Quantity(
            "over_floor_us",
            "above the floor",
            "latency",
            "figure",
            "latency less the read floor: what the kernel adds to only reading K and V",
            "us",
        ),
    ),
    Derived(
        "tokens_per_s",
        lambda frame: _ratio(frame, "tokens_per_s", "batch"),
        Quantity(
            "tokens_per_s_user",
            "tokens for a user",
            "whole model",
            "figure",
            "of one sequence: one over the time of a step",
            "per_s",
        ),
    ),
    Derived(
        "tokens_per_s_user",
        lambda frame: _ratio(frame, "tokens_per_s", "model_gpus"),
        Quantity(
            "tokens_per_s_gpu",
            "tokens of a GPU",
            "whole model",
            "figure",
            "of all sequences together, over the GPUs that share the model",
            "per_s",
        ),
    ),
    Derived(
        "energy_floor_mj",
        lambda frame: _ratio(frame, "energy_mj", "energy_floor_mj"),
        Quantity(
            "energy_over_floor",
            "over the floor",
            "energy",
            "fixed",
            "energy over the energy floor",
            "x",
        ),
    ),
    Derived(
        "energy_over_floor",
        lambda frame: _over_baseline(frame, "energy_mj"),
        Quantity(
            "energy_ratio",
            "energy over the baseline",
            "energy",
            "fixed",
            "this row's energy over that of the baseline",
            "x",
        ),
    ),
    Derived(
        "sustained_us",
        lambda frame: _ratio(frame, "sustained_us", "latency_us") - 1,
        Quantity(
            "sustained_slowdown",
            "sustained over burst",
            "sustained",
            "change",
            "sustained over burst latency, less 1",
        ),
    ),
    Derived(
        "crosscheck_us",
        lambda frame: _ratio(frame, "crosscheck_us", "latency_us") - 1,
        Quantity(
            "crosscheck_difference",
            "cross-check off by",
            "samples",
            "change",
            "cross-check over latency, less 1",
        ),
    ),
)


def _record(run: Run, row: Row, problem: AttentionProblem) -> dict[str, Any]:
    work = flops(problem)
    return {
        "problem": problem.label,
        **problem_values(problem),
        "group_size": problem.group_size,
        "max_context": problem.max_context,
        "mean_context": problem.total_context / problem.batch,
        "is_ragged": problem.is_ragged,
        "flops": work,
        "flop_per_byte": None if work is None else work / problem.io_bytes,
        "model_gpus": None if problem.model is None else problem.model.tp,
        **{name: _flat(value) for name, value in row if name != "problem"},
        "gpu": run.gpu_name(row.environment),
        "run": run.name,
        "command": sweep_command(row, problem, run),
    }


def _flat(value: Any) -> Any:
    """Convert containers to text: ``tile_tokens=128 num_warps=4``; lists of sentences use "; "."""
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if not isinstance(value, list):
        return value
    texts = [str(item) for item in value]
    return ("; " if any(" " in text for text in texts) else " ").join(texts) or None


def _numeric_type(column: str) -> str | None:
    """Return a column's dtype, None for text. Nullable integers keep 132 from becoming 132.0."""
    from typing import get_args

    from leanbench.records.row import Row

    if column in ("group_size", "max_context", "model_gpus"):
        return "Int64"
    if column in _FLOATS:
        return "float64"
    for axis in PROBLEM_AXES:
        if axis.name == column and axis.is_number and column != "context":
            return {int: "Int64", float: "float64"}[axis.values.json_type]
    field = Row.model_fields.get(column)
    kinds = {field.annotation, *get_args(field.annotation)} if field else set()
    return "float64" if float in kinds else "Int64" if int in kinds else None
