"""Section of the paper's claims with the figures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leanbench.paper.claim import BASELINES, FEWEST_SAMPLES
from leanbench.paper.measured import MeasuredClaim, claims_of_runs, verdict_words
from leanbench.report.document import Section, Text, sentences, table

if TYPE_CHECKING:
    from leanbench.report.facts.results import Results


def claims_section(results: Results) -> Section:
    """Make a table of all claims for each GPU, L2 state and source that has one of them."""
    hint = (
        "LeanAttention (arXiv 2405.10480) on an A100-80GB with FlashAttention 2.5.6. LA is lean;"
        " FA2, FD and FlashInfer are the kernels in the column “with”. In brackets: the 95%"
        " interval from those of the medians; 1% to either side for energies and occupancy; the"
        " model's error for predictions. Holds: the interval contains the paper's figure, to its"
        " digits, and not 1; for a bound, it lies on its side. Reversed: it lies on the other side"
        " of 1. Means of ratios are geometric. Occupancy is the measured SM busy share"
        " (--occupancy), in predictions the schedule's quantisation efficiency. The paper does not"
        f" name the problems of its samples: {FEWEST_SAMPLES} or more multi-head problems of a run"
        " stand for them, named next to the figure."
    )
    if results.are_several:
        hint += (
            " Each claim is of one run: of a sweep made for it, else the one that measured it last."
        )
    sections = [
        _table_section(name, claims, predicted=predicted, several=results.are_several)
        for name, predicted, claims in claims_of_runs(results.runs)
        if any(measured.figure is not None for measured in claims)
    ]
    blocks = (sentences(hint, layout="hint"), *sections) if sections else ()
    return Section("claims", "The paper's claims", blocks)


def _table_section(
    name: str, claims: Sequence[MeasuredClaim], *, predicted: bool, several: bool
) -> Section:
    word = "predicted" if predicted else "measured"
    missing = f"not {word} in {'these runs' if several else 'this run'}"
    headings = ["figure", "claim", "paper:", "with", f"{word}:", "verdict", "run", "cell"]
    rows = [
        [
            measured.claim.figure,
            measured.claim.words,
            measured.claim.paper_words,
            " and ".join(measured.baselines.others(measured.claim)),
            measured.words,
            Text(measured.verdict or missing, _role(measured)),
            measured.run,
            measured.cell,
        ]
        for measured in claims
    ]
    if not several:
        headings.remove("run")
        rows = [[*row[:6], row[7]] for row in rows]
    heading = f"{name}, {word}: {_counts(claims, missing)}"
    return Section("", heading, (table(headings, rows, keep_empty=True),), "open")


def _counts(claims: Sequence[MeasuredClaim], missing: str) -> str:
    """Count claims and verdicts: ``31 claims; with fa2 and fixed_split 5 hold, 2 more``."""
    distinct = {(measured.claim.figure, measured.claim.words) for measured in claims}
    counted = [f"{len(distinct)} claims"]
    for baselines in BASELINES:
        if words := verdict_words(claims, baselines):
            counted.append(f"with {' and '.join(baselines.names)} {words}")
    without = sum(measured.figure is None for measured in claims)
    return "; ".join([*counted, *([f"{without} {missing}"] if without else [])])


def _role(measured: MeasuredClaim) -> str:
    if measured.figure is None:
        return "lacking"
    if measured.claim.is_met(measured.figure):
        return "holds"
    return "lacking" if measured.verdict == "not resolved" else "fails"
