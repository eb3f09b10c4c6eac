"""Progress of a sweep on stderr: a bar in a terminal, a line per cell elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.cli import output

if TYPE_CHECKING:
    from leanbench.run.cells import Cell


class SweepProgress:
    """A context manager that run_cells tells about each cell."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = output.console(stderr=True)
        self._lines = not quiet and not self._console.is_terminal
        self._done, self._total = 0, total
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=quiet or self._lines,
            # Cells take from milliseconds to minutes: the estimate looks at all of them.
            speed_estimate_period=86_400,
        )
        self._task = self._bar.add_task("starting the worker", total=total)

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def starts(self, cell: Cell) -> None:
        self._bar.update(self._task, description=cell.label)

    def finished(self, cell: Cell, row: dict[str, Any]) -> None:
        self._done += 1
        self._bar.advance(self._task)
        latency = "" if row["latency_us"] is None else f" {row['latency_us']:.1f} µs"
        reason = "" if row["reason"] is None else f" ({row['reason']})"
        warnings = "".join(f" ! {text}" for text in row.get("warnings") or ())
        line = f"[{self._done}/{self._total}] {cell.label}: {row['status']}{latency}{reason}{warnings}"
        if self._lines:
            output.say(line)
        elif row["status"] != "ok":
            self._bar.console.print(line, markup=False)
