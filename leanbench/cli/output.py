"""The one place that prints: results on stdout, everything said about them on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns where there is no terminal to ask: piped tables are not cut at 80.
PIPED_COLUMNS = 200


def console(*, stderr: bool = False) -> Console:
    """The rich console of a stream."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPED_COLUMNS, highlight=False, soft_wrap=False)


def say(text: str) -> None:
    """A line about what happens, on stderr; where that cannot be written, what happens goes on unsaid."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        mute("stderr")


def show(text: str) -> None:
    """A line of the result, on stdout."""
    print(text, flush=True)


def mute(stream: str) -> None:
    """Nothing more is written to `stdout` or `stderr`, at exit neither, where Python would fail once more."""
    # Held by sys until the end.
    setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115


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


def without_shared(labels: list[str]) -> tuple[str, list[str]]:
    """The words that all labels share, and each label without them; labels that are all alike stay as they are."""
    split = [label.split() for label in labels]
    shared = [word for word in split[0] if all(word in words for words in split)]
    rest = [" ".join(word for word in words if word not in shared) for words in split]
    return (" ".join(shared), rest) if all(rest) else ("", labels)


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
