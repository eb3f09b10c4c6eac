"""Two questions about this project's kernels, answered apart: what a decomposition gives with one
implementation, and what an implementation gives with one decomposition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.report.compare.ratios import Ratios, ratios_of, times
from leanbench.report.document import Section, Table, Text, sentences, table
from leanbench.report.facts.side_by_side import sides_of

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results
    from leanbench.report.facts.side_by_side import Side

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
    sides = sides_of(results.runs)
    effects = {_name(side, sides): effects_of(rows) for side, rows in sides.items()}
    # Of one schedule and one implementation, the summary has the same figures.
    says_more = any(
        effect.question == "implementation" or len(effect.by_place) > 1
        for of_side in effects.values()
        for effect in of_side
    )
    if not says_more:
        return Section("decompositions", "Decomposition and implementation", ())
    hint = (
        "The latency of the second kernel over the first one's: geometric mean, lowest to"
        " highest, problems. Decomposition: both kernels have one copy and attend code; fa2"
        " never splits an output tile, fixed_split splits all into as many parts, merged in the"
        " same launch in CUDA C++ and in a second one in Triton. Over equal lengths lean"
        " runs stream-K where splits would fill waves partly; where it runs equal splits, or"
        " one CTA or cluster a tile, it is fixed_split's decomposition itself."
    )
    counts = {_name(side, sides): schedules_of(rows) for side, rows in sides.items()}
    blocks = (
        sentences(hint, layout="hint"),
        _effects_table(effects),
        _counts_table({name: of_side for name, of_side in counts.items() if effects[name]}),
    )
    return Section("decompositions", "Decomposition and implementation", blocks)


def _name(side: Side, sides: Collection[Side]) -> str:
    """The side's name; empty for a single one."""
    return side.name if len(sides) > 1 else ""


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


def _effects_table(effects: Mapping[str, Sequence[Effect]]) -> Table:
    headings = ["effect of the", "run", "kernel", "over", "all schedules:"]
    headings += [f"{place}:" for place in PLACES]
    cells = [
        [
            effect.question,
            name,
            effect.of,
            effect.over,
            Text(_words(effect.every), "strong"),
            *(_words(effect.by_place.get(place)) for place in PLACES),
        ]
        for name, of_side in effects.items()
        for effect in of_side
    ]
    return table(headings, cells)


def _words(ratios: Ratios | None) -> str:
    if ratios is None:
        return ""
    span = f"{times(ratios.lowest)} to {times(ratios.highest)}"
    return f"{times(ratios.geomean)} ({span}, {ratios.problems})"


def _counts_table(counts: Mapping[str, Mapping[str, Counter[str]]]) -> Table:
    every = [of_kernel for of_side in counts.values() for of_kernel in of_side.values()]
    kinds = list(dict.fromkeys(kind for of_kernel in every for kind in of_kernel))
    cells = [
        [kernel, name, *(str(of_kernel[kind] or "") for kind in kinds)]
        for name, of_side in counts.items()
        for kernel, of_kernel in of_side.items()
    ]
    headings = ["kernel", "run", *(f"{kind}:" for kind in kinds)]
    return table(headings, cells, "Problems by the schedule that ran")
