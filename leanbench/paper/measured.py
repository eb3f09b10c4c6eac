"""The paper's claims in runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from leanbench.core.syntax import short_count
from leanbench.model.error import model_error
from leanbench.paper.claim import BASELINES, FEWEST_SAMPLES, Baselines, Claim, Figure, Verdict
from leanbench.paper.claims import claims
from leanbench.records.reading import fastest

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Rows by problem and kernel.
Fastest = Mapping["AttentionProblem", Mapping[str, "Row"]]
#: Relative uncertainty of a single reading: an energy, an occupancy.
READING = 0.01


@dataclass(frozen=True)
class MeasuredClaim:
    """A claim in one run, with one of the baselines."""

    claim: Claim
    baselines: Baselines
    #: None if no run has all its cells.
    figure: Figure | None
    #: Arithmetic mean, if `figure` is the geometric mean over several problems.
    arithmetic: float | None
    #: The problems behind the figure; without a figure, the missing ones.
    cell: str
    #: Name of the figure's run; empty without a figure.
    run: str

    @property
    def verdict(self) -> Verdict | None:
        return None if self.figure is None else self.claim.verdict(self.figure)

    @property
    def words(self) -> str:
        if self.figure is None:
            return ""
        words = self.claim.words_of(self.figure)
        return words if self.arithmetic is None else f"{words}, arithmetic {self.arithmetic:.2f}x"


@dataclass(frozen=True)
class _Cell:
    """Figure of one problem of a claim in one run."""

    figure: Figure
    #: Time of the newer row.
    time: str


def claims_of_runs(runs: Sequence[Run]) -> list[tuple[str, bool, list[MeasuredClaim]]]:
    """Evaluate every claim for each GPU, L2 state and source.

    Each group has a name (GPU and L2), True if it is predicted, and the claims.
    """
    sweeps = {run.name: _sweep_name(run) for run in runs}
    groups: dict[tuple[str, str, bool], dict[str, list[tuple[Row, AttentionProblem]]]] = {}
    for run in runs:
        for row, problem in run.results:
            key = run.gpu_name(row.environment), row.cache, row.source == "predicted"
            groups.setdefault(key, {}).setdefault(run.name, []).append((row, problem))
    return [
        (f"{gpu}, {cache} L2", predicted, _measured(by_run, sweeps, gpu if predicted else None))
        for (gpu, cache, predicted), by_run in groups.items()
    ]


def verdict_words(claims: Iterable[MeasuredClaim], baselines: Baselines) -> str:
    """Count the verdicts with these baselines: ``5 hold, 2 more``; empty without any."""
    verdicts = Counter(claim.verdict for claim in claims if claim.baselines == baselines)
    return ", ".join(
        f"{verdicts[verdict]} {'hold' if verdict == 'holds' else verdict}"
        for verdict in get_args(Verdict)
        if verdicts[verdict]
    )


def _sweep_name(run: Run) -> str:
    name = run.section("sweep").get("name")
    return name if isinstance(name, str) else ""


def _measured(
    results: Mapping[str, Iterable[tuple[Row, AttentionProblem]]],
    sweeps: Mapping[str, str],
    predicted_for: str | None,
) -> list[MeasuredClaim]:
    """Evaluate every claim with each baseline that one run has all cells of.

    No ratio and no mean spans two runs. A run of a sweep made for the claim goes first, then the
    latest. A claim without a run appears once, with this project's kernels.

    Args:
        results: rows of one source, GPU and L2 state by the run's name.
        sweeps: each run's sweep by the run's name.
        predicted_for: GPU of predictions; None for measured rows.
    """

    def error(kernels: Sequence[str]) -> float:
        return 0.0 if predicted_for is None else model_error(predicted_for, kernels)

    by_run = {run: _by_problem(rows) for run, rows in results.items()}
    outcomes: list[MeasuredClaim] = []
    for claim in claims():
        # All baselines are the same for a claim about lean alone.
        by_kernels = {
            kernels: baselines for baselines in BASELINES if (kernels := baselines.kernels(claim))
        }
        candidates = [
            _evaluate(claim, baselines, by_run, sweeps, error(kernels))
            for kernels, baselines in by_kernels.items()
        ]
        known = [measured for measured in candidates if measured.figure is not None]
        outcomes += known or [candidates[-1]]
    return outcomes


def _by_problem(results: Iterable[tuple[Row, AttentionProblem]]) -> Fastest:
    rows: dict[AttentionProblem, dict[str, Row]] = {}
    uniform = ((row, _uniform(problem)) for row, problem in results)
    for (problem, kernel), row in fastest(uniform).items():
        rows.setdefault(problem, {})[kernel] = row
    return rows


def _evaluate(
    claim: Claim,
    baselines: Baselines,
    runs: Mapping[str, Fastest],
    sweeps: Mapping[str, str],
    error: float,
) -> MeasuredClaim:
    kernels = baselines.kernels(claim)
    cells = {run: _cells(claim, kernels, rows, error) for run, rows in runs.items()}
    needed = FEWEST_SAMPLES if claim.is_of_samples else len(claim.problems)
    complete = {run: of_run for run, of_run in cells.items() if len(of_run) >= needed}
    if not complete:
        most = max(map(len, cells.values()), default=0)
        return MeasuredClaim(claim, baselines, None, None, _missing(claim, most), "")
    newest = {run: max(cell.time for cell in of_run.values()) for run, of_run in complete.items()}
    run = max(complete, key=lambda run: (sweeps.get(run) in claim.sweeps, newest[run]))
    figures = {problem: cell.figure for problem, cell in complete[run].items()}
    values = {problem: figure.value for problem, figure in figures.items()}
    is_mean = claim.statistic == "mean" and len(values) > 1 and not claim.is_share
    arithmetic = statistics.fmean(values.values()) if is_mean else None
    figure = claim.value(list(figures.values()))
    return MeasuredClaim(claim, baselines, figure, arithmetic, _cell_words(claim, values), run)


def _cells(
    claim: Claim, kernels: Sequence[str], rows: Fastest, error: float
) -> dict[AttentionProblem, _Cell]:
    problems = filter(_is_sample, rows) if claim.is_of_samples else map(_uniform, claim.problems)
    figure = _figure if claim.prompt is None else _request_figure
    cells = {}
    for problem in problems:
        of_problem = rows.get(problem, {})
        chosen = [of_problem[name] for name in kernels if name in of_problem]
        if len(chosen) == len(kernels) and (known := figure(claim, problem, chosen, rows, error)):
            cells[problem] = _Cell(known, max(row.time for row in chosen))
    return cells


def _uniform(problem: AttentionProblem) -> AttentionProblem:
    """Convert a ragged batch of equal lengths to a uniform one."""
    lengths = {*problem.contexts} if problem.is_ragged else ()
    return replace(problem, context=problem.max_context) if len(lengths) == 1 else problem


def _is_sample(problem: AttentionProblem) -> bool:
    """Return True for multi-head attention over a contiguous cache, as in the paper's samples."""
    return problem.group_size == 1 and not problem.special.keys() - {"dtype", "kv_layout"}


def _request_figure(
    claim: Claim, problem: AttentionProblem, chosen: Sequence[Row], rows: Fastest, error: float
) -> Figure | None:
    """Compute a request's figure. The step right after the prompt holds the prompt's time."""
    prompts = rows.get(claim.prompt_of(problem), {}).values()
    prefill_us = next((row.prefill_us for row in prompts if row.prefill_us), None)
    steps = [_interval(row, "latency_us", error) for row in chosen]
    if prefill_us is None or None in steps:
        return None
    outputs = [step.times(claim.output_tokens(problem)) for step in steps if step]
    requests = [output.plus(prefill_us) for output in outputs]
    if claim.quantity == "decode share":
        # The longer the step, the larger the share.
        [output], [request] = outputs, requests
        return Figure(
            output.value / request.value, output.low / request.low, output.high / request.high
        )
    return requests[0].over(requests[1])


def _figure(
    claim: Claim, problem: AttentionProblem, chosen: Sequence[Row], rows: Fastest, error: float
) -> Figure | None:
    if claim.quantity == "occupancy":
        [row] = chosen
        if row.source == "predicted":
            share = row.quantisation_efficiency
            return None if share is None else Figure(share, share, share)
        return None if row.sm_busy_share is None else Figure.within(row.sm_busy_share, READING)
    field = "latency_us" if claim.quantity == "latency" else "energy_mj"
    of, over = (_interval(row, field, error) for row in chosen)
    return of.over(over) if of and over else None


def _interval(row: Row, field: str, error: float) -> Figure | None:
    """Return a row's figure with its interval.

    A latency has the interval of its median, an energy is known to `READING`. The model's error
    is that of a ratio: each side of a prediction has half of it.
    """
    value: float | None = getattr(row, field)
    if not value:
        return None
    if row.source == "predicted":
        return Figure.within(value, math.sqrt(1 + error) - 1)
    if field == "latency_us":
        return Figure(value, row.latency_ci_low_us or value, row.latency_ci_high_us or value)
    return Figure.within(value, math.sqrt(1 + READING) - 1)


def _missing(claim: Claim, problems: int) -> str:
    if claim.is_of_samples:
        return f"needs {FEWEST_SAMPLES} multi-head problems, has {problems}"
    if len(claim.problems) == 1:
        return claim.problems[0].label
    return f"has {problems} of {len(claim.problems)} problems, {_ends(claim.problems)}"


def _cell_words(claim: Claim, values: Mapping[AttentionProblem, float]) -> str:
    problems = list(values)
    if len(problems) == 1:
        return problems[0].label
    if claim.statistic in ("lowest", "highest"):
        pick = min if claim.statistic == "lowest" else max
        return f"{pick(values, key=values.__getitem__).label}, of {len(problems)} problems"
    if claim.is_of_samples:
        return f"{len(problems)} multi-head problems: {_ranges(problems)}"
    return f"{len(problems)} problems, {_ends(problems)}"


def _ends(problems: Sequence[AttentionProblem]) -> str:
    return f"{problems[0].label} to {problems[-1].label}"


def _ranges(problems: Sequence[AttentionProblem]) -> str:
    """Describe samples: ``batch 1 to 64, heads 8 to 64, context 1k to 512k, head_dim 64, fp16``."""

    def span(name: str, values: Iterable[int], text: Callable[[int], str] = str) -> str:
        low, *between = sorted({*values})
        return f"{name} {text(low)} to {text(between[-1])}" if between else f"{name} {text(low)}"

    words = [
        span("batch", (problem.batch for problem in problems)),
        span("heads", (problem.q_heads for problem in problems)),
        span("context", (problem.max_context for problem in problems), short_count),
        span("head_dim", (problem.head_dim for problem in problems)),
    ]
    return ", ".join([*words, "/".join(dict.fromkeys(problem.dtype for problem in problems))])
