"""The tables of `leanbench sweep`: what would run, and what came out."""

from __future__ import annotations

from typing import Any

from leanbench.cli import output
from leanbench.gpu.spec import GpuSpec
from leanbench.problem import AttentionProblem
from leanbench.run.cells import Cell
from leanbench.run.estimate import estimated_seconds, fits

#: The kernel that the others are compared with, where the run has it.
BASE = "lean"


def show_dry_run(cells: list[Cell], gpu: GpuSpec, *, predicted: bool) -> None:
    """One line per cell, then the sum."""
    table = output.table(f"{len(cells)} cells for {gpu.name}")
    for column in ("kernel", "problem", "configs"):
        table.add_column(column)
    for column in ("KV bytes", "about", "fits memory"):
        table.add_column(column, justify="right")
    total = 0.0
    for cell in cells:
        seconds = estimated_seconds(cell, gpu, predicted)
        total += seconds
        fit = "yes" if fits(cell.problem, gpu) else "no"
        size = output.si_bytes(cell.problem.kv_bytes)
        table.add_row(cell.kernel, cell.problem.label, cell.configs, size, _about(seconds), fit)
    output.show_table(table)
    output.show(f"{len(cells)} cells, about {output.duration(total)}; nothing was run.")


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else "< 0.1 s"


def show_summary(rows: list[dict[str, Any]]) -> None:
    """One line per problem: each kernel's latency, how many times faster `lean` is, and how near to the limit."""
    if not rows:
        return
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    others = [name for name in kernels if name != BASE] if BASE in kernels else []
    problems = _by_problem(rows)
    shared, short = _shorten(list(problems))
    table = output.table(f"{rows[0]['source']} latency in µs{f', all {shared}' if shared else ''}")
    table.add_column("problem", no_wrap=True)
    columns = [*kernels, *(f"{BASE} vs {name}" for name in others)]
    columns += [f"{BASE} TB/s", "of read floor"] if BASE in kernels else []
    for column in columns:
        table.add_column(_heading(column), justify="right")
    for problem, by_kernel in problems.items():
        base = by_kernel.get(BASE, {})
        speedups = [_speedup(base, by_kernel.get(name, {})) for name in others]
        limits = [_figure(base.get("bandwidth_tb_s"), ".2f"), _figure(base.get("read_floor_share"), ".0%")]
        latencies = [_latency(by_kernel.get(name)) for name in kernels]
        table.add_row(short[problem], *latencies, *speedups, *(limits if BASE in kernels else []))
    output.show_table(table)
    for row in rows:
        if row["status"] != "ok":
            label = AttentionProblem.from_dict(row["problem"]).label
            output.show(f"{row['status']}: {row['kernel']} · {label}: {row['reason']}")


def _shorten(labels: list[str]) -> tuple[str, dict[str, str]]:
    """The words that all labels share, and each label without them; one label alone stays as it is."""
    if len(labels) == 1:
        return "", {labels[0]: labels[0]}
    split = {label: label.split() for label in labels}
    shared = [word for word in split[labels[0]] if all(word in words for words in split.values())]
    rest = {label: " ".join(word for word in words if word not in shared) for label, words in split.items()}
    return " ".join(shared), {label: short or label for label, short in rest.items()}


def _heading(column: str) -> str:
    """A heading that may break at its underscores where the terminal is too narrow for long kernel names."""
    return column.replace("_", "_\n") if output.console().width < 100 else column


def _by_problem(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    problems: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        label = AttentionProblem.from_dict(row["problem"]).label
        problems.setdefault(label, {})[row["kernel"]] = row
    return problems


def _latency(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    latency = _figure(row["latency_us"], ".1f")
    return latency if row["status"] == "ok" else f"{row['status']} {latency}".rstrip(" -")


def _speedup(base: dict[str, Any], other: dict[str, Any]) -> str:
    # A wrong result's latency is no latency.
    if any(row.get("status") not in ("ok", "noisy") or not row["latency_us"] for row in (base, other)):
        return "-"
    return f"{other['latency_us'] / base['latency_us']:.2f}x"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
