"""Queries: one figure of a run, such as ``geomean libraries/lean where NHD as x``.

    [VERB] KERNEL[.FIELD] [with AXIS=VALUE ...][/KERNEL[.FIELD] [with AXIS=VALUE ...]]
        [>= NUMBER] [where WORD ...] [as FORMAT]

KERNEL is one, several with commas (the fastest of them), ``libraries``: all but this project's own,
or ``others``: all but LeanAttention's; the bound of whole models is in neither. FIELD is a quantity
of a row, the latency unless given, or ``request_us``: of the request to a whole model that the step
is in the middle of.
``with`` takes the row before it from another problem. ``where`` asks for problems whose labels have
these words (``nragged*``; ``!NHD``: have not), that are of this size (``5..50MB`` of K and V, on
each GPU; ``8..17tiles``: output tiles, ``n16k..``: tokens; the second excluded), or on which a
kernel's schedule was this (``lean=one-*``; ``!lean=one-*``: was not). Without a verb just one
problem must be left. In a table's column ``name`` gives the kernel itself, of the fastest
cross-check where that is the field, or another field, which is a word. Besides, a run says
``problems``, ``boards``, ``date``, ``kernels``, ``version PACKAGE``, ``ended STATUS [KERNEL]`` (the
number of such rows), ``schedules KERNEL`` (how many rows are of each), ``ran PATTERN KERNEL`` (the
number of rows on whose GPU a kernel of such a name ran), ``interval [KERNEL]`` (the furthest that a
95% interval reaches from its median) and ``crosscheck [KERNEL]`` (the furthest that the cross-check
is from the latency).

    [VERB] /PATTERN/ [as FORMAT]

asks a log, or a file of a run: what the pattern's group finds first, or the mean, median, lowest or
highest of all that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import exp, fsum, log
from operator import ge, gt, le, lt
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError, nearest
from leanbench.core.problem import AttentionProblem
from leanbench.core.quantities import TIMED
from leanbench.decode import BOUND
from leanbench.report.evidence.wording import has_words, size_words, sizes, with_axes
from leanbench.report.frame import BASELINE

if TYPE_CHECKING:
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

#: Follows a figure that was timed with noise.
NOISE = "\\*"
#: A field that rows do not have: a prompt and an output, as the paper's figure 10 has them.
REQUEST = "request_us"
LATENCY, CROSSCHECK = "latency_us", "crosscheck_us"
LIBRARIES = "libraries"
OTHERS = "others"

_OPERAND = r"[\w.,]+(?: with [\w-]+=[^\s/]+(?: [\w-]+=[^\s/]+)*)?"
_QUERY = re.compile(
    r"(?:(?P<verb>geomean|mean|median|min|max|argmin|argmax|count|share|name) )?"
    rf"(?P<over>{_OPERAND})(?:/(?P<under>{_OPERAND}))?"
    r"(?: (?P<sign>>=|<=|>|<) (?P<bound>[\d.]+))?"
    r"(?: where (?P<words>(?:(?! as ).)+))?"
    r"(?: as (?P<format>\S+))?"
)
_SIGNS: dict[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}


def geomean(values: Sequence[float]) -> float:
    return exp(fsum(map(log, values)) / len(values))


VERBS: dict[str, Callable[[Sequence[float]], float]] = {
    "geomean": geomean,
    "mean": fmean,
    "median": median,
    "min": min,
    "max": max,
}


def _four_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


#: How figures are written.
FORMATS: dict[str, Callable[[float], str]] = {
    "us": _four_digits,
    "ms": lambda us: _four_digits(us / 1e3),
    "x": lambda ratio: f"{ratio:.1f}x" if ratio >= 9.995 else f"{ratio:.2f}x",
    "x3": lambda ratio: f"{ratio:.3f}x",
    "%": lambda share: f"{share:.0%}",
    "%1": lambda share: f"{share:.1%}",
    "more": lambda ratio: f"{ratio - 1:z.1%}",
    "0": lambda value: f"{value:.0f}",
    "1": lambda value: f"{value:.1f}",
    "2": lambda value: f"{value:.2f}",
    "MB": lambda size: f"{size / 1e6:,.0f} MB",
    "GB": lambda size: f"{size / 1e9:.2f} GB",
}


@dataclass(frozen=True)
class Measured:
    """A problem of a run, and the fastest timed row of each kernel, or else any."""

    problem: AttentionProblem
    rows: Mapping[str, Row]

    @cached_property
    def _label(self) -> frozenset[str]:
        return frozenset(self.problem.label.split())

    @cached_property
    def _sizes(self) -> Mapping[str, float]:
        return sizes(self.problem)

    def has_words(self, words: str) -> bool:
        """As leanbench.report.evidence.wording.has_words, and whether kernels ran as words such as
        ``lean=one-*`` say: the pattern of a schedule.
        """
        of_label = []
        for word in words.split():
            kernel, _, schedule = word.removeprefix("!").partition("=")
            if kernel not in self.rows:
                of_label.append(word)
                continue
            ran = (self.rows[kernel].schedule or "").replace(" ", "-")
            if fnmatchcase(ran, schedule) == word.startswith("!"):
                return False
        return has_words(self._label, self._sizes, " ".join(of_label))


@dataclass(frozen=True)
class Figures:
    """What can be asked of runs."""

    runs: tuple[Run, ...]
    #: Beginnings of the names of this project's kernels.
    own: tuple[str, ...]

    @cached_property
    def problems(self) -> list[Measured]:
        """In the order of the rows."""
        return measured(self.runs)

    def answer(self, query: str) -> str:
        """The figure that a query asks for, written.

        Raises:
            UserError: it is no query, or has no answer.
        """
        parsed = _parse(query)
        words = parsed["words"] or ""
        chosen = [of for of in self.problems if of.has_words(words)]
        pairs = [(value, of) for of in chosen if (value := self._value(parsed, of)[0]) is not None]
        if not pairs:
            raise UserError(f"no timed row answers {query!r}: mend the query, or name another run")
        if parsed["verb"] is None and len(pairs) > 1:
            labels = ", ".join(of.problem.label for _, of in pairs[:3])
            raise UserError(f"{query!r} has {len(pairs)} answers ({labels}): say where")
        return _summary(parsed, pairs)

    def cell(self, query: str, at: Measured) -> str:
        """The figure of one problem; empty where the kernel does not take it."""
        parsed = _parse(query)
        if parsed["verb"] == "name":
            row, field = self._row(parsed["over"], at)
            asked = "kernel" if field in ("", CROSSCHECK) else field
            return str(getattr(row, asked) or "") if row else ""
        value, noisy = self._value(parsed, at)
        if value is None:
            return self._ending(parsed["over"], at)
        return _format(parsed)(value) + (NOISE if noisy else "")

    def _value(self, parsed: Mapping[str, Any], at: Measured) -> tuple[float | None, bool]:
        """The figure of a problem, and whether a row of it was timed with noise."""
        over, noisy = self._operand(parsed["over"], at)
        if parsed["under"] is None or over is None:
            return over, noisy
        under, also_noisy = self._operand(parsed["under"], at)
        return (over / under if under else None), noisy or also_noisy

    def value(self, query: str, at: Measured) -> float | None:
        """The figure of one problem, not written."""
        return self._value(_parse(query), at)[0]

    def holds(self, query: str, at: Measured) -> bool:
        """Whether the figure of one problem is as a query with a bound says."""
        parsed = _parse(query)
        value = self._value(parsed, at)[0]
        return value is not None and _SIGNS[parsed["sign"]](value, float(parsed["bound"]))

    def _operand(self, text: str, at: Measured) -> tuple[float | None, bool]:
        row, field = self._row(text, at)
        if row is None:
            return None, False
        is_noisy = row.status == "noisy"
        if field == REQUEST:
            return self._request_us(row), is_noisy
        if field and field not in type(row).model_fields:
            raise UserError(
                f"a row has no field {field!r}, {nearest(field, type(row).model_fields)}"
            )
        return getattr(row, field or LATENCY), is_noisy

    def _request_us(self, row: Row) -> float | None:
        """The prompt's time, of the step right after it, and the output's at the pace of this step;
        None without a prompt.
        """
        step = AttentionProblem.from_dict(row.problem)
        for of in self.problems:
            prefills = [other.prefill_us for other in of.rows.values() if other.prefill_us]
            # Requests have prompts of one length.
            if prefills and replace(step, context=of.problem.context) == of.problem:
                tokens = 2 * (step.max_context - of.problem.max_context)
                return prefills[0] + tokens * (row.latency_us or 0)
        return None

    def _row(self, operand: str, at: Measured) -> tuple[Row | None, str]:
        """The fastest timed row of an operand's kernels, by the cross-check where that is asked
        for, and its field.
        """
        text, _, axes = operand.partition(" with ")
        names, _, field = text.partition(".")
        rows = self._with(axes, at).rows.items()
        timed = [row for kernel, row in rows if self._is_timed(kernel, row, names)]
        clock = CROSSCHECK if field == CROSSCHECK else LATENCY
        return min(timed, key=lambda row: getattr(row, clock) or 0, default=None), field

    def _with(self, axes: str, at: Measured) -> Measured:
        """The problem with other values of these axes; without rows where that is itself."""
        if not axes:
            return at
        wanted = with_axes(at.problem, axes)
        others = (of for of in self.problems if of.problem == wanted != at.problem)
        return next(others, Measured(wanted, {}))

    def _ending(self, operand: str, at: Measured) -> str:
        """How a row without a figure ended; nothing where the kernel does not take the problem."""
        text, _, axes = operand.partition(" with ")
        rows = self._with(axes, at).rows
        names = text.partition(".")[0].split(",")
        ended = [rows[name].status for name in names if name in rows]
        bad = [status for status in ended if status not in (*TIMED, "unsupported")]
        return bad[0].replace("_", " ") if bad else ""

    def _is_timed(self, kernel: str, row: Row, names: str) -> bool:
        return row.status in TIMED and self._is_named(kernel, names)

    def _is_named(self, kernel: str, names: str) -> bool:
        if names == LIBRARIES:
            return not kernel.startswith((*self.own, BOUND))
        if names == OTHERS:
            return not kernel.startswith((BASELINE, BOUND))
        return kernel in names.split(",")


def measured(runs: Sequence[Run]) -> list[Measured]:
    """The problems of runs, in order."""
    by_problem: dict[tuple[int, AttentionProblem], dict[str, Row]] = {}
    for number, run in enumerate(runs):
        for row, problem in run.results:
            rows = by_problem.setdefault((number, problem), {})
            before = rows.get(row.kernel)
            if before is None or _rank(row) < _rank(before):
                rows[row.kernel] = row
    return [Measured(problem, rows) for (_, problem), rows in by_problem.items()]


def _summary(parsed: Mapping[str, Any], pairs: Sequence[tuple[float, Measured]]) -> str:
    """What the verb makes of the values of problems."""
    values = [value for value, _ in pairs]
    verb = parsed["verb"]
    if verb in ("argmin", "argmax"):
        extreme = min(values) if verb == "argmin" else max(values)
        return size_words(pairs[values.index(extreme)][1].problem)
    if verb in ("count", "share"):
        count = len(values)
        if parsed["sign"]:
            holds = _SIGNS[parsed["sign"]]
            count = sum(holds(value, float(parsed["bound"])) for value in values)
        return str(count) if verb == "count" else FORMATS["%"](count / len(values))
    return _format(parsed)(values[0] if verb is None else VERBS[verb](values))


def _rank(row: Row) -> float:
    timed = row.status in TIMED and row.latency_us is not None
    return row.latency_us if timed and row.latency_us else float("inf")


def _parse(query: str) -> dict[str, Any]:
    match = _QUERY.fullmatch(query)
    if match is None:
        raise UserError(f"{query!r} is no query, write for example 'geomean cudnn/lean as x'")
    return match.groupdict()


def _format(parsed: Mapping[str, Any]) -> Callable[[float], str]:
    return format_of(parsed["format"] or ("x" if parsed["under"] else "us"))


def format_of(name: str) -> Callable[[float], str]:
    """Raises UserError where there is none of that name."""
    if name not in FORMATS:
        raise UserError(f"format {name!r} is not known, choose from {', '.join(FORMATS)}")
    return FORMATS[name]
