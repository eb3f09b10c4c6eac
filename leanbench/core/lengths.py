"""Sequence lengths of a batch: uniform, sampled from a distribution or file, or explicit.

Batches of the traces in lengths.toml are those of a server at steady state: a sequence is in the
batch as often as it has output tokens, with its prompt and the output so far in the cache.
"""

from __future__ import annotations

import csv
import os
import random
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from leanbench.core import syntax
from leanbench.core.axis import Values
from leanbench.core.errors import InvalidValue, Reason, UserError, nearest, short
from leanbench.core.files import parse_foreign_json, read_text, short_json

UNIFORM = "uniform"
ONE_LONG = "one-long"
#: Tokens of the other sequences of `ONE_LONG`.
_SHORT_TOKENS = 16
ZIPF = "zipf"
#: Prefix of the mean over the longest length, as in ``mean-0.25``.
_MEAN = "mean-"
#: Log-uniform spread of the lengths of `_MEAN` before they are scaled.
_SPREAD = 64
#: Names of distributions, with their meanings. Traces are further names.
DISTRIBUTIONS = {
    UNIFORM: "all have the context",
    ONE_LONG: f"one has the context, the others {_SHORT_TOKENS} tokens",
    ZIPF: "the r-th longest has the context over r",
    f"{_MEAN}0.25": "one has the context, the mean is that share of it, the others log-uniform",
}
#: Maximum number of sequences of a ragged batch.
MAX_SEQUENCES = 4096
_LENGTHS = "lengths such as 1k+300 or 64k+16x3"

#: Tokens of each sequence: one number for all, or one per sequence.
Context = int | tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Lengths in a decode batch of a public trace at steady state."""

    source: str
    licence: str
    requests: int
    #: Evenly spaced quantiles, from the shortest to the longest length.
    quantiles: tuple[int, ...]

    @property
    def mean_tokens(self) -> float:
        """Mean of the drawn lengths, linear between quantiles."""
        inner = sum(self.quantiles[1:-1])
        ends = (self.quantiles[0] + self.quantiles[-1]) / 2
        return (inner + ends) / (len(self.quantiles) - 1)


@cache
def traces() -> dict[str, Trace]:
    """Return the traces that come with leanbench, by name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        name: Trace(**{**fields, "quantiles": tuple(fields["quantiles"])})
        for name, fields in tomllib.loads(text).items()
    }


class Lengths(Values):
    """Names of distributions, ``mean-0.25``, files, ``FILE:COLUMN``, or explicit lengths,
    ``64k+16x3``. All stay text, for `draw_context`.
    """

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return syntax.parse_list(name, text, lambda item: [self._value(name, item)], _items)

    def check(self, name: str, value: str) -> None:
        self._value(name, value)

    def _value(self, name: str, item: str) -> str:
        word = item.lower()
        if word.startswith(_MEAN):
            mean = _mean(name, word)
            return UNIFORM if mean == 1 else f"{_MEAN}{mean:g}"
        if word in _names():
            return word
        if is_explicit(word):
            return write_lengths(read_lengths(name, word))
        _file_quantiles(name, item)
        return item


class QueryLengths(Values):
    """Query tokens of each sequence, ``512+1x7``; None for equal numbers."""

    or_none = "equal query lengths"

    def parse(self, name: str, text: str) -> tuple[tuple[int, ...] | None, ...]:
        return syntax.parse_list(
            name,
            text,
            lambda item: [None] if item.lower() == "none" else [read_lengths(name, item)],
        )

    def check(self, name: str, value: tuple[int, ...] | None) -> None:
        if value is not None and min(value, default=0) < 1:
            fix = "write tokens of each sequence, such as 512+1x7"
            raise InvalidValue(name, value, Reason.BELOW_MINIMUM, fix, 1)

    def write(self, value: tuple[int, ...] | None) -> str:
        return "none" if value is None else write_lengths(value)

    def to_json(self, value: tuple[int, ...] | None) -> list[int] | None:
        return None if value is None else list(value)

    def from_json(self, name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or any(type(length) is not int for length in value):
            raise TypeError(f"{name} is no list of whole numbers")
        return tuple(value)


def is_explicit(lengths: str) -> bool:
    """Return True for a text with a length per sequence, which determines batch and context."""
    return lengths[:1].isdigit() and re.fullmatch(r"[0-9km+x]+", lengths) is not None


def read_lengths(name: str, text: str) -> tuple[int, ...]:
    """Parse the tokens of each sequence from ``1k+300+16x3``, where ``16x3`` is 16+16+16.

    Raises:
        UserError: Invalid text, or more than MAX_SEQUENCES lengths.
    """
    lengths: list[int] = []
    for part in text.lower().split("+"):
        tokens, times, count = part.partition("x")
        if not tokens or (times and not count):
            raise InvalidValue(name, text[:40], Reason.SYNTAX, f"write {_LENGTHS}")
        repeats = syntax.parse_number(name, count) if times else 1
        if len(lengths) + repeats > MAX_SEQUENCES:
            fix, limit = "leave some out", MAX_SEQUENCES
            raise InvalidValue(name, text[:40], Reason.TOO_MANY_VALUES, fix, limit)
        lengths += [syntax.parse_number(name, tokens, _LENGTHS)] * repeats
    return tuple(lengths)


def write_lengths(lengths: tuple[int, ...]) -> str:
    """Format lengths as `read_lengths` reads them: ``65536+16x3``."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return "+".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)


def as_context(lengths: tuple[int, ...]) -> Context:
    """Return one number if all lengths are equal."""
    return lengths[0] if len(set(lengths)) == 1 else lengths


def longest_in_file(lengths: str) -> int | None:
    """Return the longest length of a file, or None if a value of `Lengths` names no file."""
    return None if _is_no_file(lengths) else _file_quantiles("lengths", lengths)[-1]


def _is_no_file(text: str) -> bool:
    word = text.strip().lower()
    return word in _names() or word.startswith(_MEAN) or is_explicit(word)


def _items(text: str) -> list[str]:
    """Split at commas, but not at those in the name of a file or a column."""
    pieces = text.split(",")
    if not names_file(text):
        return pieces
    if os.path.lexists(text):
        return [text]
    items = pieces[:1]
    for piece in pieces[1:]:
        if _is_no_file(items[-1]) or _is_no_file(piece) or names_file(piece.strip()):
            items.append(piece)
        else:
            items[-1] += f",{piece}"
    return items


def _names() -> tuple[str, ...]:
    return (*DISTRIBUTIONS, *traces())


def draw_context(
    lengths: str, batch: int, longest: int, draw: random.Random | None = None
) -> Context:
    """Draw the lengths of a batch, none above `longest`.

    Args:
        lengths: Value of `Lengths`, not explicit lengths.
        draw: Random numbers; None seeds them by the other arguments, so that a cell is the same
            problem in every sweep and Python version.

    Raises:
        UserError: The batch cannot have such lengths, or a file cannot be read.
    """
    if lengths == UNIFORM:
        return longest
    if batch > MAX_SEQUENCES:
        fix = f"choose a smaller one for lengths {lengths}"
        raise InvalidValue("batch", batch, Reason.ABOVE_MAXIMUM, fix, MAX_SEQUENCES)
    if lengths.startswith(_MEAN):
        mean = _mean("lengths", lengths)
        draw = draw or random.Random(f"{batch} {longest} {mean!r}")
        return as_context(_lengths_of_mean(batch, longest, mean, draw)) if batch > 1 else longest
    draw = draw or random.Random(f"{batch} {longest} {lengths}")
    if lengths in (ONE_LONG, ZIPF):
        return as_context(_ranked(lengths, batch, longest, draw))
    trace = traces().get(lengths)
    quantiles = trace.quantiles if trace else _file_quantiles("lengths", lengths)
    return as_context(tuple(min(longest, _inverse(quantiles, draw.random())) for _ in range(batch)))


def _ranked(lengths: str, batch: int, longest: int, draw: random.Random) -> tuple[int, ...]:
    """Return lengths that follow from a sequence's rank, in random order."""
    if lengths == ZIPF:
        ranked = [max(1, longest // rank) for rank in range(1, batch + 1)]
    else:
        ranked = [longest, *[min(longest, _SHORT_TOKENS)] * (batch - 1)]
    draw.shuffle(ranked)
    return tuple(ranked)


def _inverse(quantiles: tuple[int, ...], share: float) -> int:
    """Return the length at a share of a distribution, linear between its quantiles."""
    position = share * (len(quantiles) - 1)
    below = int(position)
    above = quantiles[min(below + 1, len(quantiles) - 1)]
    return max(1, round(quantiles[below] + (position - below) * (above - quantiles[below])))


def _mean(name: str, text: str) -> float:
    number = text.removeprefix(_MEAN)
    # Plain decimals only: float() would also take "nan", "inf" and "1_0".
    if not re.fullmatch(r"\d{0,1}\.?\d{1,9}", number, re.ASCII) or not 0 < float(number) <= 1:
        fix = f"write the mean over the maximum, above 0 and up to 1, such as {_MEAN}0.25"
        raise InvalidValue(name, text, Reason.SYNTAX, fix)
    return float(number)


def _lengths_of_mean(
    batch: int, longest: int, mean_over_max: float, draw: random.Random
) -> tuple[int, ...]:
    """Draw `batch` lengths: one is `longest`, the mean is `mean_over_max` x `longest`.

    The other lengths are log-uniform over a factor of _SPREAD, then scaled to the mean, clipped to
    1..longest and rounded. The mean is met to within one token.

    Raises:
        UserError: The longest sequence alone exceeds the mean.
    """
    if mean_over_max * batch <= 1:
        fix = f"choose a larger mean for batch {batch}, or a batch above {1 / mean_over_max:g}"
        value, limit = f"{_MEAN}{mean_over_max:g}", f"{_MEAN}{1 / batch:.3g}"
        raise InvalidValue("lengths", value, Reason.BELOW_MINIMUM, fix, limit)
    weights = [_SPREAD ** (draw.random() - 1) for _ in range(batch - 1)]
    target = mean_over_max * batch * longest - longest

    def clipped(scale: float) -> list[float]:
        return [min(longest, max(1.0, scale * weight)) for weight in weights]

    # The sum grows with the scale; at the upper end every length is clipped to the longest.
    low, high = 0.0, float(longest) * _SPREAD
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < target else (low, middle)
    lengths = [round(length) for length in clipped(high)]
    lengths.insert(draw.randrange(batch), longest)
    return tuple(lengths)


@lru_cache(maxsize=16)
def _file_quantiles(name: str, file: str) -> tuple[int, ...]:
    """Return the lengths of a file from the shortest to the longest.

    Raises:
        UserError: There is no such file, or it has no lengths; see `read_lengths_of`.
    """
    if not names_file(file):
        fix = f"write a distribution, a file or {_LENGTHS} ({nearest(file, _names())})"
        raise InvalidValue(name, file[:80], Reason.UNSUPPORTED, fix)
    return tuple(sorted(read_lengths_of(name, file)))


_MOST_MB = 100
_DELIMITERS = ",;\t|"
#: Commands that unpack a compressed file, by its suffix.
_UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
_NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
#: Numbers or missing values of other programs rather than names of columns.
_NO_NAMES = {"nan", "inf", "infinity", "none", "null", "true", "false", "na", "n/a"}
_SYNTAX = "whole numbers of tokens such as 8192, or name another column: FILE:COLUMN"
_FIX = f"write {_SYNTAX}"


@dataclass(eq=False)
class UnknownColumn(UserError):
    """A column that a file of lengths does not have, or none of several."""

    #: File, as given.
    file: str
    #: Column, as given; empty without one.
    column: str
    #: Columns of the file, in its order.
    columns: Sequence[str]
    #: Column of numbers, if no column is given.
    example: str = ""

    def __str__(self) -> str:
        columns = [name[:80] for name in self.columns if name]
        if not self.column:
            names = ", ".join(columns[:20])
            example = f"--lengths {self.file}:{self.example}"
            return f"{self.file} has several columns ({names}): name one, such as {example}"
        return (
            f"{self.file} has no column {short(self.column)}, {nearest(self.column[:80], columns)}"
        )


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
    where = f"{name} {file!r}"
    if command := _UNPACK.get(Path(file).suffix.lower()):
        raise UserError(f"{where} is compressed: unpack it with `{command}`")
    # Texts can have other line breaks of Unicode.
    lines = re.split("\r\n?|\n", read_text(Path(file), _MOST_MB))
    is_json = next(filter(_has_data, lines), "").lstrip()[:1] in ("[", "{")
    table = _read_json(where, lines) if is_json else _read_lines(where, lines)
    if not table.rows:
        raise UserError(f"{where} has no length: write one a line")
    index = _column(file, column, table)
    if index is None:
        [(at, cells)] = table.rows
        return [_length(f"{where} {at}:", cell) for cell in cells]
    title = f", column {short(table.columns[index])}" if len(table.columns) > 1 else ""
    return [
        _length(f"{where} {at}{title}:", cells[index] if index < len(cells) else "")
        for at, cells in table.rows
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
    #: Position of each row, such as ``line 3``, and its cells.
    rows: Sequence[tuple[str, Sequence[Any]]]
    has_header: bool

    @classmethod
    def without_header(cls, rows: Sequence[tuple[str, Sequence[Any]]]) -> _Table:
        """Name the columns by their numbers."""
        columns = max((len(cells) for _, cells in rows), default=1)
        return cls([str(number + 1) for number in range(columns)], rows, has_header=False)


def _column(file: str, column: str, table: _Table) -> int | None:
    """Return the index of a column; None if the file is one row of lengths."""
    if column:
        if column not in table.columns:
            raise UnknownColumn(file, column, table.columns)
        if (count := table.columns.count(column)) > 1:
            raise UserError(
                f"{file} has {count} columns {short(column)}: give each a name of its own"
            )
        return table.columns.index(column)
    if len(table.columns) == 1:
        return 0
    if len(table.rows) == 1 and not table.has_header:
        return None
    named = [(index, name) for index, name in enumerate(table.columns) if name]
    lengths = (
        name
        for index, name in named
        if all(index < len(cells) and _is_length(cells[index]) for _, cells in table.rows)
    )
    raise UnknownColumn(file, "", table.columns, next(lengths, named[0][1]))


def _read_lines(where: str, lines: Sequence[str]) -> _Table:
    """Read one length a line, or a table separated by commas, semicolons, tabs, bars or spaces."""
    first = next(filter(_has_data, lines), "")
    # A quoted cell can have any of them.
    delimiter = max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", first).count)
    if delimiter in first:
        rows = _read_csv(where, lines, delimiter)
    elif any(line.lstrip()[:1] == '"' for line in lines):
        rows = _read_csv(where, lines, " ")
    else:
        rows = [(f"line {n}", line.split()) for n, line in enumerate(lines, 1) if _has_data(line)]
    header = rows[0][1] if rows and _is_header(rows[0][1]) else None
    if header is None:
        return _Table.without_header(rows)
    rows = rows[1:]
    if len(header) > 1 and delimiter not in first and all(len(cells) == 1 for _, cells in rows):
        header = [first.strip()]
    return _Table([*header], rows, has_header=True)


def _read_csv(where: str, lines: Sequence[str], delimiter: str) -> list[tuple[str, Sequence[str]]]:
    # A cell can be a prompt, of any length and with several lines.
    csv.field_size_limit(_MOST_MB * 1_000_000)
    rows, begins = [], 1
    # Comments can have quotes. In a quoted cell, # begins none.
    text = (
        f"{line}\n" if n != begins or _has_data(line) else "\n" for n, line in enumerate(lines, 1)
    )
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for cells in reader:
            begins = reader.line_num + 1
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                rows.append((f"line {reader.line_num}", stripped))
    except csv.Error:
        raise UserError(
            f"{where} line {begins} has a quoted cell that does not end with its quote: close it,"
            " and write a quote in a cell twice"
        ) from None
    return rows


def _has_data(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _is_header(cells: Sequence[str]) -> bool:
    """Return True for names of columns. ``4q`` is a wrong number rather than a name."""
    names = [cell for cell in cells if cell[:1].isalpha() or cell[:1] == "_"]
    is_name = any(name.lower() not in _NO_NAMES for name in names)
    return is_name and not any(map(_NUMBER.fullmatch, cells))


def _read_json(where: str, lines: Sequence[str]) -> _Table:
    """Read a list of numbers or records, columns by name, or a record a line."""
    records = [(n, line) for n, line in enumerate(lines, 1) if _has_data(line)]
    try:
        value = parse_foreign_json("\n".join(line if _has_data(line) else "" for line in lines))
    except ValueError as error:
        # One of the first two can be cut off.
        if not any(_is_record(line) for _, line in records[:2]):
            raise UserError(f"{where} cannot be read ({error}): write JSON") from None
        return _table_of((f"line {n}", _parse(f"{where} line {n}", line)) for n, line in records)
    if isinstance(value, dict) and any(isinstance(cells, list) for cells in value.values()):
        columns = [cells if isinstance(cells, list) else [cells] for cells in value.values()]
        value = [dict(zip(value, cells, strict=True)) for cells in zip_longest(*columns)]
    rows = value if isinstance(value, list) else [value]
    return _table_of((f"entry {n}", row) for n, row in enumerate(rows, 1))


def _is_record(line: str) -> bool:
    try:
        return isinstance(parse_foreign_json(line), dict | list)
    except ValueError:
        return False


def _parse(where: str, line: str) -> Any:
    try:
        return parse_foreign_json(line)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}): write JSON") from None


def _table_of(rows: Iterable[tuple[str, Any]]) -> _Table:
    rows = list(rows)
    columns = [*dict.fromkeys(key for _, row in rows if isinstance(row, dict) for key in row)]
    if columns:
        cells = [
            (at, [row.get(key, "") if isinstance(row, dict) else row for key in columns])
            for at, row in rows
        ]
        return _Table(columns, cells, has_header=True)
    is_table = all(isinstance(row, list) for _, row in rows)
    return _Table.without_header([(at, row if is_table else [row]) for at, row in rows])


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


def _is_length(cell: Any) -> bool:
    try:
        return _length("", cell) > 0
    except InvalidValue:
        return False


def _text(cell: Any) -> str:
    return cell.strip() if isinstance(cell, str) else short_json(cell)
