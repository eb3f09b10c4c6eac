"""Two questions about this project's kernels, answered apart: what a decomposition gives with one
implementation, and what an implementation gives with one decomposition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.compare.ratios import Ratios, ratios_of, times
from leanbench.report.document import Block, Section, Table, Text, sentences, table
from leanbench.report.facts.side_by_side import sides_of

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

#: Decompositions, as their kernels are called, and the implementations that each has.
_FAMILIES, _IMPLEMENTATIONS = ("lean", "fa2", "fixed_split"), ("cuda", "triton")
#: Where problems lie, by what stream-K could change.
_UNEVEN = "uneven lengths"
_CROSSING, _EQUAL = "equal lengths, stream-K", "equal lengths, other schedules"
PLACES = (_UNEVEN, _CROSSING, _EQUAL)

#: Rows of one problem, by kernel with its implementation: ``lean_cuda``.
OfProblem = Mapping[str, "Row"]


@dataclass(frozen=True)
class Effect:
    """How many times the latency of `of` the kernel `over` needs, over the problems that both
    ran.
    """

    question: str
    of: str
    over: str
    every: Ratios
    #: By the names in `PLACES`.
    by_place: dict[str, Ratios]


def decompositions_section(results: Results) -> Section:
    """The two questions, and on how many problems each kernel ran which schedule; for each run,
    source and GPU.
    """
    blocks: list[Block] = []
    sides = sides_of(results.runs)
    for side, rows in sides.items():
        effects = effects_of(rows)
        name = side.name if len(sides) > 1 else ""
        if effects:
            counts = schedules_of(rows)
            blocks += [_effects_table(effects, name), _counts_table(counts, name)]
    if blocks:
        hint = (
            "The latency of the second kernel over the first one's: geometric mean, lowest to"
            " highest, problems. Decomposition: both kernels have one copy and attend code; fa2"
            " never splits an output tile, fixed_split splits all into as many parts, merged in the"
            " same launch in CUDA C++ and in a second one in Triton. Over equal lengths lean"
            " runs stream-K where splits would fill waves partly; where it runs equal splits, or"
            " one CTA or cluster a tile, it is fixed_split's decomposition itself."
        )
        blocks.insert(0, sentences(hint, layout="hint"))
    return Section("decompositions", "Decomposition and implementation", tuple(blocks))


def effects_of(rows: Mapping[tuple[AttentionProblem, str], Row]) -> list[Effect]:
    """Those of which some problem has both kernels.

    Args:
        rows: the fastest of each problem and kernel, of one run, source and GPU.
    """
    problems: dict[AttentionProblem, dict[str, Row]] = {}
    for (problem, _), row in rows.items():
        name = implementation_of(row)
        # Without a schedule, as of many_rows.cu, it is no body that the others share.
        if name is None or row.schedule is None or not row.latency_us:
            continue
        known = problems.setdefault(problem, {}).setdefault(name, row)
        if known.latency_us and row.latency_us < known.latency_us:
            problems[problem][name] = row
    asked = [
        ("decomposition", f"lean_{implementation}", f"{family}_{implementation}")
        for implementation in _IMPLEMENTATIONS
        for family in _FAMILIES[1:]
    ]
    asked += [("implementation", f"{family}_cuda", f"{family}_triton") for family in _FAMILIES]
    effects = (_effect(problems, *names) for names in asked)
    return [effect for effect in effects if effect is not None]


def implementation_of(row: Row) -> str | None:
    """The kernel that ran, with its implementation, of a row of this project's kernels; None for
    any other.
    """
    names = {f"{family}_{which}" for family in _FAMILIES for which in _IMPLEMENTATIONS}
    config = row.config or {}
    family = row.kernel.removesuffix("_oracle")
    named = f"{family}_{config.get('implementation')}"
    return next((name for name in (row.kernel, named) if name in names), None)


def place_of(problem: AttentionProblem, rows: OfProblem) -> str:
    """One of `PLACES`."""
    if len({*problem.contexts}) > 1:
        return _UNEVEN
    lean = [rows[name] for name in ("lean_cuda", "lean_triton") if name in rows]
    return _CROSSING if lean and lean[0].schedule == "stream-K" else _EQUAL


def _effect(
    problems: Mapping[AttentionProblem, OfProblem], question: str, of: str, over: str
) -> Effect | None:
    ratios: dict[str, tuple[str, float]] = {}
    for problem, rows in problems.items():
        own, other = rows.get(of), rows.get(over)
        if own and other and own.latency_us and other.latency_us:
            ratio = other.latency_us / own.latency_us
            ratios[problem.label] = place_of(problem, rows), ratio
    every = _ratios(ratios, PLACES)
    if every is None:
        return None
    by_place = {place: _ratios(ratios, (place,)) for place in PLACES}
    known = {place: ratio for place, ratio in by_place.items() if ratio is not None}
    return Effect(question, of, over, every, known)


def _ratios(by_label: Mapping[str, tuple[str, float]], places: Sequence[str]) -> Ratios | None:
    chosen = {label: ratio for label, (place, ratio) in by_label.items() if place in places}
    return ratios_of(list(chosen), list(chosen.values()))


def schedules_of(rows: Mapping[tuple[AttentionProblem, str], Row]) -> dict[str, Counter[str]]:
    """How many problems each kernel ran with which schedule; kernels of which that is not known are
    left out.
    """
    counts: dict[str, Counter[str]] = {}
    for (_, kernel), row in rows.items():
        if row.schedule:
            counts.setdefault(kernel, Counter())[row.schedule] += 1
    return counts


def _effects_table(effects: Sequence[Effect], name: str) -> Table:
    headings = [
        "effect of the",
        "kernel",
        "over",
        "all schedules:",
        *(f"{place}:" for place in PLACES),
    ]
    cells = [
        [
            effect.question,
            effect.of,
            effect.over,
            Text(_words(effect.every), "strong"),
            *(_words(effect.by_place.get(place)) for place in PLACES),
        ]
        for effect in effects
    ]
    return table(headings, cells, name)


def _words(ratios: Ratios | None) -> str:
    if ratios is None:
        return ""
    span = f"{times(ratios.lowest)} to {times(ratios.highest)}"
    return f"{times(ratios.geomean)} ({span}, {ratios.problems})"


def _counts_table(counts: Mapping[str, Counter[str]], name: str) -> Table:
    kinds = list(dict.fromkeys(kind for of_kernel in counts.values() for kind in of_kernel))
    cells = [
        [kernel, *(str(of_kernel[kind] or "") for kind in kinds)]
        for kernel, of_kernel in counts.items()
    ]
    title = "Problems by the schedule that ran" + (f", {name}" if name else "")
    return table(["kernel", *(f"{kind}:" for kind in kinds)], cells, title)
