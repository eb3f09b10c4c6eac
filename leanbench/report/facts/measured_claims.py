"""What runs have to say of the paper's claims."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from leanbench.model.claim import BASELINES, FEWEST_SAMPLES, Baselines, Claim, Figure, Verdict
from leanbench.model.error import model_error
from leanbench.model.paper import claims
from leanbench.report.compare.match import fastest
from leanbench.report.compare.ratios import MARGIN
from leanbench.report.frame import gpu_name
from leanbench.report.series import tokens

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Kernels' rows, by problem.
Fastest = Mapping["AttentionProblem", Mapping[str, "Row"]]


@dataclass(frozen=True)
class MeasuredClaim:
    """One claim in one run, with one of the baselines."""

    claim: Claim
    baselines: Baselines
    #: Null where no run has all cells of it.
    figure: Figure | None
    #: Arithmetic, where the claim is of a mean over several problems, which `figure` has geometric.
    arithmetic: float | None
    #: The problems behind the figure; without one, what is lacking.
    cell: str
    #: Name of the run that the figure is of; empty without one.
    run: str

    @property
    def verdict(self) -> Verdict | None:
        """Null without a figure."""
        return None if self.figure is None else self.claim.verdict(self.figure)

    @property
    def words(self) -> str:
        if self.figure is None:
            return ""
        words = self.claim.words_of(self.figure)
        return words if self.arithmetic is None else f"{words}, arithmetic {self.arithmetic:.2f}x"


@dataclass(frozen=True)
class _Cell:
    """What one run has for one problem of a claim."""

    figure: Figure
    #: Of the newer of its rows.
    time: str


def claims_of_runs(runs: Sequence[Run]) -> list[tuple[str, bool, list[MeasuredClaim]]]:
    """For each GPU, L2 state and source: the first two in words, whether it is predicted, and every
    claim.
    """
    sweeps = {run.name: sweep_name(run.manifest) for run in runs}
    groups: dict[tuple[str, bool], dict[str, list[tuple[Row, AttentionProblem]]]] = {}
    gpus: dict[str, str] = {}
    for run in runs:
        for row, problem in run.results:
            gpu = gpu_name(run.manifest, row.environment)
            key = (f"{gpu}, {row.cache} L2", row.source == "predicted")
            gpus[key[0]] = gpu
            groups.setdefault(key, {}).setdefault(run.name, []).append((row, problem))
    return [
        (name, predicted, measured_claims(by_run, sweeps, gpus[name] if predicted else None))
        for (name, predicted), by_run in groups.items()
    ]


def verdict_words(claims: Iterable[MeasuredClaim], baselines: Baselines) -> str:
    """``5 hold, 2 more``: of those with these baselines; empty without any."""
    verdicts = Counter(claim.verdict for claim in claims if claim.baselines == baselines)
    return ", ".join(
        f"{verdicts[verdict]} {'hold' if verdict == 'holds' else verdict}"
        for verdict in get_args(Verdict)
        if verdicts[verdict]
    )


def sweep_name(manifest: Mapping[str, Any]) -> str:
    """Of the sweep that the run is of; empty where the manifest does not say."""
    sweep = manifest.get("sweep")
    name = sweep.get("name") if isinstance(sweep, dict) else None
    return name if isinstance(name, str) else ""


def measured_claims(
    results: Mapping[str, Iterable[tuple[Row, AttentionProblem]]],
    sweeps: Mapping[str, str],
    predicted_for: str | None = None,
) -> list[MeasuredClaim]:
    """Every claim, in the paper's order, with each baseline that a run has all cells of, from that
    run alone, so that no ratio and no mean spans two: of those runs the latest of a sweep made for
    the claim, else the one that measured it last. A claim that no run has is there once, with this
    project's kernels.

    Args:
        results: by the run's name; of one source, GPU and state of the L2. Only timed rows count,
            of each kernel the fastest of a problem.
        sweeps: the name of each run's sweep, by the run's name.
        predicted_for: the GPU that the rows are predictions for; None: they are measured.
    """

    def error(kernels: Sequence[str]) -> float:
        return 0.0 if predicted_for is None else model_error(predicted_for, kernels)

    by_run = {run: _by_problem(rows) for run, rows in results.items()}
    outcomes: list[MeasuredClaim] = []
    for claim in claims():
        # Of a claim about lean alone all baselines are one.
        by_kernels = {baselines.kernels(claim): baselines for baselines in BASELINES}
        of_each = [
            _measured(claim, baselines, by_run, sweeps, error(kernels))
            for kernels, baselines in by_kernels.items()
        ]
        known = [measured for measured in of_each if measured.figure is not None]
        outcomes += known or [of_each[-1]]
    return outcomes


def _by_problem(results: Iterable[tuple[Row, AttentionProblem]]) -> Fastest:
    rows: dict[AttentionProblem, dict[str, Row]] = {}
    same = ((row, _same(problem)) for row, problem in results)
    for (problem, kernel), row in fastest(same).items():
        rows.setdefault(problem, {})[kernel] = row
    return rows


def _measured(
    claim: Claim,
    baselines: Baselines,
    runs: Mapping[str, Fastest],
    sweeps: Mapping[str, str],
    error: float,
) -> MeasuredClaim:
    kernels = baselines.kernels(claim)
    cells = {run: _cells(claim, kernels, rows, error) for run, rows in runs.items()}
    needed = FEWEST_SAMPLES if claim.is_of_samples else len(claim.problems)
    whole = {run: of_run for run, of_run in cells.items() if len(of_run) >= needed}
    if not whole:
        most = max(map(len, cells.values()), default=0)
        return MeasuredClaim(claim, baselines, None, None, _lacking(claim, most), "")
    newest = {run: max(cell.time for cell in of_run.values()) for run, of_run in whole.items()}
    run = max(whole, key=lambda run: (sweeps.get(run) in claim.sweeps, newest[run]))
    figures = {problem: cell.figure for problem, cell in whole[run].items()}
    values = {problem: figure.value for problem, figure in figures.items()}
    is_mean = claim.statistic == "mean" and len(values) > 1 and not claim.is_share
    arithmetic = statistics.fmean(values.values()) if is_mean else None
    figure = claim.value(list(figures.values()))
    return MeasuredClaim(claim, baselines, figure, arithmetic, _cell(claim, values), run)


def _cells(
    claim: Claim, kernels: Sequence[str], rows: Fastest, error: float
) -> dict[AttentionProblem, _Cell]:
    problems = filter(_is_sample, rows) if claim.is_of_samples else map(_same, claim.problems)
    figure = _figure if claim.prompt is None else _request_figure
    cells = {}
    for problem in problems:
        of_problem = rows.get(problem, {})
        own = [of_problem[name] for name in kernels if name in of_problem]
        if len(own) == len(kernels) and (known := figure(claim, problem, own, rows, error)):
            cells[problem] = _Cell(known, max(row.time for row in own))
    return cells


def _same(problem: AttentionProblem) -> AttentionProblem:
    """A ragged batch of equal lengths is a uniform one."""
    lengths = {*problem.contexts} if problem.is_ragged else ()
    return replace(problem, context=problem.max_context) if len(lengths) == 1 else problem


def _is_sample(problem: AttentionProblem) -> bool:
    """The paper's samples differ in batch, context and heads; multi-head attention over a
    contiguous cache.
    """
    return problem.group_size == 1 and not problem.special.keys() - {"dtype", "kv_layout"}


def _request_figure(
    claim: Claim, problem: AttentionProblem, own: Sequence[Row], rows: Fastest, error: float
) -> Figure | None:
    """Of a request to a whole model: its prompt's time is that of the step right after it."""
    prompts = rows.get(claim.prompt_of(problem), {}).values()
    prefill_us = next((row.prefill_us for row in prompts if row.prefill_us), None)
    steps = [_interval(row, "latency_us", error) for row in own]
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
    claim: Claim, problem: AttentionProblem, own: Sequence[Row], rows: Fastest, error: float
) -> Figure | None:
    if claim.quantity == "occupancy":
        [row] = own
        # The schedule's own figure is all that a prediction has; a measured one is of the SMs.
        if row.source == "predicted":
            share = row.quantisation_efficiency
            return None if share is None else Figure(share, share, share)
        return None if row.sm_busy_share is None else Figure.within(row.sm_busy_share, MARGIN)
    field = "latency_us" if claim.quantity == "latency" else "energy_mj"
    of, over = (_interval(row, field, error) for row in own)
    return of.over(over) if of and over else None


def _interval(row: Row, field: str, error: float) -> Figure | None:
    """A row's figure: a latency with the interval of its median, an energy, a single reading,
    within `MARGIN`; a prediction within half of the model's error, which is that of a ratio.
    """
    value: float | None = getattr(row, field)
    if not value:
        return None
    if row.source == "predicted":
        return Figure.within(value, math.sqrt(1 + error) - 1)
    if field == "latency_us":
        return Figure(value, row.latency_ci_low_us or value, row.latency_ci_high_us or value)
    return Figure.within(value, math.sqrt(1 + MARGIN) - 1)


def _lacking(claim: Claim, problems: int) -> str:
    if claim.is_of_samples:
        return f"needs {FEWEST_SAMPLES} multi-head problems, has {problems}"
    if len(claim.problems) == 1:
        return claim.problems[0].label
    return f"has {problems} of {len(claim.problems)} problems, {_ends(claim.problems)}"


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
    """Ranges of the samples: ``batch 1 to 64, heads 8 to 64, context 1k to 512k, head_dim 64,
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
