"""The paper's claims beside what a run says of the same problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.claims import SAMPLES, Claim, claims
from leanbench.report.frame import gpu_name

if TYPE_CHECKING:
    from leanbench.problem import AttentionProblem
    from leanbench.report.run_files import Run
    from leanbench.row import Row

Fastest = Mapping["AttentionProblem", Mapping[str, "Row"]]


@dataclass(frozen=True)
class Measured:
    """One claim in one run."""

    claim: Claim
    #: Null where the run lacks a cell of it.
    value: float | None
    #: `holds`, `less than the paper`, `more than the paper`, or empty without a value.
    verdict: str
    #: The problems behind the value; without one, what is lacking.
    cell: str

    @property
    def words(self) -> str:
        if self.value is None:
            return ""
        words = self.claim.words_of(self.value)
        if self.verdict != "holds" and words == self.claim.words_of(self.claim.paper):
            # As many digits as tell it from the paper's bound.
            return f"{self.value:.5g}x"
        return words


def claims_of_runs(runs: Sequence[Run]) -> list[tuple[str, bool, list[Measured]]]:
    """For each run, source, GPU and L2 state: its name, whether it is predicted, and every claim."""
    groups: dict[tuple[str, bool], list[tuple[Row, AttentionProblem]]] = {}
    for run in runs:
        for row, problem in run.results:
            name = f"{gpu_name(run.manifest, row.environment)}, {row.cache} L2"
            key = (f"{run.name}, {name}" if len(runs) > 1 else name, row.source == "predicted")
            groups.setdefault(key, []).append((row, problem))
    return [(*key, measured_claims(results)) for key, results in groups.items()]


def measured_claims(results: Iterable[tuple[Row, AttentionProblem]]) -> list[Measured]:
    """Every claim, in the paper's order.

    Args:
        results: of one source, GPU and state of the L2. Only `ok` rows count, of each kernel the fastest of a problem.
    """
    fastest: dict[AttentionProblem, dict[str, Row]] = {}
    for row, problem in results:
        if row.status == "ok" and row.latency_us is not None and row.latency_us > 0:
            of_problem = fastest.setdefault(_same(problem), {})
            best = of_problem.get(row.kernel)
            if best is None or row.latency_us < (best.latency_us or 0):
                of_problem[row.kernel] = row
    return [_measured(claim, fastest) for claim in claims()]


def _measured(claim: Claim, fastest: Fastest) -> Measured:
    asked = filter(_is_sample, fastest) if claim.is_of_samples else map(_same, claim.problems)
    figures = {problem: figure for problem in asked if (figure := _figure(claim, fastest.get(problem, {}))) is not None}
    needed = SAMPLES if claim.is_of_samples else len(claim.problems)
    if len(figures) < needed:
        return Measured(claim, None, "", _lacking(claim, len(figures)))
    value = claim.value(list(figures.values()))
    verdict = "holds" if claim.holds(value) else f"{'less' if value < claim.paper else 'more'} than the paper"
    return Measured(claim, value, verdict, _cell(claim, figures))


def _same(problem: AttentionProblem) -> AttentionProblem:
    """A ragged batch of equal lengths is a uniform one."""
    lengths = {*problem.contexts} if problem.is_ragged else ()
    return replace(problem, context=problem.max_context) if len(lengths) == 1 else problem


def _is_sample(problem: AttentionProblem) -> bool:
    """The paper's samples differ in batch, context and heads; multi-head attention over a contiguous cache."""
    return problem.group_size == 1 and not problem.is_ragged and problem.q_len == 1 and problem.page_size is None


def _figure(claim: Claim, rows: Mapping[str, Row]) -> float | None:
    of, over = rows.get(claim.of), rows.get(claim.over)
    if claim.quantity == "occupancy":
        return of.quantisation_efficiency if of else None
    field = "latency_us" if claim.quantity == "latency" else "energy_mj"
    values = [getattr(row, field) if row else None for row in (of, over)]
    return values[0] / values[1] if values[0] and values[1] else None


def _lacking(claim: Claim, found: int) -> str:
    if claim.is_of_samples:
        return f"needs {SAMPLES} multi-head problems, has {found}"
    if len(claim.problems) == 1:
        return claim.problems[0].label
    return f"has {found} of {len(claim.problems)} problems, {_ends(claim.problems)}"


def _cell(claim: Claim, figures: Mapping[AttentionProblem, float]) -> str:
    problems = list(figures)
    if len(problems) == 1:
        return problems[0].label
    if claim.statistic in ("lowest", "highest"):
        pick = min if claim.statistic == "lowest" else max
        return f"{pick(figures, key=figures.__getitem__).label}, of {len(problems)} problems"
    if claim.is_of_samples:
        return f"{len(problems)} multi-head problems"
    return f"{len(problems)} problems, {_ends(problems)}"


def _ends(problems: Iterable[AttentionProblem]) -> str:
    labels = [problem.label for problem in problems]
    return f"{labels[0]} to {labels[-1]}"
