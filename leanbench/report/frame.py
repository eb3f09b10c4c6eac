"""Rows as a flat table, and what is compared in it.

Only timed rows (`ok` or `noisy`) enter a statistic, with warnings or without, as in the documents:
without a noisy rival, the slowest of all might pass for the fastest other kernel. A statistic never
spans two runs, two sources (`measured`, `predicted`), two GPUs or two states of the L2 (`cold`,
`warm`). The bound of whole models is none of the kernels that are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from leanbench.core.axes import KINDS
from leanbench.core.problem import PROBLEM_AXES, AttentionProblem
from leanbench.core.quantities import TIMED, Quantity
from leanbench.decode import BOUND
from leanbench.report.command import sweep_command

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: The kernel that others are compared with, where it ran and no other is chosen.
BASELINE = "lean"
#: Its place in headings and titles.
THE_BASELINE = "the baseline"
#: What spreadsheets run, and what this module has put a quote in front of.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
#: Columns that together identify a problem: its fields. Numbers where every value is one and text
#: elsewhere: `context` has a number, or one per sequence; `page_size` a number, or none.
PROBLEM_COLUMNS = tuple(axis.name for axis in PROBLEM_AXES)
DERIVED_COLUMNS = ("problem", "group_size", "max_context", "mean_context", "is_ragged")
#: No statistic spans two values of these.
COMPARED = ("run", "source", "gpu", "cache")
#: Rows compare only within the same of these.
COMPARABLE = (*COMPARED, *PROBLEM_COLUMNS)


@dataclass(frozen=True)
class Derived:
    """A column that is computed from the rows' own."""

    quantity: Quantity
    #: The column in front of it.
    after: str
    values: Callable[[DataFrame], Series]


def results_frame(*runs: Run, baseline: str | None = None) -> DataFrame:
    """One row a result, in the runs' order, with flat columns.

    Columns: the problem's fields and `DERIVED_COLUMNS`; the quantities of `Row` (`config` and lists
    as text) with those of `DERIVED` among them; `gpu`, `run` (its name), `command` (what repeats
    the row), `baseline` (the kernel that its speedup and ratios are of). Not measured is null,
    never 0.

    Args:
        baseline: None for that of each part, see `baselines`.
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
        place = list(frame.columns).index(derived.after) + 1
        frame.insert(place, derived.quantity.name, derived.values(frame))
    return frame


def csv_text(frame: DataFrame) -> str:
    """Return a frame as CSV: every row, every column, full precision. Not measured is empty."""
    cells = frame.copy()
    for name in cells.select_dtypes(exclude=["number", "bool"]):
        cells[name] = cells[name].map(csv_cell)
    return cells.to_csv(index=False, lineterminator="\n")


def csv_cell(value: Any) -> Any:
    """Return text that a spreadsheet would run as a formula with a quote in front.

    To read it back, drop the first quote of a cell that begins with quotes and such a letter.
    """
    is_formula = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def gpu_name(manifest: dict[str, Any], environment: str | None = None) -> str:
    """The product a row was taken on or predicted for; "unknown GPU" where the manifest does not
    say.
    """
    environments = _mapping(manifest.get("environments"))
    gpu = _mapping(manifest.get("gpu"))
    of_row = _mapping(environments.get(environment or "")).get("gpu_product")
    # A prediction's environment is the machine that computed it; the GPU it is for stands in the
    # manifest.
    if manifest.get("source") == "predicted":
        of_row = None
    return str(of_row or gpu.get("product") or gpu.get("name") or "unknown GPU")


def problem_values(problem: AttentionProblem) -> dict[str, Any]:
    """The values of `PROBLEM_COLUMNS`."""
    values = {axis.name: getattr(problem, axis.name) for axis in PROBLEM_AXES}
    texts = {
        axis.name: axis.write(values[axis.name]) for axis in PROBLEM_AXES if not axis.is_number
    }
    lengths = problem.contexts if problem.is_ragged else (problem.max_context,)
    return {**values, **texts, "context": " ".join(map(str, lengths))}


def kinds_of(frame: DataFrame) -> Series:
    """What kind of attention each row's problem is: ``window, sinks``, ``e4m3 KV cache``, or
    ``plain``.
    """
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
    """The rows where `mask` is true."""
    return cast("DataFrame", frame[mask])


def has_values(frame: DataFrame, column: str) -> bool:
    """Whether any row has a value in `column`."""
    return bool(frame[column].notna().to_numpy().any())


def kernel_order(frame: DataFrame) -> list[str]:
    """Kernel names for legends and tables: the baseline first, then as they first ran."""
    names = list(dict.fromkeys(frame["kernel"]))
    return sorted(names, key=lambda name: name != baseline_of(frame))


def baselines(frame: DataFrame, chosen: str | None = None) -> Series:
    """Each row's baseline, the same for all rows that a statistic may span: the one that is chosen,
    or else `BASELINE`, or the first kernel that was timed where that did not run. Everything that
    names a baseline has it from here.
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
    """The kernel that others are compared with; of rows that have several, `BASELINE` or the first
    of them.
    """
    names = dict.fromkeys(frame["baseline"])
    return BASELINE if BASELINE in names or not names else str(next(iter(names)))


def baseline_in_words(frame: DataFrame) -> str:
    """The kernel that others are compared with, for headings; `THE_BASELINE` for several."""
    return THE_BASELINE if len({*frame["baseline"]}) > 1 else baseline_of(frame)


def fastest_rows(frame: DataFrame) -> DataFrame:
    """The fastest timed row of each kernel on each problem: a kernel that ran with several configs
    counts once.
    """
    timed = where(frame, frame["status"].isin(TIMED) & frame["latency_us"].notna())
    fastest_first = timed.sort_values(by=["latency_us"], kind="stable")
    return fastest_first.drop_duplicates([*COMPARABLE, "kernel"]).sort_index()


def ratios_to_baseline(frame: DataFrame, column: str) -> DataFrame:
    """Each other kernel's value over that of the baseline, in rows that have one baseline: one row
    a problem that it ran, one column a kernel.

    A value is null where the kernel has no timed row with a value. The index is `COMPARABLE` plus
    `problem`, the label for people.

    Args:
        column: `latency_us` for speedups, `energy_mj` for energy.
    """
    values = _by_kernel(frame, column)
    baseline = baseline_of(frame)
    if baseline not in values:
        return values.iloc[:0]
    ran = where(values, values[baseline].notna())
    return ran.drop(columns=baseline).div(ran[baseline], axis=0)


def latencies_by_kernel(frame: DataFrame) -> DataFrame:
    """Latency of the fastest timed row of each kernel: one row a problem, indexed as in
    `ratios_to_baseline`, one column a kernel.
    """
    return _by_kernel(frame, "latency_us")


def _by_kernel(frame: DataFrame, column: str) -> DataFrame:
    index = [*COMPARABLE, "problem"]
    values = fastest_rows(frame).pivot(index=index, columns="kernel", values=column)
    values = values.reindex(columns=[name for name in kernel_order(frame) if name != BOUND])
    return values.where(values > 0)


def speedups(frame: DataFrame) -> DataFrame:
    """Speedup of the baseline over each other kernel, see `ratios_to_baseline`."""
    return ratios_to_baseline(frame, "latency_us")


def _over_baseline(frame: DataFrame, column: str) -> Series:
    """Each row's `column` over that of the baseline's fastest row of its problem."""
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
    return cast("Series", frame[column] / frame[over])


#: In the order of tables.
DERIVED = (
    Derived(
        Quantity(
            "speedup",
            "speedup of the baseline",
            "latency",
            "fixed",
            "this row's latency over that of the baseline",
            "x",
            shown="paper",
        ),
        "read_floor_share",
        lambda frame: _over_baseline(frame, "latency_us"),
    ),
    Derived(
        Quantity(
            "energy_over_floor",
            "over the floor",
            "energy",
            "fixed",
            "energy over the energy floor",
            "x",
        ),
        "energy_floor_mj",
        lambda frame: _ratio(frame, "energy_mj", "energy_floor_mj"),
    ),
    Derived(
        Quantity(
            "energy_ratio",
            "energy over the baseline",
            "energy",
            "fixed",
            "this row's energy over that of the baseline",
            "x",
        ),
        "energy_over_floor",
        lambda frame: _over_baseline(frame, "energy_mj"),
    ),
    Derived(
        Quantity(
            "sustained_slowdown",
            "sustained over burst",
            "sustained",
            "change",
            "sustained over burst latency, less 1",
        ),
        "sustained_us",
        lambda frame: _ratio(frame, "sustained_us", "latency_us") - 1,
    ),
    Derived(
        Quantity(
            "crosscheck_difference",
            "cross-check off by",
            "samples",
            "change",
            "cross-check over latency, less 1",
        ),
        "crosscheck_us",
        lambda frame: _ratio(frame, "crosscheck_us", "latency_us") - 1,
    ),
)


def _record(run: Run, row: Row, problem: AttentionProblem) -> dict[str, Any]:
    return {
        "problem": problem.label,
        **problem_values(problem),
        "group_size": problem.group_size,
        "max_context": problem.max_context,
        "mean_context": problem.total_context / problem.batch,
        "is_ragged": problem.is_ragged,
        **{name: _flat(value) for name, value in row if name != "problem"},
        "gpu": gpu_name(run.manifest, row.environment),
        "run": run.name,
        "command": sweep_command(row, problem, run.manifest),
    }


def _flat(value: Any) -> Any:
    """Containers as text: a mapping as ``tile_tokens=128 num_warps=4``, a list separated by spaces,
    or by semicolons where it holds sentences; an empty one is nothing.
    """
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if not isinstance(value, list):
        return value
    texts = [str(item) for item in value]
    return ("; " if any(" " in text for text in texts) else " ").join(texts) or None


def _numeric_type(column: str) -> str | None:
    """Nullable integers, so that a missing count does not turn 132 into 132.0; None for text."""
    from typing import get_args

    from leanbench.records.row import Row

    if column in ("group_size", "max_context"):
        return "Int64"
    if column == "mean_context":
        return "float64"
    for axis in PROBLEM_AXES:
        if axis.name == column and axis.is_number and column != "context":
            return {int: "Int64", float: "float64"}[axis.values.json_type]
    field = Row.model_fields.get(column)
    kinds = {field.annotation, *get_args(field.annotation)} if field else set()
    return "float64" if float in kinds else "Int64" if int in kinds else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
