"""Facts of runs beside their figures: versions, boards, how rows ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from leanbench.core.errors import UserError
from leanbench.report.evidence.sources import Source

if TYPE_CHECKING:
    from leanbench.records.row import Row

#: Launches that take at most this are short: their cross-checks differ by a part of a microsecond.
_SHORT_US = 20


def fact(query: str, sources: Sequence[Source]) -> str | None:
    """What runs say to a query such as ``boards`` or ``version torch``; None where it is none."""
    word, _, argument = query.partition(" ")
    answer = _FACTS.get(word)
    return None if answer is None else answer(sources, argument)


def _version(sources: Sequence[Source], package: str) -> str:
    return _words(str(of.get(package)) for source in sources for of in source.environments)


def _date(sources: Sequence[Source], _: str) -> str:
    return _words(source.date for source in sources)


def _kernels(sources: Sequence[Source], _: str) -> str:
    return _words(kernels for source in sources for kernels in source.kernels)


def _boards(sources: Sequence[Source], _: str) -> str:
    return str(len({of.get("gpu_uuid") for source in sources for of in source.environments}))


def _problems(sources: Sequence[Source], _: str) -> str:
    return str(sum(len({problem for _, problem in of.run.results}) for of in sources))


def _ended(sources: Sequence[Source], status_and_kernel: str) -> str:
    """The number of rows that ended so, of a kernel or of all."""
    status, _, kernel = status_and_kernel.partition(" ")
    return str(sum(row.status == status for row in _rows(sources, kernel)))


def _schedules(sources: Sequence[Source], kernel: str) -> str:
    """How many rows are of each schedule."""
    counts = Counter(row.schedule for row in _rows(sources, kernel) if row.schedule)
    return ", ".join(f"{schedule} {count}" for schedule, count in counts.most_common())


def _ran(sources: Sequence[Source], pattern_and_kernel: str) -> str:
    """The number of rows of a kernel on whose GPU a kernel of such a name ran."""
    pattern, _, kernel = pattern_and_kernel.partition(" ")
    return str(
        sum(
            any(fnmatchcase(name, pattern) for name in row.gpu_kernels or ())
            for row in _rows(sources, kernel)
        )
    )


def _interval(sources: Sequence[Source], kernel: str) -> str:
    """The furthest that a 95% interval reaches from its median, over the median."""
    reaches = [_reach(row) for row in _rows(sources, kernel)]
    if not reaches:
        raise _no_rows(sources, "interval", kernel)
    return f"{max(reaches):.2%}"


def _reach(row: Row) -> float:
    median, low, high = row.latency_us, row.latency_ci_low_us, row.latency_ci_high_us
    if not median or low is None or high is None:
        return 0.0
    return max(median - low, high - median) / median


def _crosscheck(sources: Sequence[Source], kernel: str) -> str:
    """The furthest that the cross-check is from the latency, in long launches and in short ones."""
    pairs = [(row.latency_us, row.crosscheck_us) for row in _rows(sources, kernel)]
    timed = [(latency, other) for latency, other in pairs if latency and other]
    long = [abs(other / latency - 1) for latency, other in timed if latency > _SHORT_US]
    short = [abs(other - latency) for latency, other in timed if latency <= _SHORT_US]
    if not timed:
        raise _no_rows(sources, "crosscheck", kernel)
    above = f"{max(long, default=0):.1%} at most above {_SHORT_US} us"
    if not short:
        return above
    below = f"{max(short):.2f} us"
    return f"{above}, {below} below" if long else f"{below} at most below {_SHORT_US} us"


def _no_rows(sources: Sequence[Source], word: str, kernel: str) -> UserError:
    kernels = dict.fromkeys(row.kernel for row in _rows(sources, ""))
    wanted = f"{word} {kernel}".strip()
    of = f"kernel {kernel!r}" if kernel else "any kernel"
    what = "row" if word == "interval" else "row with a cross-check"
    return UserError(
        f"{wanted!r} finds no {what} of {of}: the runs have {', '.join(kernels) or 'none'}"
    )


def _rows(sources: Sequence[Source], kernel: str) -> Iterator[Row]:
    """Those of a kernel, or without its name all."""
    for source in sources:
        for row, _ in source.run.results:
            if kernel in ("", row.kernel):
                yield row


def _words(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


_FACTS: dict[str, Callable[[Sequence[Source], str], str]] = {
    "version": _version,
    "date": _date,
    "kernels": _kernels,
    "boards": _boards,
    "problems": _problems,
    "ended": _ended,
    "schedules": _schedules,
    "ran": _ran,
    "interval": _interval,
    "crosscheck": _crosscheck,
}
