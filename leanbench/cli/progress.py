"""Progress of sweeps and tunings on stderr: bars in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from leanbench.cli import output

if TYPE_CHECKING:
    from leanbench.core.problem import AttentionProblem
    from leanbench.records.row import Row
    from leanbench.run.cells import Cell


#: Terminal columns of the bar.
_BAR = 24
#: Minimum seconds between two lines that are no results.
_LINE_EVERY_S = 5.0


class _Bars:
    """Progress bars in a terminal, lines elsewhere. Use it as a context manager."""

    def __init__(self, *, quiet: bool, **options: Any) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = output.console(stderr=True)
        self._lines = not quiet and not self._console.is_terminal
        self._last_line_s = float("-inf")
        self._bar = Progress(
            BarColumn(bar_width=_BAR),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=quiet or self._lines,
            **options,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Clear the bars."""
        self._bar.stop()

    def _is_line_due(self) -> bool:
        """Return True now and then where there is no bar."""
        now_s = time.monotonic()
        if not self._lines or now_s - self._last_line_s < _LINE_EVERY_S:
            return False
        self._last_line_s = now_s
        return True


class SweepProgress(_Bars):
    """Observer of run_cells with a progress bar.

    Args:
        total: Cells to finish.
        repeat: Processes that measure each of them.
    """

    def __init__(self, total: int, *, quiet: bool, repeat: int = 1) -> None:
        # Cells take from milliseconds to minutes: estimate from all of them.
        super().__init__(quiet=quiet, speed_estimate_period=86_400)
        self._last_line_s = time.monotonic()
        self._done, self._total, self._repeat = 0, total, repeat
        #: Processes that have measured a cell without a row.
        self._processes: Counter[str] = Counter()
        #: Warnings printed so far.
        self._warnings: set[str] = set()
        self._task = self._bar.add_task("starting the worker", total=total * repeat)

    def compiling(self, done: int, total: int) -> None:
        line = f"compiled {done} of {total} builds"
        self._bar.update(self._task, description=line)
        if self._is_line_due():
            output.say(line)

    def starts(self, cell: Cell, process: int = 1) -> None:
        label = cell.label
        if self._repeat > 1:
            label = f"process {process} of {self._repeat} · {cell.problem.label}"
            self._say_now_and_then(label)
        self._bar.update(self._task, description=self._clipped(label))

    def measured(self, cell: Cell) -> None:
        self._processes[cell.key] += 1
        self._bar.advance(self._task)

    def _say_now_and_then(self, label: str) -> None:
        """Print what is measured where there is no bar and no row of late."""
        if not self._is_line_due():
            return
        left_s = self._bar.tasks[0].time_remaining
        left = "" if left_s is None else f", about {output.duration(left_s)} left"
        output.say(f"[{self._done}/{self._total}] {label}{left}")

    def _clipped(self, label: str) -> str:
        """Shorten a cell's name to the line. Rich would also cut the count and the time."""
        count = len(f"{self._total * self._repeat} ")
        room = self._console.width - _BAR - 2 * count - len("ETA 10:00:00  ")
        return label if len(label) <= room else f"{label[: max(room - 1, 0)]}…"

    def finished(self, cell: Cell, row: Row) -> None:
        self._done += 1
        self._last_line_s = time.monotonic()
        # A kernel that failed was not repeated.
        self._bar.advance(self._task, self._repeat - self._processes.pop(cell.key, 0))
        latency = "" if row.latency_us is None else f" {row.latency_us:.1f} µs"
        # The results list why kernels do not support problems.
        is_unsupported = row.status == "unsupported"
        reason = "" if is_unsupported or row.reason is None else f" ({row.reason})"
        warnings = "".join(f" ! {self._once(text)}" for text in row.warnings or ())
        line = f"[{self._done}/{self._total}] {cell.label}: {row.status}{latency}{reason}{warnings}"
        if self._lines:
            output.say(line)
        elif row.status != "ok" and not is_unsupported:
            self._bar.console.print(line, markup=False)

    def _once(self, warning: str) -> str:
        if warning in self._warnings:
            return "as above"
        self._warnings.add(warning)
        return warning


class TuneProgress(_Bars):
    """Progress bars of a tuning."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._compiling = self._bar.add_task("starting compilers", total=None)
        self._timing = self._bar.add_task("timing", total=None, visible=False)

    def compiling(self, done: int, total: int) -> None:
        self._bar.update(
            self._compiling, completed=done, total=total, description="compiling candidates"
        )
        self._say(f"compiled {done} of {total} candidates", last=done == total)

    def timing(self, call: AttentionProblem, done: int, total: int) -> None:
        self._bar.update(
            self._timing,
            completed=done,
            total=total,
            description=f"timing {call.label}",
            visible=True,
        )
        self._say(f"timing {call.label}, call {done + 1} of {total}")

    def _say(self, line: str, *, last: bool = False) -> None:
        if (last and self._lines) or self._is_line_due():
            output.say(line)
