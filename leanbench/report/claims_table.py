"""The paper's claims beside what runs say of the same problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from leanbench.model.claims import SAMPLES, Claim, claims
from leanbench.report.frame import gpu_name
from leanbench.report.series import tokens

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

Fastest = Mapping["AttentionProblem", Mapping[str, "Row"]]


@dataclass(frozen=True)
class Measured:
    """One claim in one run."""

    claim: Claim
    #: Null where no run has all cells of it.
    value: float | None
    #: `holds`, `less than the paper`, `more than the paper`, or empty without a value.
    verdict: str
    #: The problems behind the value; without one, what is lacking.
    cell: str
    #: Name of the run that the value is of; empty without one.
    run: str

    @property
    def words(self) -> str:
        if self.value is None:
            return ""
        words = self.claim.words_of(self.value)
        if self.verdict != "holds" and words == self.claim.words_of(self.claim.paper):
            # As many digits as tell it from the paper's bound.
            return f"{self.value:.5g}x"
        return words


@dataclass(frozen=True)
class _Figure:
    """What one run says of one problem of a claim."""

    value: float
    #: Of the newer of its rows.
    time: str


def claims_of_runs(runs: Sequence[Run]) -> list[tuple[str, bool, list[Measured]]]:
    """For each GPU, L2 state and source: the first two in words, whether it is predicted, and every
    claim.
    """
    sweeps = {run.name: sweep_name(run.manifest) for run in runs}
    groups: dict[tuple[str, bool], dict[str, list[tuple[Row, AttentionProblem]]]] = {}
    for run in runs:
        for row, problem in run.results:
            key = (
                f"{gpu_name(run.manifest, row.environment)}, {row.cache} L2",
                row.source == "predicted",
            )
            groups.setdefault(key, {}).setdefault(run.name, []).append((row, problem))
    return [(*key, measured_claims(by_run, sweeps)) for key, by_run in groups.items()]


def sweep_name(manifest: Mapping[str, Any]) -> str:
    """Of the sweep that the run is of; empty where the manifest does not say."""
    sweep = manifest.get("sweep")
    name = sweep.get("name") if isinstance(sweep, dict) else None
    return name if isinstance(name, str) else ""


def measured_claims(
    results: Mapping[str, Iterable[tuple[Row, AttentionProblem]]], sweeps: Mapping[str, str]
) -> list[Measured]:
    """Every claim, in the paper's order, each from one run alone, so that no ratio and no mean
    spans two: of those that have all its cells the one of the sweep made for it, else the one that
    measured it last.

    Args:
        results: by the run's name; of one source, GPU and state of the L2. Only `ok` rows count, of
            each kernel the fastest of a problem.
        sweeps: the name of each run's sweep, by the run's name.
    """
    fastest = {run: _fastest(rows) for run, rows in results.items()}
    return [_measured(claim, fastest, sweeps) for claim in claims()]


def _fastest(results: Iterable[tuple[Row, AttentionProblem]]) -> Fastest:
    fastest: dict[AttentionProblem, dict[str, Row]] = {}
    for row, problem in results:
        if row.status == "ok" and row.latency_us is not None and row.latency_us > 0:
            of_problem = fastest.setdefault(_same(problem), {})
            best = of_problem.get(row.kernel)
            if best is None or row.latency_us < (best.latency_us or 0):
                of_problem[row.kernel] = row
    return fastest


def _measured(claim: Claim, runs: Mapping[str, Fastest], sweeps: Mapping[str, str]) -> Measured:
    found = {run: _figures(claim, fastest) for run, fastest in runs.items()}
    needed = SAMPLES if claim.is_of_samples else len(claim.problems)
    whole = {run: figures for run, figures in found.items() if len(figures) >= needed}
    if not whole:
        return Measured(
            claim, None, "", _lacking(claim, max(map(len, found.values()), default=0)), ""
        )
    newest = {
        run: max(figure.time for figure in figures.values()) for run, figures in whole.items()
    }
    run = max(whole, key=lambda run: (sweeps.get(run) == claim.sweep, newest[run]))
    values = {problem: figure.value for problem, figure in whole[run].items()}
    value = claim.value(list(values.values()))
    verdict = (
        "holds"
        if claim.holds(value)
        else f"{'less' if value < claim.paper else 'more'} than the paper"
    )
    return Measured(claim, value, verdict, _cell(claim, values), run)


def _figures(claim: Claim, fastest: Fastest) -> dict[AttentionProblem, _Figure]:
    asked = filter(_is_sample, fastest) if claim.is_of_samples else map(_same, claim.problems)
    found = ((problem, _figure(claim, fastest.get(problem, {}))) for problem in asked)
    return {problem: figure for problem, figure in found if figure is not None}


def _same(problem: AttentionProblem) -> AttentionProblem:
    """A ragged batch of equal lengths is a uniform one."""
    lengths = {*problem.contexts} if problem.is_ragged else ()
    return replace(problem, context=problem.max_context) if len(lengths) == 1 else problem


def _is_sample(problem: AttentionProblem) -> bool:
    """The paper's samples differ in batch, context and heads; multi-head attention over a
    contiguous cache.
    """
    return (
        problem.group_size == 1
        and not problem.is_ragged
        and problem.q_len == 1
        and problem.page_size is None
    )


def _figure(claim: Claim, rows: Mapping[str, Row]) -> _Figure | None:
    of, over = rows.get(claim.of), rows.get(claim.over)
    if of is None:
        return None
    if claim.quantity == "occupancy":
        # The schedule's own figure is all that a prediction has; a measured one is of the SMs.
        share = of.quantisation_efficiency if of.source == "predicted" else of.sm_busy_share
        return None if share is None else _Figure(share, of.time)
    if over is None:
        return None
    field = "latency_us" if claim.quantity == "latency" else "energy_mj"
    above, below = getattr(of, field), getattr(over, field)
    return _Figure(above / below, max(of.time, over.time)) if above and below else None


def _lacking(claim: Claim, found: int) -> str:
    if claim.is_of_samples:
        return f"needs {SAMPLES} multi-head problems, has {found}"
    if len(claim.problems) == 1:
        return claim.problems[0].label
    return f"has {found} of {len(claim.problems)} problems, {_ends(claim.problems)}"


def _cell(claim: Claim, values: Mapping[AttentionProblem, float]) -> str:
    problems = list(values)
    if len(problems) == 1:
        return problems[0].label
    if claim.statistic in ("lowest", "highest"):
        pick = min if claim.statistic == "lowest" else max
        return f"{pick(values, key=values.__getitem__).label}, of {len(problems)} problems"
    if claim.is_of_samples:
        return f"{len(problems)} multi-head problems: {_ranges(problems)}"
    return f"{len(problems)} problems, {_ends(problems)}"


def _ends(problems: Iterable[AttentionProblem]) -> str:
    labels = [problem.label for problem in problems]
    return f"{labels[0]} to {labels[-1]}"


def _ranges(problems: Sequence[AttentionProblem]) -> str:
    """What samples were taken: ``batch 1 to 64, heads 8 to 64, context 1k to 512k, head_dim 64,
    fp16``.
    """

    def span(name: str, values: Iterable[int], text: Callable[[int], str] = str) -> str:
        low, *between = sorted({*values})
        return f"{name} {text(low)} to {text(between[-1])}" if between else f"{name} {text(low)}"

    words = [
        span("batch", (problem.batch for problem in problems)),
        span("heads", (problem.q_heads for problem in problems)),
        span("context", (problem.max_context for problem in problems), tokens),
        span("head_dim", (problem.head_dim for problem in problems)),
    ]
    return ", ".join([*words, "/".join(dict.fromkeys(problem.dtype for problem in problems))])
