"""Tables of `leanbench sweep`: what would run, and the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leanbench.cli import output
from leanbench.core.gpu_spec import GpuSpec
from leanbench.core.memory import shortage_on
from leanbench.run.cells import Cell, Sweep
from leanbench.run.estimate import estimated_seconds, is_unsupported

if TYPE_CHECKING:
    from leanbench.records.reading import Run

#: Cells that a dry run names.
LISTED = 40


def show_dry_run(requested: Sweep, cells: list[Cell], gpu: GpuSpec, *, predicted: bool) -> None:
    """One line for each of the first `LISTED` cells, then the sum over those that can run.

    Args:
        cells: of the sweep, those that would run here.
    """
    table = output.table(f"{requested.name}: {output.counted(len(cells), 'cell')} for {gpu.name}")
    for column in ("kernel", "problem", "configs"):
        table.add_column(column)
    for column in ("KV bytes", "about", "fits memory"):
        table.add_column(column, justify="right")
    total, large, refused = 0.0, 0, 0
    for number, cell in enumerate(cells):
        is_large = shortage_on(cell.problem, gpu) is not None
        is_refused = is_unsupported(cell, gpu, predicted)
        large += is_large
        refused += is_refused
        takes = "unsupported"
        if not is_refused:
            seconds = estimated_seconds(cell, gpu, predicted, requested.measure)
            total += 0.0 if is_large else seconds
            takes = _about(seconds)
        if number < LISTED:
            size = output.si_bytes(cell.problem.kv_bytes)
            fit = "no" if is_large else "yes"
            table.add_row(cell.kernel, cell.problem.label, cell.request, size, takes, fit)
    output.show_table(table)
    if len(cells) > LISTED:
        output.show(f"and {len(cells) - LISTED} more")
    counts = [
        f"{count} {what}"
        for count, what in ((large, "do not fit its memory"), (refused, "unsupported"))
        if count
    ]
    left_out = f" ({', '.join(counts)})" if counts else ""
    takes = "less than 1 s" if total < 1 else f"about {output.duration(total)}"
    output.show(f"{output.counted(len(cells), 'cell')}{left_out}, {takes}; nothing was run.")


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else "< 0.1 s"


def show_ending(run: Run, baseline: str | None = None) -> None:
    """What came out: each problem's figures, how far to trust them, and the conclusion last.

    Args:
        baseline: the kernel that others are compared with; None for lean, or the first that was
            timed.
    """
    from leanbench.cli.document import show_document
    from leanbench.report.facts import ENDING, facts
    from leanbench.report.facts.results import Results

    show_document(facts(Results([run], baseline), ENDING))
