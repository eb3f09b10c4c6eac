"""The tables of `leanbench sweep`: what would run, and what came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leanbench.cli import output
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.problem import AttentionProblem
from leanbench.measure.options import MeasureOptions
from leanbench.run.cells import Cell
from leanbench.run.estimate import estimated_seconds, fits

if TYPE_CHECKING:
    from leanbench.report.warnings import Notice

#: Rows of results.jsonl.
Rows = list[dict[str, Any]]
#: The rows of one problem.
ByKernel = dict[str, dict[str, Any]]

#: The kernel that the others are compared with, where the run has it.
BASE = "lean"
#: Problems named in one line of notices, and lines.
NAMED = 3
NOTICES = 20
#: Cells that a dry run names.
LISTED = 40


def show_dry_run(
    cells: list[Cell], gpu: GpuSpec, measure: MeasureOptions, *, predicted: bool
) -> None:
    """One line for each of the first `LISTED` cells, then the sum over those that fit."""
    table = output.table(f"{len(cells)} cells for {gpu.name}")
    for column in ("kernel", "problem", "configs"):
        table.add_column(column)
    for column in ("KV bytes", "about", "fits memory"):
        table.add_column(column, justify="right")
    total, large = 0.0, 0
    for number, cell in enumerate(cells):
        seconds = estimated_seconds(cell, gpu, predicted, measure)
        is_large = not fits(cell.problem, gpu)
        total += 0.0 if is_large else seconds
        large += is_large
        if number < LISTED:
            size = output.si_bytes(cell.problem.kv_bytes)
            fit = "no" if is_large else "yes"
            table.add_row(cell.kernel, cell.problem.label, cell.request, size, _about(seconds), fit)
    output.show_table(table)
    if len(cells) > LISTED:
        output.show(f"and {len(cells) - LISTED} more")
    beside = f" ({large} do not fit its memory)" if large else ""
    takes = "less than 1 s" if total < 1 else f"about {output.duration(total)}"
    output.show(f"{len(cells)} cells{beside}, {takes}; nothing was run.")


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else "< 0.1 s"


def show_summary(rows: list[dict[str, Any]]) -> None:
    """What came out: tables of latency, energy and occupancy, how far to trust them, and what was
    said of rows.

    Args:
        rows: as in results.jsonl. Predicted and measured ones, and those of a cold and a warm L2,
            have tables of their own.
    """
    from leanbench.report.config_lines import config_lines
    from leanbench.report.trust import facts
    from leanbench.report.warnings import flagged, warned

    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["source"], row.get("cache", "cold")), []).append(row)
    for (source, cache), group in alike.items():
        warm = ", warm L2" if cache == "warm" else ""
        _show_latency(group, f"{source} latency in µs{warm}")
        if any(row.get("energy_mj") is not None for row in group):
            output.show("")
            _show_energy(group, f"{source} energy of one launch in mJ{warm}")
        if any(row.get("sm_busy_share") is not None for row in group):
            output.show("")
            _show_occupancy(group, f"{source} SM busy share (schedule: CTA slots with work){warm}")
        found = [
            *config_lines(group),
            *(f"{fact.text[0].upper()}{fact.text[1:]}." for fact in facts(group)),
        ]
        if found:
            output.show("")
        for line in found:
            output.show(line)
    _show_notices(warned(rows))
    _show_notices(flagged(rows))


def _show_latency(rows: Rows, title: str) -> None:
    """Each kernel's latency, how many times faster `lean` is, and how near to the limit."""
    kernels, others = _kernels(rows)
    columns = [*kernels, *(f"{BASE} vs {name}" for name in others)]
    columns += [f"{BASE} TB/s", "of read floor"] if BASE in kernels else []

    def latency(row: dict[str, Any]) -> str:
        # In front, so that numbers stay above one another.
        return ("! " if row.get("warnings") else "") + _figure(row["latency_us"], ".1f")

    def cells(of: ByKernel) -> list[str]:
        base = of.get(BASE, {})
        latencies = [_cell(of.get(name), latency) for name in kernels]
        speedups = [_over_base(of, name, "latency_us") for name in others]
        limits = [
            _figure(base.get("bandwidth_tb_s"), ".2f"),
            _figure(base.get("read_floor_share"), ".0%"),
        ]
        return [*latencies, *speedups, *(limits if BASE in kernels else [])]

    _show_by_problem(rows, title, columns, cells)


def _show_energy(rows: Rows, title: str) -> None:
    """Each kernel's energy, how many times that of `lean` it is, and what `lean` draws when
    sustained.
    """
    kernels, others = _kernels(rows)
    columns = [*kernels, *(f"{BASE} vs {name}" for name in others)]
    columns += (
        [f"{BASE} over floor", f"{BASE} mean W", f"{BASE} sustained µs"] if BASE in kernels else []
    )

    def cells(of: ByKernel) -> list[str]:
        base = of.get(BASE, {})
        energies = [
            _cell(of.get(name), lambda row: _four_digits(row.get("energy_mj"))) for name in kernels
        ]
        ratios = [_over_base(of, name, "energy_mj") for name in others]
        limits = [
            _times(base.get("energy_mj"), base.get("energy_floor_mj")),
            _figure(base.get("sustained_power_w"), ".0f"),
            _figure(base.get("sustained_us"), ".1f"),
        ]
        return [*energies, *ratios, *(limits if BASE in kernels else [])]

    _show_by_problem(rows, title, columns, cells)


def _show_occupancy(rows: Rows, title: str) -> None:
    """Each kernel's SM busy share; in brackets the share of CTA slots x time that its schedule
    gives work.
    """
    kernels, _ = _kernels(rows)

    def busy(row: dict[str, Any]) -> str:
        slots = row.get("quantisation_efficiency")
        return _figure(row.get("sm_busy_share"), ".0%") + (
            "" if slots is None else f" ({slots:.0%})"
        )

    _show_by_problem(
        rows, title, kernels, lambda of: [_cell(of.get(name), busy) for name in kernels]
    )


def _show_by_problem(
    rows: Rows, title: str, columns: list[str], cells: Callable[[ByKernel], list[str]]
) -> None:
    """A table with one line per problem; what all problems share stands in its title. Columns
    without a figure are left out.
    """
    problems = _by_problem(rows)
    shared, short = output.without_shared(list(problems))
    by_column = zip(*map(cells, problems.values()), strict=True)
    with_figures = [
        (name, texts)
        for name, texts in zip(columns, by_column, strict=True)
        if set(texts) - {"-", ""}
    ]
    output.show_columns(
        f"{title}{f', all {shared}' if shared else ''}", [("problem", short)], with_figures
    )


def _show_notices(notices: list[Notice]) -> None:
    """A line for each thing that was said of rows, however many rows it was said of."""
    for notice in notices[:NOTICES]:
        mark = "!" if notice.kind == "warning" else f"{notice.kind}:"
        named = ", ".join(notice.problems[:NAMED])
        more = f" and {notice.count - NAMED} more" if notice.count > NAMED else ""
        worst = "at worst, " if notice.varies else ""
        output.show(f"{mark} {notice.kernel} · {named}{more}: {worst}{notice.sentence}")
    if len(notices) > NOTICES:
        output.show(f"and {len(notices) - NOTICES} more lines like these, see the report")


def _kernels(rows: Rows) -> tuple[list[str], list[str]]:
    """The kernels, and those that are compared with `lean`; one that supports no problem stands in
    the notices alone, unless none supports any.
    """
    supported = dict.fromkeys(row["kernel"] for row in rows if row["status"] != "unsupported")
    kernels = list(supported or dict.fromkeys(row["kernel"] for row in rows))
    return kernels, [name for name in kernels if name != BASE] if BASE in kernels else []


def _by_problem(rows: Rows) -> dict[str, ByKernel]:
    problems: dict[str, ByKernel] = {}
    for row in rows:
        label = AttentionProblem.from_dict(row["problem"]).label
        problems.setdefault(label, {})[row["kernel"]] = row
    return problems


def _cell(row: dict[str, Any] | None, text: Callable[[dict[str, Any]], str]) -> str:
    """What `text` makes of a row, behind the row's status where that is not `ok`; empty without a
    row.
    """
    if row is None:
        return ""
    return text(row) if row["status"] == "ok" else f"{row['status']} {text(row)}".rstrip(" -")


def _over_base(of: ByKernel, name: str, column: str) -> str:
    rows = (of.get(name, {}), of.get(BASE, {}))
    # A wrong result's latency is no latency.
    if any(row.get("status") not in ("ok", "noisy") for row in rows):
        return "-"
    return _times(*(row.get(column) for row in rows))


def _times(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value and base else "-"


def _four_digits(value: float | None) -> str:
    return _figure(value, ",.0f") if value is not None and value >= 1000 else _figure(value, "#.4g")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
