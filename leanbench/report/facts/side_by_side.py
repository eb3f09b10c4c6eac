"""Runs side by side: the same kernel on the same problems in two runs, say on two GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.records.reading import fastest
from leanbench.records.standing import SPREAD, Ratio
from leanbench.report.charts import CHARTS
from leanbench.report.compare.pair import COMPARED, match
from leanbench.report.compare.ratios import Ratios, geomean, ratios_of, times
from leanbench.report.document import Block, Figure, Figures, Section, Table, Text, sentences, table
from leanbench.report.frame import fastest_rows, has_values, kernel_order

if TYPE_CHECKING:
    from pandas import DataFrame

    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row
    from leanbench.report.compare.pair import Pair
    from leanbench.report.facts.results import Results

#: Keys of the charts that a figure of several runs can show.
QUANTITIES = ("latency", "energy", "power")


@dataclass(frozen=True)
class Side:
    """Rows of one run and source on one GPU in one state of the L2."""

    run: str
    source: str
    gpu: str
    cache: str
    #: The run, with whatever else distinguishes it.
    name: str


@dataclass(frozen=True)
class SideBySide:
    """Ratios of a kernel on two sides, later over base, over the problems that both timed."""

    kernel: str
    base: Side
    side: Side
    latency: Ratios
    #: Geometric means of the read floor's share; None if not measured.
    base_floor_share: float | None
    side_floor_share: float | None
    #: Geometric means of the ratios of `COMPARED`; None unless measured on both sides.
    compared: tuple[float | None, ...]


def side_by_side_section(results: Results) -> Section:
    """Make a table of ratios, and a picture of one kernel in every run."""
    hint = (
        "Latency in a run over that in another, of the same kernel on the same problems, those that"
        " both timed: below 1×, the run in the column “run” is faster."
    )
    rows = side_by_side(results.runs, kernel_order(results.frame))
    blocks: list[Block] = [
        sentences("The runs have no problem in common that the same kernel ran.", layout="empty")
    ]
    if rows:
        blocks = [sentences(hint, layout="hint"), _table(rows, results.short)]
    if quantities(fastest_rows(results.frame)):
        note = "its fastest row at each point; a predicted run is dotted"
        label = "One kernel in every run"
        blocks.append(Figures((Figure("sides", "One kernel, every run", note, label),), "sides"))
    return Section("side-by-side", "Runs side by side", tuple(blocks))


def _table(rows: Sequence[SideBySide], short: Mapping[str, str]) -> Table:
    headings = ["kernel", "run", "over", "problems:", "latency, geometric mean:"]
    headings += ["lowest", "highest", "of the read floor (run, over):"]
    headings += [f"{quantity.heading}:" for quantity in COMPARED]
    cells = []
    for row in rows:
        latency, floors = row.latency, (row.side_floor_share, row.base_floor_share)
        cells.append(
            [
                row.kernel,
                _name(row.side),
                _name(row.base),
                str(latency.problems),
                Text(times(latency.geomean), "strong"),
                _extreme(latency.lowest, latency.lowest_at, short),
                _extreme(latency.highest, latency.highest_at, short),
                ", ".join(f"{share:.1%}" for share in floors if share) if all(floors) else "",
                *map(times, row.compared),
            ]
        )
    return table(headings, cells)


def _extreme(ratio: float, at: str, short: Mapping[str, str]) -> Text:
    # If many axes vary, the label itself is shorter.
    words = short[at] if len(short[at]) <= 2 * len(at) else at
    return Text(times(ratio), note=words, title=at)


def _name(side: Side) -> str:
    is_marked = side.source != "predicted" or "predicted" in side.name
    return side.name if is_marked else f"{side.name}, predicted"


def sides_of(runs: Sequence[Run]) -> dict[Side, dict[tuple[AttentionProblem, str], Row]]:
    """Split runs by source, GPU and state of the L2, each side with its fastest timed rows."""
    results: dict[tuple[str, str, str, str], list[tuple[Row, AttentionProblem]]] = {}
    for run in runs:
        for row, problem in run.results:
            key = (run.name, row.source, run.gpu_name(row.environment), row.cache)
            results.setdefault(key, []).append((row, problem))
    several_gpus, several_sources, several_caches = (
        len({key[field] for key in results}) > 1 for field in (2, 1, 3)
    )
    sides = {}
    for (run, source, gpu, cache), of_side in results.items():
        differing = [gpu] * several_gpus + [source] * several_sources + [cache] * several_caches
        name = ", ".join([run, *differing])
        sides[Side(run, source, gpu, cache, name)] = fastest(of_side)
    return sides


def side_by_side(runs: Sequence[Run], kernels: Sequence[str]) -> list[SideBySide]:
    """Compare each later side with the first one of the same L2 state, kernel by kernel."""
    rows = []
    sides = sides_of(runs)
    for index, (side, of_side) in enumerate(sides.items()):
        base = next((base for base in list(sides)[:index] if base.cache == side.cache), None)
        if base is None:
            continue
        pairs = match(sides[base], of_side, SPREAD)
        for kernel in kernels:
            of_kernel = [pair for (_, name), pair in pairs.items() if name == kernel]
            if of_kernel:
                rows.append(_side_by_side(kernel, base, side, of_kernel))
    return rows


def _side_by_side(kernel: str, base: Side, side: Side, pairs: Sequence[Pair]) -> SideBySide:
    by_label = [(pair.problem.label, pair.ratio) for pair in pairs if pair.ratio is not None]
    labels, ratios = zip(*by_label, strict=True)
    latency = ratios_of(labels, [Ratio.exactly(ratio) for ratio in ratios])
    assert latency is not None, "rows that were timed have a latency"
    return SideBySide(
        kernel,
        base,
        side,
        latency,
        _mean(pair.base.read_floor_share for pair in pairs),
        _mean(pair.new.read_floor_share for pair in pairs),
        tuple(_mean(pair.ratio_of(quantity) for pair in pairs) for quantity in COMPARED),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return geomean(known) if known else None


def quantities(frame: DataFrame) -> list[dict[str, str]]:
    """Describe the columns that the figure can show."""
    return [
        {"column": chart.y, "title": chart.title, "y_title": chart.y_title, "scale": chart.y_scale}
        for chart in CHARTS
        if chart.key in QUANTITIES and has_values(frame, chart.y)
    ]
