"""Figures of each problem in one line, with the kernels side by side and the fastest marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leanbench.core.problem import MAX_Q_LEN
from leanbench.core.quantities import TIMED
from leanbench.core.work import flops
from leanbench.decode import BOUND
from leanbench.records.standing import Latency, measured_spread, standing
from leanbench.report.compare.ratios import Margin, margin_of
from leanbench.report.document import Block, Column, Section, Table, Text, Words, without_shared
from leanbench.report.frame import baseline_of, where

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.reading import Run
    from leanbench.records.row import Row
    from leanbench.report.facts.results import Results

#: Rows of a problem by kernel.
ByKernel = Mapping[str, "Row"]
#: Columns of a table: the cells of all problems by heading.
Columns = dict[str, Sequence[Words]]
#: Maximum number of rows of a table on a terminal.
ROWS = 40


@dataclass(frozen=True)
class _Group:
    """Rows of one run, source and state of the L2."""

    problems: Mapping[str, ByKernel]
    #: Arithmetic of the problems that have chunks of query tokens, by label.
    flops: Mapping[str, int]
    kernels: Sequence[str]
    #: Kernel that the others are compared with.
    baseline: str
    margin: Margin

    @property
    def rows(self) -> list[Row]:
        return [row for of in self.problems.values() for row in of.values()]

    @property
    def stream_k(self) -> str | None:
        """Kernel that chooses among schedules: the baseline, else the first that does."""
        choosing = {row.kernel for row in self.rows if row.decomposition == "stream_k"}
        return next((name for name in (self.baseline, *self.kernels) if name in choosing), None)

    def each_kernel(self, text: Callable[[Row], str]) -> Columns:
        """Make a column of each kernel."""
        return {name: self._column(name, lambda row: _status(row, text)) for name in self.kernels}

    def of_baseline(self, texts: Mapping[str, Callable[[Row], str]]) -> Columns:
        """Make columns of the baseline by heading."""
        if self.baseline not in self.kernels:
            return {}
        return {heading: self._column(self.baseline, text, "-") for heading, text in texts.items()}

    def _column(self, kernel: str, text: Callable[[Row], str], missing: str = "") -> list[Words]:
        of_kernel = (of.get(kernel) for of in self.problems.values())
        return [missing if row is None else text(row) for row in of_kernel]

    def ratios(self, field: str) -> Columns:
        """Make a column for each other kernel's value over the baseline's."""
        if self.baseline not in self.kernels or self.baseline == BOUND:
            return {}
        others = [name for name in self.kernels if name not in (self.baseline, BOUND)]
        return {
            f"{self.baseline} vs {name}": [
                self._ratio(of, name, field) for of in self.problems.values()
            ]
            for name in others
        }

    def _ratio(self, of: ByKernel, name: str, field: str) -> str:
        both = of.get(name), of.get(self.baseline)
        # The latency of a wrong result has no meaning.
        values = [getattr(row, field) for row in both if row is not None and row.status in TIMED]
        return _times(*values) if len(values) > 1 else "-"

    def table(self, title: str, columns: Columns) -> Table:
        """Make a line for each problem. The title names what all problems share."""
        shared, short = without_shared(list(self.problems))
        title += f", all {shared}" if shared else ""
        shown = {name: cells for name, cells in columns.items() if {*map(str, cells)} - {"-", ""}}
        marked = any(isinstance(cell, Text) for cells in shown.values() for cell in cells)
        return Table(
            (Column("problem"), *(Column(name, numeric=True) for name in shown)),
            tuple(zip(short, *shown.values(), strict=True)),
            title,
            most=ROWS,
            note=f"* ahead of all others {self.margin.ahead}" if marked else "",
        )


def problems_section(results: Results) -> Section:
    """Make tables of latency, energy and occupancy for each run, source and state of the L2."""
    blocks: list[Block] = []
    frame = results.frame
    for run in results.runs:
        groups: dict[tuple[str, str], list[tuple[Row, AttentionProblem]]] = {}
        for row, problem in run.results:
            groups.setdefault((row.source, row.cache), []).append((row, problem))
        for (source, cache), pairs in groups.items():
            keys = [run.name, source, cache]
            part = where(frame, (frame[["run", "source", "cache"]] == keys).all(axis=1))
            group = _group(run, pairs, source, baseline_of(part))
            rest = f", see the rows in {run.directory}"
            tables = _tables(group, source, ", warm L2" if cache == "warm" else "")
            blocks += [replace(table, rest=rest) for table in tables]
    return Section("problems", "", tuple(blocks))


def _group(
    run: Run, pairs: Sequence[tuple[Row, AttentionProblem]], source: str, baseline: str
) -> _Group:
    problems: dict[str, dict[str, Row]] = {}
    for row, problem in pairs:
        problems.setdefault(problem.label, {})[row.kernel] = row
    ok = dict.fromkeys(row.kernel for row, _ in pairs if row.status == "ok")
    # A kernel that supports no problem has no column, unless none supports any.
    supported = dict.fromkeys(row.kernel for row, _ in pairs if row.status != "unsupported")
    kernels = list(supported or dict.fromkeys(row.kernel for row, _ in pairs))
    spread = measured_spread(
        (row.process_spread for row, _ in pairs), run.manifest.get("process_spread")
    )
    margin = margin_of(source, [run.gpu_name()], ok, spread)
    chunks = {problem.label: flops(problem) for _, problem in pairs if problem.q_len > MAX_Q_LEN}
    known = {label: work for label, work in chunks.items() if work is not None}
    return _Group(problems, known, kernels, baseline, margin)


def _tables(group: _Group, source: str, warm: str) -> Iterator[Table]:
    yield group.table(f"{source} latency in µs{warm}", _latency(group))
    if group.flops:
        yield group.table(f"{source} TFLOP/s{warm}", _arithmetic(group))
    if any(row.energy_mj is not None for row in group.rows):
        yield group.table(f"{source} energy of one launch in mJ{warm}", _energy(group))
    if any(row.sm_busy_share is not None for row in group.rows):
        title = f"{source} SM busy share (schedule: CTA slots with work){warm}"
        yield group.table(title, group.each_kernel(_busy))


def _latency(group: _Group) -> Columns:
    columns: Columns = {
        name: [_latency_cell(of, name, group.margin) for of in group.problems.values()]
        for name in group.kernels
    }
    columns |= group.ratios("latency_us")
    columns |= group.of_baseline(
        {
            f"{group.baseline} TB/s": lambda row: _figure(row.bandwidth_tb_s, ".2f"),
            "of read floor": lambda row: _figure(row.read_floor_share, ".0%"),
            f"{group.baseline} tokens/s": lambda row: _figure(row.tokens_per_s, ".4g"),
            "attention": lambda row: _figure(row.attention_share, ".0%"),
        }
    )
    if (name := group.stream_k) is not None:
        rows = (of.get(name) for of in group.problems.values())
        columns[f"{name} schedule"] = [(row.schedule or "") if row else "" for row in rows]
    return columns


def _arithmetic(group: _Group) -> Columns:
    def cell(label: str, row: Row | None) -> str:
        work = group.flops.get(label)
        if row is None or work is None:
            return ""
        return _status(row, lambda row: _rate(work, row.latency_us))

    return {
        name: [cell(label, of.get(name)) for label, of in group.problems.items()]
        for name in group.kernels
    }


def _energy(group: _Group) -> Columns:
    return {
        **group.each_kernel(lambda row: _four_digits(row.energy_mj)),
        **group.ratios("energy_mj"),
        **group.of_baseline(
            {
                f"{group.baseline} over floor": lambda row: _times(
                    row.energy_mj, row.energy_floor_mj
                ),
                f"{group.baseline} mean W": lambda row: _figure(row.sustained_power_w, ".0f"),
                f"{group.baseline} sustained µs": lambda row: _figure(row.sustained_us, ".1f"),
            }
        ),
    }


def _busy(row: Row) -> str:
    """Format the SM busy share, and in brackets the schedule's share of CTA slots with work."""
    slots = row.quantisation_efficiency
    return _figure(row.sm_busy_share, ".0%") + ("" if slots is None else f" ({slots:.0%})")


def _latency_cell(of: ByKernel, name: str, margin: Margin) -> Words:
    row = of.get(name)
    if row is None:
        return ""
    # The mark goes first, so that numbers stay aligned.
    mark = "! " if row.warnings else ""
    text = _status(row, lambda row: mark + _figure(row.latency_us, ".1f"))
    return Text(text, "best") if _is_ahead(row, of, margin) else text


def _is_ahead(row: Row, of: ByKernel, margin: Margin) -> bool:
    """Return True if the row is ahead of every other timed one."""
    timed = {
        other.kernel: Latency.of(other)
        for other in of.values()
        if other.status in TIMED and other.kernel != BOUND and other.latency_us
    }
    own = timed.pop(row.kernel, None)
    return (
        own is not None
        and bool(timed)
        and all(standing(each.over(own), margin.share) == "ahead" for each in timed.values())
    )


def _status(row: Row, text: Callable[[Row], str]) -> str:
    """Put the status before a row's text if it is not `ok`."""
    return text(row) if row.status == "ok" else f"{row.status} {text(row)}".rstrip(" -")


def _times(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "-"


def _rate(work: int, latency_us: float | None) -> str:
    return _figure(None if latency_us is None else work / latency_us * 1e-6, ".0f")


def _four_digits(value: float | None) -> str:
    return _figure(value, ",.0f") if value is not None and value >= 1000 else _figure(value, "#.4g")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
