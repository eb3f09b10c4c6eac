"""The paper's claims and what runs say of the same problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from leanbench.model.paper import SAMPLES, TOLERANCE, Claim, claims
from leanbench.report.compare.match import fastest
from leanbench.report.document import Section, Text, sentences, table
from leanbench.report.frame import gpu_name
from leanbench.report.series import tokens

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

#: Kernels' rows, by problem.
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
    """Figures of one run for one problem of a claim."""

    value: float
    #: Of the newer of its rows.
    time: str


def claims_section(results: Results) -> Section:
    """Every claim, in a table for each GPU, L2 state and source."""
    hint = (
        "LeanAttention (arXiv 2405.10480) on an A100-80GB with FlashAttention 2.5.6: LA is lean,"
        f" FA2 is fa2, FD is fixed_split. A figure holds within {TOLERANCE:.0%} of the paper's, a"
        " bound on its side. Occupancy is the SM busy share where it was measured (--occupancy),"
        " the schedule's quantisation efficiency in a prediction. The paper does not say which"
        f" problems its samples were: {SAMPLES} or more multi-head problems of a run stand for"
        " them, named next to the figure."
    )
    if results.are_several:
        hint += (
            " Each claim is of one run: of the sweep made for it, else the one that measured it"
            " last."
        )
    sections = [
        _table_section(name, of_group, predicted=predicted, several=results.are_several)
        for name, predicted, of_group in claims_of_runs(results.runs)
    ]
    return Section("claims", "The paper's claims", (sentences(hint, layout="hint"), *sections))


def _table_section(
    name: str, of_group: Sequence[Measured], *, predicted: bool, several: bool
) -> Section:
    word = "predicted" if predicted else "measured"
    lacking = f"not {word} in {'these runs' if several else 'this run'}"
    verdicts = [measured.verdict for measured in of_group]
    counts = (
        f"{len(verdicts)} claims: {verdicts.count('holds')} hold,"
        f" {sum(verdict not in ('holds', '') for verdict in verdicts)} do not,"
        f" {verdicts.count('')} {lacking}"
    )
    rows = [
        [
            measured.claim.figure,
            measured.claim.words,
            measured.claim.paper_words,
            measured.words,
            Text(measured.verdict or lacking, _role(measured)),
            measured.run,
            measured.cell,
        ]
        for measured in of_group
    ]
    headings = ["figure", "claim", "paper:", f"{word}:", "verdict", "run", "cell"]
    if not several:
        headings.remove("run")
        rows = [[*row[:5], row[6]] for row in rows]
    folded = "closed" if verdicts.count("") == len(verdicts) else "open"
    every = table(headings, rows, keep_empty=True)
    return Section("", f"{name}, {word}: {counts}", (every,), folded)


def _role(measured: Measured) -> str:
    return {"holds": "holds", "": "lacking"}.get(measured.verdict, "fails")


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
    by_run = {run: _by_problem(rows) for run, rows in results.items()}
    return [_measured(claim, by_run, sweeps) for claim in claims()]


def _by_problem(results: Iterable[tuple[Row, AttentionProblem]]) -> Fastest:
    rows: dict[AttentionProblem, dict[str, Row]] = {}
    same = ((row, _same(problem)) for row, problem in results)
    for (problem, kernel), row in fastest(same).items():
        rows.setdefault(problem, {})[kernel] = row
    return rows


def _measured(claim: Claim, runs: Mapping[str, Fastest], sweeps: Mapping[str, str]) -> Measured:
    figures = {run: _figures(claim, rows) for run, rows in runs.items()}
    needed = SAMPLES if claim.is_of_samples else len(claim.problems)
    whole = {run: of_run for run, of_run in figures.items() if len(of_run) >= needed}
    if not whole:
        most = max(map(len, figures.values()), default=0)
        return Measured(claim, None, "", _lacking(claim, most), "")
    newest = {run: max(figure.time for figure in of_run.values()) for run, of_run in whole.items()}
    run = max(whole, key=lambda run: (sweeps.get(run) == claim.sweep, newest[run]))
    values = {problem: figure.value for problem, figure in whole[run].items()}
    value = claim.value(list(values.values()))
    verdict = (
        "holds"
        if claim.holds(value)
        else f"{'less' if value < claim.paper else 'more'} than the paper"
    )
    return Measured(claim, value, verdict, _cell(claim, values), run)


def _figures(claim: Claim, rows: Fastest) -> dict[AttentionProblem, _Figure]:
    problems = filter(_is_sample, rows) if claim.is_of_samples else map(_same, claim.problems)
    figure = _figure if claim.prompt is None else _request_figure
    figures = {problem: figure(claim, problem, rows) for problem in problems}
    return {problem: figure for problem, figure in figures.items() if figure is not None}


def _same(problem: AttentionProblem) -> AttentionProblem:
    """A ragged batch of equal lengths is a uniform one."""
    lengths = {*problem.contexts} if problem.is_ragged else ()
    return replace(problem, context=problem.max_context) if len(lengths) == 1 else problem


def _is_sample(problem: AttentionProblem) -> bool:
    """The paper's samples differ in batch, context and heads; multi-head attention over a
    contiguous cache.
    """
    return problem.group_size == 1 and not problem.special.keys() - {"dtype", "kv_layout"}


def _request_figure(claim: Claim, problem: AttentionProblem, rows: Fastest) -> _Figure | None:
    """Of a request to a whole model: its prompt's time is that of the step right after it."""
    prompts = rows.get(claim.prompt_of(problem), {}).values()
    prefill_us = next((row.prefill_us for row in prompts if row.prefill_us), None)
    own = rows.get(problem, {})
    of, over = own.get(claim.of), own.get(claim.over or claim.of)
    if not (prefill_us and of and over and of.latency_us and over.latency_us):
        return None
    of_us, output_us = claim.request_us(problem, prefill_us, of.latency_us)
    over_us, _ = claim.request_us(problem, prefill_us, over.latency_us)
    value = output_us / of_us if claim.quantity == "decode share" else of_us / over_us
    return _Figure(value, max(of.time, over.time))


def _figure(claim: Claim, problem: AttentionProblem, by_problem: Fastest) -> _Figure | None:
    rows = by_problem.get(problem, {})
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


def _lacking(claim: Claim, problems: int) -> str:
    if claim.is_of_samples:
        return f"needs {SAMPLES} multi-head problems, has {problems}"
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
