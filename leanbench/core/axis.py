"""Axis declarations and their value types. `leanbench.core.axes` has the table of all axes."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from leanbench.core import syntax
from leanbench.core.errors import InvalidValue, Reason


class Values(ABC):
    """Value type of an axis. Methods that reject a value raise InvalidValue."""

    #: JSON type of a value, and its name in messages.
    json_type: type = str
    kind: str = "text"
    #: Meaning of ``none``, such as "no window"; empty if the axis has no such value.
    or_none: str = ""
    #: Value stored for ``none``: None, or a number that is otherwise invalid.
    none: Any = None
    #: True if a value reads well without the axis name: ``bf16``, ``causal``.
    is_word: bool = False

    @abstractmethod
    def parse(self, name: str, text: str) -> tuple[Any, ...]:
        """Parse a flag or a sweep-file key. Keep the order, drop duplicates."""

    @abstractmethod
    def check(self, name: str, value: Any) -> None:
        """Raise InvalidValue for a value that no problem can have."""

    def write(self, value: Any) -> str:
        """Format a value as text that `parse` accepts."""
        return "none" if self._is_none(value) else str(value)

    def _is_none(self, value: Any) -> bool:
        return value is None or (self.or_none != "" and value == self.none)

    def to_json(self, value: Any) -> Any:
        """Convert to JSON. Equal values convert to the same text: 30 and 30.0."""
        return None if value is None else self.json_type(value)

    def from_json(self, name: str, value: Any) -> Any:
        """Convert the output of `to_json` back.

        Raises:
            TypeError: `value` has another type. Python would accept 8.0 and true as numbers.
        """
        if value is not None and type(value) is not self.json_type:
            raise TypeError(f"{name} is no {self.kind}")
        return value

    def reads(self, text: str) -> bool:
        """Return True if a word of a problem, without its letter, belongs to this axis."""
        return text[:1] in {*"0123456789+-"}


@dataclass(frozen=True)
class Whole(Values):
    """Whole numbers from `least` to `most`."""

    most: int = syntax.MAX_NUMBER
    multiple_of: int = 1
    or_none: str = ""
    none: int | None = None
    least: int = 1
    #: Description of a valid value, for error messages.
    syntax: str = syntax.COUNT
    json_type: type = int
    kind: str = "whole number"

    def parse(self, name: str, text: str) -> tuple[int | None, ...]:
        return syntax.parse_list(name, text, lambda item: self._parse_item(name, item))

    def _parse_item(self, name: str, item: str) -> list[int | None]:
        if self.or_none and item.lower() == "none":
            return [self.none]
        numbers = syntax.numbers_of(name, item, self.syntax, self.least, self.most)
        for number in numbers:
            self.check(name, number)
        return [*numbers]

    def check(self, name: str, value: int | None) -> None:
        if self.or_none and value == self.none:
            return
        fix = f"write {self.syntax}"
        if value is None or value < self.least:
            raise InvalidValue(name, value, Reason.BELOW_MINIMUM, fix, self.least)
        if value > self.most:
            raise InvalidValue(name, value, Reason.ABOVE_MAXIMUM, fix, self.most)
        if value % self.multiple_of:
            raise InvalidValue(name, value, Reason.NOT_A_MULTIPLE, fix, self.multiple_of)


@dataclass(frozen=True)
class Decimals(Values):
    """Positive numbers up to `most`, with or without decimals."""

    most: float
    #: Noun for a value, with its article: "a soft cap".
    meaning: str
    #: Sample values for error messages.
    example: str
    or_none: str = ""
    none: float | None = None
    json_type: type = float
    kind: str = "number"

    def parse(self, name: str, text: str) -> tuple[float | None, ...]:
        return syntax.parse_list(name, text, lambda item: [self._parse_item(name, item)])

    def _parse_item(self, name: str, item: str) -> float | None:
        if self.or_none and item.lower() == "none":
            return self.none
        # float() would also accept "nan", "inf" and "1_0".
        if not re.fullmatch(r"\d{0,9}\.?\d{1,9}", item, re.ASCII):
            raise self._invalid(name, item, Reason.SYNTAX)
        number = float(item)
        self._check_range(name, number)
        return number

    def check(self, name: str, value: float | None) -> None:
        if not (self.or_none and value == self.none):
            self._check_range(name, value)

    def _check_range(self, name: str, value: float | None) -> None:
        if value is None or not value > 0:  # also rejects nan
            raise self._invalid(name, value, Reason.NOT_POSITIVE)
        if value > self.most:
            raise self._invalid(name, value, Reason.ABOVE_MAXIMUM, self.most)

    def _invalid(
        self, name: str, value: object, reason: Reason, limit: float | None = None
    ) -> InvalidValue:
        none = f", or none for {self.or_none}" if self.or_none else ""
        fix = f"write {self.meaning} above 0 and up to {self.most:g} such as {self.example}{none}"
        return InvalidValue(name, value, reason, fix, limit)

    def from_json(self, name: str, value: Any) -> Any:
        return super().from_json(name, float(value) if type(value) is int else value)

    def write(self, value: float | None) -> str:
        return super().write(value).removesuffix(".0")


_TIMES = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)x", re.ASCII | re.IGNORECASE)


class Capacity(Values):
    """Tokens allocated per sequence: a number, a multiple of the longest sequence such as ``4x``,
    or None for exactly the longest sequence.
    """

    or_none = "exact capacity"
    json_type = int
    kind = "whole number"
    _SYNTAX = "exact, a multiple of the longest sequence such as 4x, or tokens such as 32k"

    def parse(self, name: str, text: str) -> tuple[int | str | None, ...]:
        return syntax.parse_list(name, text, lambda item: self._parse_item(name, item))

    def _parse_item(self, name: str, item: str) -> list[int | str | None]:
        if item.lower() in ("exact", "1x"):
            return [None]
        if _TIMES.fullmatch(item):
            self.check(name, item.lower())
            return [item.lower()]
        return [*syntax.numbers_of(name, item, self._SYNTAX)]

    def check(self, name: str, value: int | str | None) -> None:
        times = _TIMES.fullmatch(value) if isinstance(value, str) else None
        number = float(times[1]) if times else value
        if isinstance(number, str):
            raise InvalidValue(name, value, Reason.SYNTAX, f"write {self._SYNTAX}")
        if number is not None and number < 1:
            raise InvalidValue(name, value, Reason.BELOW_MINIMUM, f"write {self._SYNTAX}", 1)

    def write(self, value: int | str | None) -> str:
        return "exact" if value is None else str(value)

    def to_json(self, value: int | str | None) -> int | str | None:
        return value

    def reads(self, text: str) -> bool:
        return super().reads(text) or text.lower() == "exact"


_BLOCKS = re.compile(r"([1-9]\d{0,9})x([1-9]\d{0,9})", re.ASCII)


class Chosen(Values):
    """Tokens that a sequence sees of its context: their number; blocks of each KV head, as
    ``16x128``; or None for all.
    """

    or_none = "all tokens"
    json_type = int
    kind = "number of tokens, or blocks such as 16x128"
    _SYNTAX = (
        "a number of tokens such as 2048, blocks for each KV head such as 16x128 (16 of 128"
        " tokens), or none for all tokens"
    )

    def parse(self, name: str, text: str) -> tuple[int | str | None, ...]:
        return syntax.parse_list(name, text, lambda item: self._parse_item(name, item.lower()))

    def _parse_item(self, name: str, item: str) -> list[int | str | None]:
        if item == "none":
            return [None]
        if "x" in item and ":" not in item:
            self.check(name, item)
            return [item]
        return [*syntax.numbers_of(name, item, self._SYNTAX)]

    def check(self, name: str, value: int | str | None) -> None:
        fix, tokens = f"write {self._SYNTAX}", value
        if isinstance(value, str):
            blocks = _BLOCKS.fullmatch(value)
            if blocks is None:
                raise InvalidValue(name, value, Reason.SYNTAX, fix)
            tokens = int(blocks[1]) * int(blocks[2])
        if not isinstance(tokens, int):
            return
        if tokens < 1:
            raise InvalidValue(name, value, Reason.BELOW_MINIMUM, fix, 1)
        if tokens > syntax.MAX_NUMBER:
            raise InvalidValue(name, value, Reason.ABOVE_MAXIMUM, fix, syntax.MAX_NUMBER)

    def to_json(self, value: int | str | None) -> int | str | None:
        return value

    def from_json(self, name: str, value: Any) -> Any:
        return value if isinstance(value, str) else super().from_json(name, value)


def resolve_capacity(value: int | str | None, longest: int) -> int | None:
    """Convert a capacity to tokens; None if it equals the longest sequence.

    Raises:
        InvalidValue: The longest sequence does not fit.
    """
    tokens = math.ceil(float(value[:-1]) * longest) if isinstance(value, str) else value
    if tokens is not None and tokens < longest:
        fix = "write at least the tokens of the longest sequence, or exact"
        raise InvalidValue("capacity", tokens, Reason.BELOW_MINIMUM, fix, longest)
    return None if tokens == longest else tokens


@dataclass(frozen=True)
class Words(Values):
    """One word out of `choices`."""

    choices: tuple[str, ...]
    #: Normalizes input before it is compared with the choices.
    fold: Callable[[str], str] = str.lower
    or_none: str = ""
    is_word: bool = True

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        return syntax.parse_list(name, text, lambda item: [self._parse_item(name, item)])

    def _parse_item(self, name: str, item: str) -> str:
        folded = self.fold(item)
        # The message shows an unknown word as typed.
        return syntax.choose(name, folded if folded in self.choices else item, self.choices)

    def check(self, name: str, value: str) -> None:
        syntax.choose(name, value, self.choices)

    def reads(self, text: str) -> bool:
        return self.fold(text) in self.choices


@dataclass(frozen=True)
class Switch(Values):
    """True or False, each with its own word."""

    on: str
    off: str
    json_type: type = bool
    kind: str = "true or false"
    is_word: bool = True

    def parse(self, name: str, text: str) -> tuple[bool, ...]:
        return syntax.parse_list(name, text, lambda item: [self._parse_item(name, item.lower())])

    def _parse_item(self, name: str, item: str) -> bool:
        if item in (self.on, "yes"):
            return True
        if item in (self.off, "no"):
            return False
        fix = f"choose from yes, no, {self.on}, {self.off}"
        raise InvalidValue(name, item, Reason.UNSUPPORTED, fix)

    def check(self, name: str, value: bool) -> None:
        if not isinstance(value, bool):
            raise InvalidValue(name, value, Reason.UNSUPPORTED, "choose from True, False")

    def write(self, value: bool) -> str:
        return self.on if value else self.off

    def reads(self, text: str) -> bool:
        return text.lower() in (self.on, self.off)


class HeadPairs(Values):
    """(q_heads, kv_heads) pairs such as ``32/8``; ``56`` means 56 of each."""

    _SYNTAX = "query heads, or query/KV heads, such as 56 or 32/8"

    def parse(self, name: str, text: str) -> tuple[tuple[int, int], ...]:
        return syntax.parse_list(name, text, lambda item: self._parse_item(name, item))

    def _parse_item(self, name: str, item: str) -> list[tuple[int, int]]:
        if "/" not in item:
            return [(heads, heads) for heads in syntax.numbers_of(name, item, self._SYNTAX)]
        parts = item.split("/")
        if len(parts) != 2 or not all(map(str.strip, parts)):
            raise InvalidValue(name, item, Reason.SYNTAX, f"write {self._SYNTAX}")
        q_heads, kv_heads = (syntax.parse_number(name, part, self._SYNTAX) for part in parts)
        self.check(name, (q_heads, kv_heads))
        return [(q_heads, kv_heads)]

    def check(self, name: str, value: tuple[int, int]) -> None:
        q_heads, kv_heads = value
        if q_heads % kv_heads:
            pair = f"{q_heads}/{kv_heads}"
            raise InvalidValue(name, pair, Reason.UNEVEN_HEADS, "write for example 32/8")

    def write(self, value: tuple[int, int]) -> str:
        q_heads, kv_heads = value
        return f"{q_heads}" if q_heads == kv_heads else f"{q_heads}/{kv_heads}"


#: Default of an axis that every problem must set.
REQUIRED: Any = object()


@dataclass(frozen=True)
class Axis:
    """One dimension of the problem space.

    Flags, sweep files, labels, tables and kernels read everything about a dimension from here.
    """

    #: Sweep-file key, AttentionProblem field and column name. The flag replaces _ by -.
    name: str
    values: Values
    #: Prefix of the value in labels: the "b" of ``b8``. If empty, no other axis may use the words
    #: of this one.
    letter: str = ""
    #: Default of a problem; REQUIRED if the problem must set it.
    default: Any = REQUIRED
    #: Default of a sweep; None for the problem's default.
    swept: tuple[Any, ...] | None = None
    #: Help text of the flag.
    help: str = ""
    metavar: str = "LIST"
    #: Sweep axis that sets this field along with others: heads sets q_heads and kv_heads.
    part_of: str = ""
    #: Include the default value in labels and commands, or in JSON. Must be False for an axis
    #: added later: it would rename existing problems.
    always_in_label: bool = False
    always_in_json: bool = False
    #: Column heading and name in charts; defaults to the name.
    label: str = ""
    #: Format string for reports; defaults to "<label> <value>".
    phrase: str = ""
    #: Predicate of kernels without support for the axis: "takes no sinks".
    refusal: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def grid(self) -> tuple[Any, ...]:
        """Default values of a sweep."""
        return (self.default,) if self.swept is None else self.swept

    @property
    def grid_text(self) -> str:
        """Default values of a sweep, as a flag accepts them."""
        return ",".join(map(self.write, self.grid))

    @property
    def is_number(self) -> bool:
        """True if every value is a number, so that the axis can be the x axis of a chart."""
        return self.values.json_type in (int, float) and not self.values.or_none

    @property
    def title(self) -> str:
        """Column heading."""
        return self.label or self.name

    @property
    def meaning(self) -> str:
        """Description of the column."""
        return self.help

    def parse(self, text: str) -> tuple[Any, ...]:
        """Parse a flag or a sweep-file key; raises UserError."""
        return self.values.parse(self.name, text)

    def write(self, value: Any) -> str:
        """Format a value as text that `parse` accepts."""
        return self.values.write(value)

    def to_json(self, value: Any) -> Any:
        """Convert a value to JSON."""
        return self.values.to_json(value)

    def from_json(self, value: Any) -> Any:
        """Convert the output of `to_json` back; raises TypeError."""
        return self.values.from_json(self.name, value)

    def check(self, value: Any) -> None:
        """Raise UserError for a value that no problem can have."""
        self.values.check(self.name, value)

    def describe(self, text: str) -> str:
        """Return a formatted value as a report shows it: ``q_len 4``, ``bf16``, ``pages of 64``."""
        if self.values.or_none and text == self.write(self.values.none):
            return self.values.or_none
        phrase = self.phrase or ("{}" if self.values.is_word else f"{self.title} {{}}")
        return phrase.format(text)


def axis(values: Values, letter: str = "", default: Any = REQUIRED, **options: Any) -> Any:
    """Declare a dataclass field that is an axis; `options` are further fields of `Axis`."""
    declared = Axis("", values, letter, default, **options)
    return field(default=MISSING if default is REQUIRED else default, metadata={"axis": declared})


def axes_of(dataclass_type: type) -> tuple[Axis, ...]:
    """Return the axes declared in a dataclass, in field order."""
    return tuple(
        replace(declared.metadata["axis"], name=declared.name)
        for declared in fields(dataclass_type)
    )
