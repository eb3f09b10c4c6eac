"""Progress of a tuning on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from leanbench.cli import output

if TYPE_CHECKING:
    from leanbench.configs.space import FamilyKey
    from leanbench.core.problem import AttentionProblem

#: Without a terminal, a line at most so often.
_LINE_EVERY_S = 5.0


class TuneProgress:
    """The observer of a tuning that shows progress bars, as a context manager.

    Args:
        predicted: problems are not timed, the performance model predicts them.
    """

    def __init__(self, *, predicted: bool, quiet: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = output.console(stderr=True)
        self._lines = not quiet and not console.is_terminal
        self._last_line_s = float("-inf")
        #: Problems that were timed or predicted.
        self.done = 0
        self._doing = "predicting" if predicted else "timing"
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=quiet or self._lines,
        )
        self._compiling = self._bar.add_task("starting compilers", total=None)
        self._timing = self._bar.add_task(self._doing, total=None, visible=False)

    def __enter__(self) -> TuneProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Clears the bars."""
        self._bar.stop()

    def compiling(self, done: int, total: int) -> None:
        self._bar.update(
            self._compiling, completed=done, total=total, description="compiling candidates"
        )
        self._say(f"compiled {done} of {total} candidates", last=done == total)

    def timing(self, family: FamilyKey, problem: AttentionProblem, done: int, total: int) -> None:
        self.done = done
        self._bar.update(
            self._timing,
            completed=done,
            total=total,
            description=f"{self._doing} {problem.label}",
            visible=True,
        )
        self._say(f"{self._doing} {problem.label}, problem {done + 1} of {total}")

    def fitting(self) -> None:
        self._bar.update(self._timing, description="fitting the formula")
        self._say("fitting the formula", last=True)

    def power(self, done: int, total: int) -> None:
        self._bar.update(self._timing, completed=done, total=total, description="measuring power")
        self._say(f"measuring power, build {done + 1} of {total}")

    def _say(self, line: str, *, last: bool = False) -> None:
        now_s = time.monotonic()
        if self._lines and (last or now_s - self._last_line_s > _LINE_EVERY_S):
            self._last_line_s = now_s
            output.say(line)
