"""The one place that prints: results on stdout, warnings and progress on stderr."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from leanbench.gpu.local import Target

#: Columns of tables in a pipe, unless COLUMNS says otherwise.
PIPED_COLUMNS = 200
#: Columns of a terminal that does not know its size.
_TERMINAL_COLUMNS = 80
#: Columns between those of a table.
GAP = 2

#: The folder of this package.
_PACKAGE = Path(__file__).resolve().parents[1]

#: A heading and the cells below it.
Column = tuple[str, Sequence["str | Text"]]


def console(*, stderr: bool = False) -> Console:
    """The rich console of a stream."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            # Console's own ends the process with 1. This is called where the error is handled.
            raise

    stream = sys.stderr if stderr else sys.stdout
    return Ours(
        file=stream,
        # A terminal may be resized: rich asks it each time.
        width=None if stream.isatty() else _stated_columns() or PIPED_COLUMNS,
        highlight=False,
        soft_wrap=False,
    )


def _stated_columns() -> int | None:
    """Return the columns that the environment states."""
    stated = os.environ.get("COLUMNS", "")
    return int(stated) or None if stated.isdecimal() else None


def _wrap(text: str, stream: TextIO) -> str:
    """Wrap lines at words to the columns of a terminal. Leave the lines of a pipe whole, for grep,
    unless COLUMNS states a width. Never break a path or a number.
    """
    columns = _stated_columns()
    if columns is None and stream.isatty():
        try:
            columns = os.get_terminal_size(stream.fileno()).columns or _TERMINAL_COLUMNS
        except OSError:
            columns = _TERMINAL_COLUMNS
    if columns is None:
        return text
    wrapped = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        wrapped += textwrap.wrap(
            line,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(wrapped)


def say(text: str, *, whole: bool = False) -> None:
    """Print a line about progress on stderr. Continue silently if stderr cannot be written.

    Args:
        whole: Do not wrap the line: a shell command that is to be copied.
    """
    try:
        print(text if whole else _wrap(text, sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        mute("stderr")


def why_predicted(target: Target, gpu: str | None) -> str:
    """Return why nothing is measured.

    Args:
        gpu: --gpu.
    """
    return target.note or f"No {'such GPU' if gpu else 'GPU'} here"


def say_note(target: Target) -> None:
    """What is not as usual about a GPU that is measured on."""
    if target.local_index is not None and target.note:
        say(f"{target.note}.")


def say_kernel_warnings() -> None:
    """What of the kernels room and of LEANBENCH_KERNEL_PATH is left out, and why."""
    from leanbench.core.registry import kernel_warnings

    for warning in kernel_warnings():
        say(f"! {warning}.")


@contextlib.contextmanager
def warnings_in_sentences() -> Iterator[None]:
    """A block in which warnings of this package are lines as of `say`: a program that imports it
    wants to know where they come from, a person at the keyboard does not. Others' stay as they are.
    """
    usual = warnings.showwarning

    def show_warning(
        message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any
    ) -> None:
        if Path(filename).is_relative_to(_PACKAGE):
            say(f"! {str(message).rstrip('.')}.")
        else:
            usual(message, category, filename, *where, **more)

    warnings.showwarning = show_warning
    try:
        yield
    finally:
        warnings.showwarning = usual


def show(text: str, *, lead: str = "", style: str = "bold") -> None:
    """Print a sentence of the result on stdout, wrapped at words.

    Args:
        lead: First words of the sentence, styled on a terminal.
    """
    wrapped = _wrap(lead + text, sys.stdout)
    if lead and sys.stdout.isatty():
        from rich.text import Text

        styled = Text(wrapped)
        styled.stylize(style, 0, len(lead))
        console().print(styled, soft_wrap=True)
    else:
        print(wrapped, flush=True)


def show_whole(text: str) -> None:
    """Print data or a path on stdout as it is, for a program or a shell to read."""
    print(text, flush=True)


def mute(stream: str) -> None:
    """Nothing more is written to `stdout` or `stderr`, at exit neither, where Python would fail
    once more.
    """
    # Held by sys until the end.
    setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115


def open_closed_streams() -> None:
    """Nothing is written to `stdout` or `stderr` where the caller closed it, as by ``>&-``: Python
    has None there, and the next file that is opened would get its number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        mute(name)
        opened = getattr(sys, name).fileno()
        # Processes that are started write there too.
        if opened == number:
            os.set_inheritable(number, True)
        else:
            os.dup2(opened, number)


def show_table(table: Table) -> None:
    console().print(table)


def table(title: str | None = None) -> Table:
    """An empty table in the house style."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def show_columns(title: str, labels: Sequence[Column], columns: Sequence[Column]) -> None:
    """A table of columns of figures behind those of labels; where the terminal is too narrow for
    all, several below one another, each with the labels: a figure is never cut, nor broken over two
    lines.

    Args:
        labels: what a row is about. Words are left-aligned, figures are right-aligned.
    """
    from rich.text import Text

    for number, part in enumerate(_parts(labels, columns)):
        # As wide as the terminal, not as the table.
        if title:
            console().print(Text(title if number == 0 else f"{title}, continued", style="bold"))
        shown = table()
        for heading, cells in labels:
            is_count = all(str(cell).isdigit() for cell in cells)
            shown.add_column(heading, justify="right" if is_count else "left", no_wrap=True)
        for heading, cells in part:
            if _holds_figures(cells):
                shown.add_column(heading, justify="right", no_wrap=True)
            else:
                shown.add_column(heading, overflow="fold")
        for row in zip(*(cells for _, cells in (*labels, *part)), strict=True):
            # What a run brings along is text, not markup.
            shown.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        show_table(shown)


def _holds_figures(cells: Sequence[str | Text]) -> bool:
    """Whether a cell begins with a number, perhaps behind a sign or a mark."""
    return any(re.match(r"\W*\d", str(cell)) for cell in cells)


def _parts(labels: Sequence[Column], columns: Sequence[Column]) -> list[list[Column]]:
    """The fewest parts that each fit the terminal beside the labels: about as long as one another,
    with headings that are broken no more than they must be, or else as full as they can be.
    """
    width = console().width
    packed = _packed(labels, [(_in_words(heading), cells) for heading, cells in columns], width)
    for count in range(1, len(packed) + 1):
        for broken in (_whole, _in_two, _in_words):
            headed = [(broken(heading), cells) for heading, cells in columns]
            ends = [len(headed) * end // count for end in range(count + 1)]
            parts = [headed[start:end] for start, end in itertools.pairwise(ends)]
            if all(_columns_wide([*labels, *part]) <= width for part in parts):
                return parts
    return packed


def _packed(labels: Sequence[Column], columns: Sequence[Column], width: int) -> list[list[Column]]:
    """As many columns to a part as fit beside the labels, and one where none does."""
    parts: list[list[Column]] = [[]]
    for column in columns:
        if parts[-1] and _columns_wide([*labels, *parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    return parts


def _columns_wide(columns: Sequence[Column]) -> int:
    """Terminal columns of a table in the house style."""
    from rich.cells import cell_len

    lines = (
        [line for text in (heading, *cells) for line in str(text).splitlines()]
        for heading, cells in columns
    )
    return sum(max(map(cell_len, of_one), default=0) + GAP for of_one in lines) - GAP


def _whole(heading: str) -> str:
    return heading


def _in_two(heading: str) -> str:
    """A heading broken at its last space."""
    return "\n".join(heading.rsplit(" ", 1))


def _in_words(heading: str) -> str:
    """A heading broken at its spaces and after its underscores."""
    return heading.replace(" ", "\n").replace("_", "_\n")


def counted(number: int, noun: str) -> str:
    """``3 cells``, ``1 cell``, ``no cells``."""
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def si_bytes(count: int) -> str:
    """``512 MB``; 1 MB is 10^6 bytes, as in bandwidths."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
