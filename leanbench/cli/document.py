"""Documents on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from leanbench.cli import output
from leanbench.report.document import Block, Document, Section, Sentences, Table, Text, Words

if TYPE_CHECKING:
    from rich.text import Text as Styled

#: Layouts for a page.
NOT_HERE = ("cards", "hint", "empty")
#: Problems named in a line of a list, and lines of a list.
NAMED = 3
LINES = 20
#: Styles of the names of sentences.
_NAMES = {"Fastest": "bold green", "Note": "bold yellow"}

_STYLES = {
    "best": "bold green",
    "broken": "bold red",
    "slower": "red",
    "ambiguous": "yellow",
    "faster": "green",
    "mended": "green",
}


def show_document(document: Document) -> None:
    """Print all sections with the first rows of tables. Pictures and cards are for a page."""
    first = True
    for section in document.sections:
        for block in section.blocks:
            if _is_shown(block) and not first:
                output.show("")
            first &= not _is_shown(block)
            _show(block)


def _is_shown(block: Block) -> bool:
    if isinstance(block, Section):
        return any(map(_is_shown, block.blocks))
    return isinstance(block, (Sentences, Table)) and block.layout not in NOT_HERE


def _show(block: Block) -> None:
    if not _is_shown(block):
        return
    if isinstance(block, Section):
        for inner in block.blocks:
            _show(inner)
    elif isinstance(block, Sentences):
        for item in block.items:
            # A fact stands alone. Its name is a heading elsewhere.
            name = f"{item.name}: " if item.name and block.layout != "facts" else ""
            output.show(str(item.words), lead=name, style=_NAMES.get(item.name, "bold"))
    elif isinstance(block, Table):
        _show_table(block)


def _show_table(table: Table) -> None:
    if table.layout == "list":
        _show_list(table)
    else:
        rows = table.rows[: table.most]
        columns = [
            (column.heading, [_cell(row[number]) for row in rows])
            for number, column in enumerate(table.columns)
        ]
        labels = len(list(takewhile(lambda column: not column.numeric, table.columns)))
        output.show_columns(table.title, columns[:labels], columns[labels:])
        if len(rows) < len(table.rows):
            output.show(f"and {len(table.rows) - len(rows)} more{table.rest}")
        if table.note:
            output.show(table.note)
        _show_notes(rows)


def _show_notes(rows: Sequence[Sequence[Words]]) -> None:
    """Print the notes of rows, which are too wide for a column."""
    for first, *others in rows:
        notes = [cell.note for cell in others if isinstance(cell, Text) and cell.note]
        if notes:
            about = first.title if isinstance(first, Text) else first
            output.show(f"{about}: {'; '.join(notes)}")


def _show_list(table: Table) -> None:
    """Print ``kind: kernels · problems: sentence``, one line for kernels with the same sentence."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in table.rows:
        kind, kernel, sentence, count = map(str, row[:4])
        problems = _named(row[4])
        # A refusal starts with the kernel's name.
        words = sentence.removeprefix(f"{kernel} ")
        where = f"{count} problems" if kind == "unsupported" and int(count) > NAMED else problems
        lines.setdefault((kind, where, words), []).append(kernel)
    for (kind, where, words), kernels in [*lines.items()][:LINES]:
        mark = "!" if kind == "warning" else f"{kind}:"
        output.show(f"{mark} {', '.join(kernels)} · {where}: {words}")
    if len(lines) > LINES:
        output.show(f"and {len(lines) - LINES} more lines like these, see the report")


def _named(problems: Words) -> str:
    if isinstance(problems, str):
        return problems
    names = [problems.words, *problems.more]
    unnamed = len(names[NAMED:]) + problems.unnamed
    more = f" and {unnamed} more" if unnamed else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _cell(words: Words) -> Styled:
    from rich.text import Text as Styled

    style = _STYLES.get(words.role, "") if isinstance(words, Text) else ""
    mark = "* " if isinstance(words, Text) and words.role == "best" else ""
    return Styled(f"{mark}{words.words if isinstance(words, Text) else words}", style=style)
