"""The paper's claims as documents quote them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from leanbench.core.errors import UserError
from leanbench.model.claim import BASELINES, Baselines
from leanbench.records.reading import Run
from leanbench.report.facts.measured_claims import MeasuredClaim, claims_of_runs, verdict_words

#: A query that begins so asks how many claims hold with a kernel as FlashAttention-2: ``verdicts
#: fa2``.
VERDICTS = "verdicts "


def measured(runs: Sequence[Run]) -> list[MeasuredClaim]:
    """The claims that runs on one GPU, with one state of the L2, have measured."""
    groups = claims_of_runs(runs)
    if len(groups) != 1:
        names = ", ".join(name for name, _, _ in groups)
        raise UserError(f"claims are told of one GPU, these runs are of {names or 'none'}")
    [(_, _, claims)] = groups
    return [claim for claim in claims if claim.figure is not None]


def table(
    claims: Sequence[MeasuredClaim], chosen: Collection[str]
) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells of a line for each claim, a column for each pair of baselines.

    Args:
        chosen: claims that have lines; empty: all.

    Raises:
        UserError: a claim that is chosen was not measured.
    """
    by_name: dict[str, dict[Baselines, MeasuredClaim]] = {}
    for of in claims:
        by_name.setdefault(f"{of.claim.figure}: {of.claim.words}", {})[of.baselines] = of
    if lacking := [name for name in chosen if name not in by_name]:
        raise UserError(f"no run of the table has the claim {lacking[0]!r}: mend the table's rows")
    lines = [by_name[name] for name in chosen or by_name]
    columns = [baselines for baselines in BASELINES if any(baselines in line for line in lines)]
    names = [f"with `{baselines.fa2}`, `{baselines.fd}`" for baselines in columns]
    return ["figure", "claim", "paper", *names], [_cells(line, columns) for line in lines]


def _cells(line: Mapping[Baselines, MeasuredClaim], columns: Sequence[Baselines]) -> list[str]:
    claim = next(iter(line.values())).claim
    words = [
        f"{line[baselines].verdict}: {line[baselines].words}" if baselines in line else ""
        for baselines in columns
    ]
    return [claim.figure, claim.words, claim.paper_words, *words]


def verdicts(claims: Sequence[MeasuredClaim], query: str) -> str:
    """``6 hold, 17 less``: of the claims with the baselines that a query names.

    Raises:
        UserError: it names none.
    """
    name = query.removeprefix(VERDICTS)
    for baselines in BASELINES:
        if baselines.fa2 == name:
            return verdict_words(claims, baselines)
    known = ", ".join(baselines.fa2 for baselines in BASELINES)
    raise UserError(f"no baseline of the paper is {name!r}, choose from {known}")
