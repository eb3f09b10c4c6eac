"""Files of sequence lengths: one a line, or a column of a table in CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any

from leanbench.core import syntax
from leanbench.core.errors import InvalidValue, Reason, UserError, nearest
from leanbench.core.files import read_text
from leanbench.core.strict_json import parse_foreign, short_json

_MOST_MB = 100
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
#: Numbers to other programs, so no names of columns.
_NO_NAMES = {"nan", "inf", "infinity", "none", "null", "true", "false", "na", "n/a"}
_SYNTAX = "whole numbers of tokens such as 8192, or name another column: FILE:COLUMN"
_FIX = f"write {_SYNTAX}"


class UnknownColumn(UserError):
    """A column that a file of lengths does not have, or none of several.

    Attributes:
        file: File, as it was named.
        column: Column that was named; empty if none was.
        columns: Columns of the file, in its order.
        example: Column of numbers, if none was named.
    """

    def __init__(self, file: str, column: str, columns: Sequence[str], example: str = "") -> None:
        super().__init__(file, column, columns, example)
        self.file = file
        self.column = column
        self.columns = columns
        self.example = example

    def __str__(self) -> str:
        if not self.column:
            names = ", ".join(self.columns[:20])
            example = f"--lengths {self.file}:{self.example}"
            return f"{self.file} has several columns ({names}): name one, such as {example}"
        return f"{self.file} has no column {self.column!r}, {nearest(self.column, self.columns)}"


def names_file(text: str) -> bool:
    """Return True for ``FILE`` or ``FILE:COLUMN`` of a file that exists."""
    return _split(text) is not None


def read_lengths_of(name: str, text: str) -> list[int]:
    """Read the lengths of ``FILE`` or ``FILE:COLUMN``, for which `names_file` is True.

    A header, a byte order mark, blank lines and lines that begin with # are no lengths.

    Raises:
        UserError: The file cannot be read, has several columns and none is named, or a cell is no
            length.
    """
    file, column = _split(text) or (text, "")
    content = read_text(Path(file), _MOST_MB)
    where = f"{name} {file!r}"
    is_json = content.lstrip()[:1] in ("[", "{")
    table = _read_json(where, content) if is_json else _read_lines(where, content)
    if not table.rows:
        raise UserError(f"{where} has no length: write one a line")
    index = _column(file, column, table)
    if index is None:
        [(place, cells)] = table.rows
        return [_length(f"{where} {place}:", cell) for cell in cells]
    title = f", column {table.columns[index]!r}" if len(table.columns) > 1 else ""
    return [
        _length(f"{where} {place}{title}:", cells[index] if index < len(cells) else "")
        for place, cells in table.rows
    ]


def _split(text: str) -> tuple[str, str] | None:
    """Split into a file that exists and a column. The longest path wins."""
    end = len(text)
    while end > 0:
        if os.path.lexists(text[:end]):
            return text[:end], text[end + 1 :]
        end = text.rfind(":", 0, end)
    return None


@dataclass(frozen=True)
class _Table:
    columns: list[str]
    #: Where each row is, such as ``line 3``, and its cells.
    rows: Sequence[tuple[str, Sequence[Any]]]
    has_header: bool


def _column(file: str, column: str, table: _Table) -> int | None:
    """Return the place of a column; None if the file is one row of lengths."""
    if column:
        if column not in table.columns:
            raise UnknownColumn(file, column, table.columns)
        return table.columns.index(column)
    if len(table.columns) == 1:
        return 0
    if len(table.rows) == 1 and not table.has_header:
        return None
    cells = zip(table.columns, table.rows[0][1], strict=False)
    numbers = [name for name, cell in cells if _NUMBER.fullmatch(_text(cell))]
    raise UnknownColumn(file, "", table.columns, (numbers or table.columns)[0])


def _read_lines(where: str, content: str) -> _Table:
    """Read one length a line, or a table separated by commas, semicolons, tabs, bars or spaces."""
    lines = content.splitlines()
    first = next(filter(_has_data, lines), "")
    delimiter = max(_DELIMITERS, key=first.count)
    if delimiter in first:
        rows = _read_csv(where, content, delimiter)
    else:
        rows = [(f"line {n}", line.split()) for n, line in enumerate(lines, 1) if _has_data(line)]
    header = rows[0][1] if rows and _is_header(rows[0][1]) else None
    if header is None:
        columns = max((len(cells) for _, cells in rows), default=1)
        return _Table([str(number + 1) for number in range(columns)], rows, has_header=False)
    rows = rows[1:]
    if delimiter not in first and all(len(cells) == 1 for _, cells in rows):
        header = [first.strip()]
    return _Table([*header], rows, has_header=True)


def _read_csv(where: str, content: str, delimiter: str) -> list[tuple[str, Sequence[str]]]:
    # A cell may be a prompt, of any length and with several lines.
    csv.field_size_limit(_MOST_MB * 1_000_000)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
    rows = []
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped) and not stripped[0].startswith("#"):
                rows.append((f"line {reader.line_num}", stripped))
    except csv.Error:
        raise UserError(f"{where} line {reader.line_num} is no CSV: leave it out") from None
    return rows


def _has_data(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _is_header(cells: Sequence[str]) -> bool:
    """Return True for names of columns. ``4q`` is a wrong number rather than a name."""
    names = [cell for cell in cells if cell[:1].isalpha() or cell[:1] == "_"]
    is_name = any(name.lower() not in _NO_NAMES for name in names)
    return is_name and not any(map(_NUMBER.fullmatch, cells))


def _read_json(where: str, content: str) -> _Table:
    """Read a list of numbers or records, columns by name, or a record a line."""
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if _has_data(line)]
    try:
        value = parse_foreign(content)
    except ValueError as error:
        if not _is_json(lines[0][1]):
            raise UserError(f"{where} cannot be read ({error}): write JSON") from None
        return _table_of((f"line {n}", _parse(f"{where} line {n}", line)) for n, line in lines)
    if isinstance(value, dict) and any(isinstance(cells, list) for cells in value.values()):
        columns = [cells if isinstance(cells, list) else [cells] for cells in value.values()]
        value = [dict(zip(value, cells, strict=True)) for cells in zip_longest(*columns)]
    rows = value if isinstance(value, list) else [value]
    return _table_of((f"entry {n}", row) for n, row in enumerate(rows, 1))


def _is_json(line: str) -> bool:
    try:
        parse_foreign(line)
    except ValueError:
        return False
    return True


def _parse(where: str, line: str) -> Any:
    try:
        return parse_foreign(line)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}): write JSON") from None


def _table_of(rows: Iterable[tuple[str, Any]]) -> _Table:
    given = list(rows)
    columns = [*dict.fromkeys(key for _, row in given if isinstance(row, dict) for key in row)]
    if columns:
        cells = [
            (place, [row.get(key, "") if isinstance(row, dict) else row for key in columns])
            for place, row in given
        ]
        return _Table(columns, cells, has_header=True)
    listed = [(place, row if isinstance(row, list) else [row]) for place, row in given]
    most = max((len(cells) for _, cells in listed), default=1)
    return _Table([str(number + 1) for number in range(most)], listed, has_header=False)


def _length(where: str, cell: Any) -> int:
    """Return the tokens of a cell: ``4096``, ``4k``, ``8.0`` or ``1e3``."""
    text = _text(cell)
    if text.isascii() and text.isdigit() and len(text) < 10:
        number = int(text)
        if number:
            return number
    if not text:
        raise InvalidValue(where, text, Reason.EMPTY_ENTRY, _FIX)
    if _NUMBER.fullmatch(text):
        number = Decimal(text)
        if number > syntax.MAX_NUMBER:
            raise InvalidValue(where, text, Reason.ABOVE_MAXIMUM, _FIX, syntax.MAX_NUMBER)
        if number < 1:
            raise InvalidValue(where, text, Reason.BELOW_MINIMUM, _FIX, 1)
        if number % 1:
            raise InvalidValue(where, text, Reason.SYNTAX, _FIX)
        return int(number)
    return syntax.parse_number(where, text[:40], _SYNTAX)


def _text(cell: Any) -> str:
    return cell.strip() if isinstance(cell, str) else short_json(cell)
