"""Facts of runs beside their figures: versions, boards, how rows ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from leanbench.report.evidence.sources import Source

if TYPE_CHECKING:
    from leanbench.records.row import Row


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
    """The number of rows that ended so."""
    status, _, kernel = status_and_kernel.partition(" ")
    return str(sum(row.status == status for row in _rows(sources, kernel)))


def _schedules(sources: Sequence[Source], kernel: str) -> str:
    """How many rows are of each schedule."""
    counts = Counter(row.schedule for row in _rows(sources, kernel) if row.schedule)
    return ", ".join(f"{schedule} {count}" for schedule, count in counts.most_common())


def _rows(sources: Sequence[Source], kernel: str) -> Iterator[Row]:
    for source in sources:
        for row, _ in source.run.results:
            if row.kernel == kernel:
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
}
