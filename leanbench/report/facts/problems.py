"""Each problem's figures in one line, its kernels side by side and the fastest marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.core.quantities import TIMED
from leanbench.decode import BOUND
from leanbench.report.compare.ratios import Margin, margin_of
from leanbench.report.document import Block, Column, Section, Table, Text, Words, without_shared
from leanbench.report.frame import baseline_of, gpu_name, where

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

#: Rows of one problem, by kernel.
ByKernel = Mapping[str, "Row"]
#: Rows of a table on a terminal.
ROWS = 40


@dataclass(frozen=True)
class _Alike:
    """Rows of one run, source and state of the L2."""

    problems: Mapping[str, ByKernel]
    kernels: Sequence[str]
    #: The kernel that the others are compared with.
    baseline: str
    #: Of their latencies.
    margin: Margin

    @property
    def others(self) -> list[str]:
        """The kernels that are compared with the baseline."""
        if not self.has_baseline or self.baseline == BOUND:
            return []
        return [name for name in self.kernels if name not in (self.baseline, BOUND)]

    @property
    def stream_k(self) -> str | None:
        """The kernel that chooses among schedules: the baseline, or else the first that does."""
        choosing = {
            row.kernel
            for of in self.problems.values()
            for row in of.values()
            if row.decomposition == "stream_k"
        }
        return next((name for name in (self.baseline, *self.kernels) if name in choosing), None)

    @property
    def has_baseline(self) -> bool:
        """Whether the row ran."""
        return self.baseline in self.kernels


def problems_section(results: Results) -> Section:
    """Tables of latency, energy and occupancy; predicted and measured rows, and those of a cold and
    a warm L2, have tables of their own.
    """
    blocks: list[Block] = []
    frame = results.frame
    for run in results.runs:
        groups: dict[tuple[str, str], list[tuple[Row, AttentionProblem]]] = {}
        for row, problem in run.results:
            groups.setdefault((row.source, row.cache), []).append((row, problem))
        for (source, cache), of_group in groups.items():
            warm = ", warm L2" if cache == "warm" else ""
            rest = f", see the rows in {run.directory}"
            margin = _margin(of_group, source, gpu_name(run.manifest))
            keys = [run.name, source, cache]
            part = where(frame, (frame[["run", "source", "cache"]] == keys).all(axis=1))
            rows = _alike(of_group, baseline_of(part), margin)
            blocks += [replace(block, rest=rest) for block in _tables(rows, source, warm)]
    return Section("problems", "", tuple(blocks))


def _tables(rows: _Alike, source: str, warm: str) -> Iterable[Table]:
    yield _latency(rows, f"{source} latency in µs{warm}")
    every = [row for of in rows.problems.values() for row in of.values()]
    if any(row.energy_mj is not None for row in every):
        yield _energy(rows, f"{source} energy of one launch in mJ{warm}")
    if any(row.sm_busy_share is not None for row in every):
        yield _occupancy(rows, f"{source} SM busy share (schedule: CTA slots with work){warm}")


def _margin(results: Sequence[tuple[Row, AttentionProblem]], source: str, gpu: str) -> Margin:
    ok = dict.fromkeys(row.kernel for row, _ in results if row.status == "ok")
    return margin_of(source, [gpu], ok)


def _alike(
    results: Sequence[tuple[Row, AttentionProblem]], baseline: str, margin: Margin
) -> _Alike:
    """A kernel that supports no problem has no column, unless none supports any."""
    problems: dict[str, dict[str, Row]] = {}
    for row, problem in results:
        problems.setdefault(problem.label, {})[row.kernel] = row
    supported = dict.fromkeys(row.kernel for row, _ in results if row.status != "unsupported")
    kernels = list(supported or dict.fromkeys(row.kernel for row, _ in results))
    return _Alike(problems, kernels, baseline, margin)


def _latency(rows: _Alike, title: str) -> Table:
    """Each kernel's latency, how many times faster the baseline is, and how near to the limit."""
    columns: dict[str, Callable[[ByKernel], Words]] = {
        name: lambda of, name=name: _latency_cell(of, name, rows.margin) for name in rows.kernels
    }
    columns |= _ratios(rows, lambda row: row.latency_us)
    if rows.has_baseline:
        columns[f"{rows.baseline} TB/s"] = _of_baseline(
            rows, lambda row: _figure(row.bandwidth_tb_s, ".2f")
        )
        columns["of read floor"] = _of_baseline(
            rows, lambda row: _figure(row.read_floor_share, ".0%")
        )
        columns[f"{rows.baseline} tokens/s"] = _of_baseline(
            rows, lambda row: _figure(row.tokens_per_s, ".4g")
        )
        columns["attention"] = _of_baseline(rows, lambda row: _figure(row.attention_share, ".0%"))
    if rows.stream_k is not None:
        name = rows.stream_k
        columns[f"{name} schedule"] = lambda of: (of[name].schedule or "") if name in of else ""
    return _table(rows, title, columns)


def _energy(rows: _Alike, title: str) -> Table:
    """Each kernel's energy, how many times that of the baseline it is, and what the baseline draws
    when sustained.
    """

    def energy(of: ByKernel, name: str) -> str:
        return _status(of.get(name), lambda row: _four_digits(row.energy_mj))

    columns: dict[str, Callable[[ByKernel], Words]] = {
        name: lambda of, name=name: energy(of, name) for name in rows.kernels
    }
    columns |= _ratios(rows, lambda row: row.energy_mj)
    if rows.has_baseline:
        columns[f"{rows.baseline} over floor"] = _of_baseline(
            rows, lambda row: _times(row.energy_mj, row.energy_floor_mj)
        )
        columns[f"{rows.baseline} mean W"] = _of_baseline(
            rows, lambda row: _figure(row.sustained_power_w, ".0f")
        )
        columns[f"{rows.baseline} sustained µs"] = _of_baseline(
            rows, lambda row: _figure(row.sustained_us, ".1f")
        )
    return _table(rows, title, columns)


def _occupancy(rows: _Alike, title: str) -> Table:
    """Each kernel's SM busy share; in brackets the share of CTA slots x time that its schedule
    gives work.
    """

    def busy(row: Row) -> str:
        slots = row.quantisation_efficiency
        return _figure(row.sm_busy_share, ".0%") + ("" if slots is None else f" ({slots:.0%})")

    return _table(
        rows,
        title,
        {name: lambda of, name=name: _status(of.get(name), busy) for name in rows.kernels},
    )


def _table(rows: _Alike, title: str, columns: Mapping[str, Callable[[ByKernel], Words]]) -> Table:
    """A line for each problem; what all problems share stands in the title. Columns without a
    figure are left out.
    """
    shared, short = without_shared(list(rows.problems))
    title += f", all {shared}" if shared else ""
    cells = {name: [text(of) for of in rows.problems.values()] for name, text in columns.items()}
    shown = {name: of for name, of in cells.items() if {*map(str, of)} - {"-", ""}}
    marked = any(isinstance(cell, Text) for of in shown.values() for cell in of)
    return Table(
        (Column("problem"), *(Column(name, numeric=True) for name in shown)),
        tuple(zip(short, *shown.values(), strict=True)),
        title,
        most=ROWS,
        note=f"* ahead of all others by more than {rows.margin.words}" if marked else "",
    )


def _latency_cell(of: ByKernel, name: str, margin: Margin) -> Words:
    # In front, so that numbers stay above one another.
    row = of.get(name)
    mark = "! " if row is not None and row.warnings else ""
    text = _status(row, lambda row: mark + _figure(row.latency_us, ".1f"))
    return Text(text, "best") if row is not None and _is_ahead(row, of, margin) else text


def _is_ahead(row: Row, of: ByKernel, margin: Margin) -> bool:
    """Return True if the row is faster than every other timed one by more than the margin."""
    timed = {
        other.kernel: other.latency_us
        for other in of.values()
        if other.status in TIMED and other.kernel != BOUND and other.latency_us
    }
    own = timed.pop(row.kernel, None)
    return own is not None and bool(timed) and min(timed.values()) > own * (1 + margin.share)


def _of_baseline(rows: _Alike, text: Callable[[Row], str]) -> Callable[[ByKernel], Words]:
    return lambda of: text(of[rows.baseline]) if rows.baseline in of else "-"


def _ratios(
    rows: _Alike, value: Callable[[Row], float | None]
) -> dict[str, Callable[[ByKernel], Words]]:
    def ratio(of: ByKernel, name: str) -> str:
        both = of.get(name), of.get(rows.baseline)
        # A wrong result's latency is no latency.
        usable = [row for row in both if row is not None and row.status in TIMED]
        return _times(*map(value, usable)) if len(usable) > 1 else "-"

    return {
        f"{rows.baseline} vs {name}": lambda of, name=name: ratio(of, name) for name in rows.others
    }


def _status(row: Row | None, text: Callable[[Row], str]) -> str:
    """What `text` makes of a row, behind the row's status where that is not `ok`; empty without a
    row.
    """
    if row is None:
        return ""
    return text(row) if row.status == "ok" else f"{row.status} {text(row)}".rstrip(" -")


def _times(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "-"


def _four_digits(value: float | None) -> str:
    return _figure(value, ",.0f") if value is not None and value >= 1000 else _figure(value, "#.4g")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
