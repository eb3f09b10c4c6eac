"""Printing: results on stdout, warnings and progress on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from leanbench.core.files import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from leanbench.gpu.local import Target

#: Default columns of tables in a pipe.
PIPED_COLUMNS = 200
#: Default columns of a terminal of unknown size.
_TERMINAL_COLUMNS = 80
#: Columns between those of a table.
_GAP = 2

#: The folder of this package.
_PACKAGE = Path(__file__).resolve().parents[1]

#: A heading and the cells below it.
Column = tuple[str, Sequence["str | Text"]]


def console(*, stderr: bool = False) -> Console:
    """Return the rich console of a stream."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            # Console's method exits with 1. The error is being handled here.
            raise

    stream = sys.stderr if stderr else sys.stdout
    return Ours(
        file=stream,
        # rich queries a terminal each time: it can be resized.
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
        whole: Do not wrap the line, such as a shell command to copy.
    """
    text = printable(text, keep="\n\t")
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
    """Print a note about the GPU that is measured."""
    if target.local_index is not None and target.note:
        say(f"{target.note}.")


def say_kernel_warnings() -> None:
    """Print which kernel families are left out, and why."""
    from leanbench.core.registry import kernel_warnings

    for warning in kernel_warnings():
        say(f"! {warning}.")


@contextlib.contextmanager
def warnings_in_sentences() -> Iterator[None]:
    """Print warnings of this package as lines of `say`, and leave those of others unchanged."""
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
    wrapped = _wrap(printable(lead + text, keep="\n\t"), sys.stdout)
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
    """Discard further output to `stdout` or `stderr`. At exit, Python would fail again."""
    # Held by sys until the end.
    setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115


def prepare_streams() -> None:
    """Discard output to a closed stream, and replace characters that the locale cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            mute(name)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Return SIGINT, or the signal that `leanbench.__main__` turned into this error."""
    return signal.Signals(error.args[0] if error.args else signal.SIGINT)


def show_table(table: Table) -> None:
    console().print(table)


def table(title: str | None = None) -> Table:
    """Return an empty table in the house style."""
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
    """Print a table of figures behind columns of labels, in several parts on a narrow terminal.

    A figure is never cut, nor broken over two lines.

    Args:
        labels: Subjects of the rows, repeated in each part. Words are left-aligned.
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
            # A figure may have a sign or a mark before it.
            is_figure = any(re.match(r"\W*\d", str(cell)) for cell in cells)
            if is_figure and not any("\n" in str(cell) for cell in cells):
                shown.add_column(heading, justify="right", no_wrap=True)
            else:
                shown.add_column(heading, overflow="fold")
        for row in zip(*(cells for _, cells in (*labels, *part)), strict=True):
            # Text of a run is no markup.
            shown.add_row(
                *(Text(printable(cell, "\n")) if isinstance(cell, str) else cell for cell in row)
            )
        show_table(shown)


def show_rows(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> None:
    """Print a table as `show_columns` does, row by row.

    Args:
        labels: Number of leading columns that are labels.
    """
    columns = [(name, [row[index] for row in rows]) for index, name in enumerate(names)]
    show_columns(title, columns[:labels], columns[labels:])


def _parts(labels: Sequence[Column], columns: Sequence[Column]) -> list[list[Column]]:
    """Return all columns, or parts that each fit the terminal with headings broken into words."""
    width = console().width
    if _width([*labels, *columns]) <= width:
        return [list(columns)]
    parts: list[list[Column]] = [[]]
    for heading, cells in columns:
        column = (heading.replace(" ", "\n").replace("_", "_\n"), cells)
        if parts[-1] and _width([*labels, *parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    return parts


def _width(columns: Sequence[Column]) -> int:
    """Return the terminal columns of a table in the house style."""
    from rich.cells import cell_len

    lines = (
        [line for text in (heading, *cells) for line in str(text).splitlines()]
        for heading, cells in columns
    )
    return sum(max(map(cell_len, column), default=0) + _GAP for column in lines) - _GAP


def counted(number: int, noun: str) -> str:
    """Return ``3 cells``, ``1 cell`` or ``no cells``."""
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def four_digits(value: float) -> str:
    """Return ``32.83`` and ``17564``: four digits, or all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def si_bytes(count: int) -> str:
    """Return ``512 MB``. 1 MB is 10^6 bytes, as in bandwidths."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Return ``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
