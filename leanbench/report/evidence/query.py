"""Queries: one figure of a run, such as ``geomean libraries/lean where NHD as x``.

    [VERB] KERNEL[.FIELD][/KERNEL[.FIELD]] [>= NUMBER] [with AXIS=VALUE ...]
        [where WORD ...] [as FORMAT]

KERNEL is one, several with commas (the fastest of them) or ``libraries``: all but this project's
own. FIELD is a quantity of a row, the latency unless given. ``with`` asks for another problem,
``where`` for those whose labels have these words (``!NHD``: have not). Without a verb just one
problem must be left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, fsum, log
from operator import ge, gt, le, lt
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from leanbench.core.axes import AXES
from leanbench.core.errors import UserError

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row

TIMED = ("ok", "noisy")
#: Follows a figure that was timed with noise.
NOISE = "\\*"
LIBRARIES = "libraries"

_QUERY = re.compile(
    r"(?:(?P<verb>geomean|mean|median|min|max|argmin|argmax|count|share) )?"
    r"(?P<over>[\w.,]+)(?:/(?P<under>[\w.,]+))?"
    r"(?: (?P<sign>>=|<=|>|<) (?P<bound>[\d.]+))?"
    r"(?: with (?P<axes>[\w-]+=\S+(?: [\w-]+=\S+)*))?"
    r"(?: where (?P<words>(?:(?! as ).)+))?"
    r"(?: as (?P<format>\S+))?"
)
_SIGNS: dict[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt}
_LARGE = re.compile(r"(!?[a-z]+)(\d+)([km])")
_SUFFIXES = {"k": 1024, "m": 1024**2}


def geomean(values: Sequence[float]) -> float:
    return exp(fsum(map(log, values)) / len(values))


_VERBS: dict[str, Callable[[Sequence[float]], float]] = {
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
    "more": lambda ratio: f"{ratio - 1:.1%}",
    "mb": lambda size: f"{size / 1e6:.0f}",
    "0": lambda value: f"{value:.0f}",
    "1": lambda value: f"{value:.1f}",
    "2": lambda value: f"{value:.2f}",
}


@dataclass(frozen=True)
class Measured:
    """A problem of a run, and the fastest timed row of each kernel, or else any."""

    problem: AttentionProblem
    rows: Mapping[str, Row]


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
        chosen = [of for of in self.problems if has_words(of.problem.label, words)]
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
        if parsed["axes"]:
            wanted = with_axes(at.problem, parsed["axes"])
            if wanted == at.problem:
                return ""
            at = next((of for of in self.problems if of.problem == wanted), Measured(wanted, {}))
        value, noisy = self._value(parsed, at)
        if value is None:
            return _ending(at, parsed["over"])
        return _format(parsed)(value) + (NOISE if noisy else "")

    def _value(self, parsed: Mapping[str, Any], at: Measured) -> tuple[float | None, bool]:
        """The figure of a problem, and whether a row of it was timed with noise."""
        over, noisy = self._operand(parsed["over"], at)
        if parsed["under"] is None or over is None:
            return over, noisy
        under, also_noisy = self._operand(parsed["under"], at)
        return (over / under if under else None), noisy or also_noisy

    def _operand(self, text: str, at: Measured) -> tuple[float | None, bool]:
        names, _, field = text.partition(".")
        rows = [row for name, row in at.rows.items() if self._is_named(name, names)]
        timed = [row for row in rows if row.status in TIMED]
        if not timed:
            return None, False
        row = min(timed, key=lambda row: row.latency_us or 0)
        return getattr(row, field or "latency_us"), row.status == "noisy"

    def _is_named(self, kernel: str, names: str) -> bool:
        if names == LIBRARIES:
            return not kernel.startswith(self.own)
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
    return _format(parsed)(values[0] if verb is None else _VERBS[verb](values))


def _rank(row: Row) -> float:
    timed = row.status in TIMED and row.latency_us is not None
    return row.latency_us if timed and row.latency_us else float("inf")


def has_words(label: str, words: str) -> bool:
    """Whether a problem's label has all these words, and none that follow a ``!``."""
    present = set(label.split())
    return all(
        (word[1:] not in present) if word.startswith("!") else word in present
        for word in map(_in_full, words.split())
    )


def _in_full(word: str) -> str:
    """``n4096`` for ``n4k``."""
    large = _LARGE.fullmatch(word)
    return f"{large[1]}{int(large[2]) * _SUFFIXES[large[3]]}" if large else word


def with_axes(problem: AttentionProblem, axes: str) -> AttentionProblem:
    """The problem with other values, ``lengths_on=host capacity=exact``."""
    pairs = [pair.partition("=") for pair in axes.split()]
    return replace(problem, **{name: AXES[name].parse(text)[0] for name, _, text in pairs})


def size_words(problem: AttentionProblem) -> str:
    """Batch x heads x context x head_dim, then layout and pages where they are not the default."""
    words = problem_words(problem)
    page = f", pages of {problem.page_size}" if problem.page_size else ""
    layout = f", {problem.kv_layout}" if problem.kv_layout != "HND" else ""
    return f"{words['size']}{layout}{page}"


def problem_words(problem: AttentionProblem) -> dict[str, str]:
    """What a table can say of a problem."""
    heads = f"{problem.q_heads}"
    if problem.kv_heads != problem.q_heads:
        heads += f"/{problem.kv_heads}"
    tokens = _tokens(problem)
    return {
        "batch": f"{problem.batch}",
        "heads": heads,
        "context": tokens,
        "head_dim": f"{problem.head_dim}",
        "size": f"{problem.batch} x {heads} x {tokens} x {problem.head_dim}",
        "besides": _besides(problem),
        "mb": FORMATS["mb"](problem.kv_bytes),
        "label": problem.label,
    }


def _besides(problem: AttentionProblem) -> str:
    """Layout, pages, and whether the host knows the lengths."""
    words = [problem.kv_layout]
    words += [f"pages of {problem.page_size}"] if problem.page_size else []
    words += ["lengths on the device"] if problem.lengths_on == "device" else []
    return ", ".join(words)


def _tokens(problem: AttentionProblem) -> str:
    if problem.is_ragged:
        return f"{problem.total_context / problem.batch:,.0f} in the mean"
    tokens = problem.max_context
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def _parse(query: str) -> dict[str, Any]:
    match = _QUERY.fullmatch(query)
    if match is None:
        raise UserError(f"{query!r} is no query, write for example 'geomean cudnn/lean as x'")
    return match.groupdict()


def _format(parsed: Mapping[str, Any]) -> Callable[[float], str]:
    name = parsed["format"] or ("x" if parsed["under"] else "us")
    if name not in FORMATS:
        raise UserError(f"format {name!r} is not known, choose from {', '.join(FORMATS)}")
    return FORMATS[name]


def _ending(at: Measured, operand: str) -> str:
    """How a row without a figure ended; nothing where the kernel does not take the problem."""
    rows = [at.rows[name] for name in operand.partition(".")[0].split(",") if name in at.rows]
    ended = [row.status for row in rows if row.status not in (*TIMED, "unsupported")]
    return ended[0].replace("_", " ") if ended else ""
