"""Effects of the decomposition and of the implementation on this project's kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbench.records.standing import Latency, Ratio
from leanbench.report.compare.ratios import Ratios, ratios_of, times
from leanbench.report.document import Section, Table, Text, sentences, table
from leanbench.report.facts.side_by_side import sides_of

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

#: Decompositions by the names of their kernels, and the implementations of each.
_FAMILIES, _IMPLEMENTATIONS = ("lean", "fa2", "fixed_split"), ("cuda", "triton")
#: Kinds of problems by the possible effect of stream-K.
_UNEVEN = "uneven lengths"
_CROSSING, _EQUAL = "equal lengths, stream-K", "equal lengths, other schedules"
PLACES = (_UNEVEN, _CROSSING, _EQUAL)

#: Rows of a problem by kernel with its implementation: ``lean_cuda``.
OfProblem = Mapping[str, "Row"]
#: Fastest rows of a run, source and GPU.
Rows = Mapping[tuple["AttentionProblem", str], "Row"]


@dataclass(frozen=True)
class Effect:
    """Latency of the kernel `over` divided by that of `of`, over the problems that both ran."""

    question: str
    of: str
    over: str
    every: Ratios
    #: By the names in `PLACES`.
    by_place: dict[str, Ratios]


def decompositions_section(results: Results) -> Section:
    """Make a table of both effects, and one of the schedules of each kernel, for each side."""
    heading = "Decomposition and implementation"
    sides = {side.name: rows for side, rows in sides_of(results.runs).items()}
    if len(sides) == 1:
        sides = {"": next(iter(sides.values()))}
    effects = {name: effects_of(rows) for name, rows in sides.items()}
    # With one schedule and one implementation, the summary has the same figures.
    says_more = any(
        effect.question == "implementation" or len(effect.by_place) > 1
        for of_side in effects.values()
        for effect in of_side
    )
    if not says_more:
        return Section("decompositions", heading, ())
    hint = (
        "The latency of the second kernel over the first one's: geometric mean (lowest to"
        " highest, number of problems). Decomposition: both kernels copy and attend with the same"
        " code; fa2 never splits an output tile, fixed_split splits each into the same number of"
        " parts, merged in the same launch in CUDA C++ and in a second one in Triton. Over equal"
        " lengths lean runs stream-K where splits would fill waves partly; where it runs equal"
        " splits, or one CTA or cluster a tile, it is fixed_split's decomposition itself."
    )
    counts = {name: schedules_of(rows) for name, rows in sides.items() if effects[name]}
    blocks = (sentences(hint, layout="hint"), _effects_table(effects), _counts_table(counts))
    return Section("decompositions", heading, blocks)


def effects_of(rows: Rows) -> list[Effect]:
    """Return the effects that have at least one problem with both kernels."""
    problems: dict[AttentionProblem, dict[str, Row]] = {}
    for (problem, _), row in rows.items():
        name = implementation_of(row)
        # Rows without a schedule, as of many_rows.cu, do not share the kernels' body.
        if name is None or row.schedule is None or not row.latency_us:
            continue
        best = problems.setdefault(problem, {}).setdefault(name, row)
        if best.latency_us and row.latency_us < best.latency_us:
            problems[problem][name] = row
    questions = [
        ("decomposition", f"lean_{implementation}", f"{family}_{implementation}")
        for implementation in _IMPLEMENTATIONS
        for family in _FAMILIES[1:]
    ]
    questions += [("implementation", f"{family}_cuda", f"{family}_triton") for family in _FAMILIES]
    effects = (_effect(problems, *question) for question in questions)
    return [effect for effect in effects if effect is not None]


def implementation_of(row: Row) -> str | None:
    """Return the kernel with its implementation; None for kernels of other families."""
    names = {f"{family}_{which}" for family in _FAMILIES for which in _IMPLEMENTATIONS}
    family = row.kernel.removesuffix("_oracle")
    named = f"{family}_{(row.config or {}).get('implementation')}"
    return next((name for name in (row.kernel, named) if name in names), None)


def _place_of(problem: AttentionProblem, rows: OfProblem) -> str:
    if len({*problem.contexts}) > 1:
        return _UNEVEN
    lean = [rows[name] for name in ("lean_cuda", "lean_triton") if name in rows]
    return _CROSSING if lean and lean[0].schedule == "stream-K" else _EQUAL


def _effect(
    problems: Mapping[AttentionProblem, OfProblem], question: str, of: str, over: str
) -> Effect | None:
    by_place: dict[str, dict[str, Ratio]] = {place: {} for place in PLACES}
    every: dict[str, Ratio] = {}
    for problem, rows in problems.items():
        row, other = rows.get(of), rows.get(over)
        if row and other and row.latency_us and other.latency_us:
            ratio = Latency.of(other).over(Latency.of(row))
            by_place[_place_of(problem, rows)][problem.label] = every[problem.label] = ratio
    if not (of_all := _ratios(every)):
        return None
    known = {place: ratios for place, some in by_place.items() if (ratios := _ratios(some))}
    return Effect(question, of, over, of_all, known)


def _ratios(by_label: Mapping[str, Ratio]) -> Ratios | None:
    return ratios_of(list(by_label), list(by_label.values()))


def schedules_of(rows: Rows) -> dict[str, Counter[str]]:
    """Count the problems of each kernel by schedule."""
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
