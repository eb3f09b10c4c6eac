"""Winners that change from one run to another, such as between two boards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import TIMED
from leanbench.core.registry import kernels
from leanbench.decode import BOUND
from leanbench.records.standing import Latency, Ratio, Standing, standing, standings
from leanbench.report.compare.core import Comparison, Selection
from leanbench.report.frame import BASELINE

#: Problem, choice of launch settings and L2 state.
_Cell = tuple[AttentionProblem, str, str]
#: Kernels of one side; the second takes the latent caches.
_OWN = (BASELINE, "lean_mla")


@dataclass(frozen=True)
class Flips:
    """Sides of the baseline against the fastest of other kernels, in two runs."""

    baseline: tuple[str, ...]
    #: True if the others are the libraries; False for all kernels of runs without libraries.
    are_libraries: bool
    problems: int
    base: Mapping[Standing, int]
    new: Mapping[Standing, int]
    #: Problems on which the baseline's median is below the others' in one run alone.
    by_median: int
    #: Problems on which it is ahead in one run and behind in the other.
    by_standing: int


def flips_of(comparison: Comparison) -> Flips | None:
    """Count the winners that change; None for two kernels, or without a kernel to compare with."""
    if comparison.base.kernel is not None:
        return None
    rows = [row for row in comparison.base.rows.values() if row.status in TIMED]
    names = list(dict.fromkeys(row.kernel for row in rows if row.kernel != BOUND))
    baseline = tuple(name for name in _OWN if name in names) or tuple(names[:1])
    known, others = kernels(), [name for name in names if name not in baseline]
    libraries = [name for name in others if name in known and known[name].is_peer]
    rivals = libraries or others
    base, new = (_ratios(side, baseline, rivals) for side in (comparison.base, comparison.new))
    both = [(base[cell], new[cell]) for cell in base if cell in new]
    if not both:
        return None
    share = comparison.margin.share
    return Flips(
        baseline,
        bool(libraries),
        len(both),
        standings((one for one, _ in both), share),
        standings((other for _, other in both), share),
        sum((one.value > 1) != (other.value > 1) for one, other in both),
        sum(
            {standing(one, share), standing(other, share)} == {"ahead", "behind"}
            for one, other in both
        ),
    )


def _ratios(side: Selection, baseline: Sequence[str], rivals: Sequence[str]) -> dict[_Cell, Ratio]:
    """Return the fastest rival's latency over the baseline's."""
    timed: dict[_Cell, dict[str, Latency]] = {}
    for (problem, name, request, cache), row in side.rows.items():
        if row.status in TIMED and row.latency_us:
            timed.setdefault((problem, request, cache), {})[name] = Latency.of(row)
    found = {}
    for cell, of in timed.items():
        own = [of[name] for name in baseline if name in of]
        others = [of[name] for name in rivals if name in of]
        if own and others:
            found[cell] = min(others).over(min(own))
    return found
