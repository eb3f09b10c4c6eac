"""What an axis takes: how its values are read from text, refused and written."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leanbench.core import syntax
from leanbench.core.errors import UserError


class Values(ABC):
    """What an axis takes: how values are read, refused and written."""

    #: Of a value in JSON, and its name.
    json_type: type = str
    kind: str = "text"
    #: What `none` stands for, and is written as ``none``; empty: it is no value.
    or_none: str = ""
    #: The value of an axis that is off: None, or a number that no other value is.
    none: Any = None
    #: Whether its values are words that say by themselves what they are of.
    is_word: bool = False

    @abstractmethod
    def parse(self, name: str, text: str) -> tuple[Any, ...]:
        """The values of a flag or of a sweep file's key, in the order given and without repeats.

        Raises:
            UserError: `text` is not understood, or holds what `check` refuses.
        """

    @abstractmethod
    def check(self, name: str, value: Any) -> None:
        """Refuses a value that no problem has.

        Raises:
            UserError: names the value, the limit and the fix.
        """

    def write(self, value: Any) -> str:
        """The text that `parse` reads back."""
        return "none" if self._is_none(value) else str(value)

    def _is_none(self, value: Any) -> bool:
        return value is None or (self.or_none != "" and value == self.none)

    def to_json(self, value: Any) -> Any:
        """The value in JSON: equal values are written alike, 30 and 30.0."""
        return None if value is None else self.json_type(value)

    def from_json(self, name: str, value: Any) -> Any:
        """What `to_json` wrote.

        Raises:
            TypeError: `value` is of another type; 8.0 and true compare as numbers do, and would go
                far.
        """
        if value is not None and type(value) is not self.json_type:
            raise TypeError(f"{name} is no {self.kind}")
        return value

    def reads(self, text: str) -> bool:
        """Whether `text`, what follows the letter in a word of a problem, is meant for the axis."""
        return text[:1] in {*"0123456789+-"}


@dataclass(frozen=True)
class Whole(Values):
    """Whole numbers from `least` on."""

    most: int = syntax.MAX_NUMBER
    #: Where not every number will do.
    multiple_of: int = 1
    or_none: str = ""
    none: int | None = None
    least: int = 1
    #: What one value may be, for the sentence that refuses another.
    syntax: str = syntax.COUNT
    json_type: type = int
    kind: str = "whole number"

    def parse(self, name: str, text: str) -> tuple[int | None, ...]:
        def values(item: str) -> list[int | None]:
            if self.or_none and item.lower() == "none":
                return [self.none]
            numbers = syntax.numbers_of(name, item, self.syntax, least=self.least, limit=self.most)
            for number in numbers:
                self.check(name, number)
            return [*numbers]

        return syntax.parse_list(name, text, values)

    def check(self, name: str, value: int | None) -> None:
        if self.or_none and value == self.none:
            return
        if value is None or value < self.least:
            raise UserError(f"{name} is {value}, it must be at least {self.least}{self._hint}")
        if value > self.most:
            raise UserError(
                f"{name} {value} is above the limit of {self.most}: choose {self._range}"
                f"{self._hint}"
            )
        if value % self.multiple_of:
            raise UserError(
                f"{name} {value} is no multiple of {self.multiple_of}: choose one, up to"
                f" {self.most}{self._hint}"
            )

    @property
    def _range(self) -> str:
        if self.multiple_of == 1:
            return f"from {self.least} to {self.most}"
        return f"a multiple of {self.multiple_of} up to {self.most}"

    @property
    def _hint(self) -> str:
        return f", or none for {self.or_none}" if self.or_none else ""


@dataclass(frozen=True)
class Decimals(Values):
    """Numbers above 0, with decimals or without."""

    most: float
    #: What a value is, with its article.
    meaning: str
    #: Values as people write them.
    example: str
    or_none: str = ""
    none: float | None = None
    json_type: type = float
    kind: str = "number"

    def parse(self, name: str, text: str) -> tuple[float | None, ...]:
        def value(item: str) -> list[float | None]:
            if self.or_none and item.lower() == "none":
                return [self.none]
            # Plain decimals only: float() would also take "nan", "inf" and "1_0".
            plain = re.fullmatch(r"\d{0,9}\.?\d{1,9}", item, re.ASCII)
            if plain is None or not 0 < float(item) <= self.most:
                raise self._refusal(name, item)
            return [float(item)]

        return syntax.parse_list(name, text, value)

    def check(self, name: str, value: float | None) -> None:
        if self.or_none and value == self.none:
            return
        if value is None or not 0 < value <= self.most:
            raise self._refusal(name, value)

    def from_json(self, name: str, value: Any) -> Any:
        return super().from_json(name, float(value) if type(value) is int else value)

    def write(self, value: float | None) -> str:
        return super().write(value).removesuffix(".0")

    def _refusal(self, name: str, value: Any) -> UserError:
        none = f", or none for {self.or_none}" if self.or_none else ""
        return UserError(
            f"{name} {value!r} is not {self.meaning}, write numbers above 0 and up to"
            f" {self.most:g} such as {self.example}{none}"
        )


_TIMES = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)x", re.ASCII | re.IGNORECASE)


class Capacity(Values):
    """Tokens that every sequence of a cache has room for: a number, a multiple of the longest
    sequence such as ``4x``, or None, as many as that one has.
    """

    or_none = "a cache that ends with its longest sequence"
    json_type = int
    kind = "whole number"
    _SYNTAX = "exact, a multiple of the longest sequence such as 4x, or tokens such as 32k"

    def parse(self, name: str, text: str) -> tuple[int | str | None, ...]:
        return syntax.parse_list(name, text, lambda item: self._values(name, item))

    def _values(self, name: str, item: str) -> list[int | str | None]:
        if item.lower() in ("exact", "1x"):
            return [None]
        if _TIMES.fullmatch(item):
            self.check(name, item.lower())
            return [item.lower()]
        return [*syntax.numbers_of(name, item, self._SYNTAX)]

    def check(self, name: str, value: int | str | None) -> None:
        times = _TIMES.fullmatch(value) if isinstance(value, str) else None
        least = float(times[1]) if times else value
        if isinstance(least, str) or (least is not None and least < 1):
            raise UserError(f"{name} {value!r} is not understood, write {self._SYNTAX}")

    def write(self, value: int | str | None) -> str:
        return "exact" if value is None else str(value)

    def to_json(self, value: int | str | None) -> int | str | None:
        return value

    def reads(self, text: str) -> bool:
        return super().reads(text) or text.lower() == "exact"


def resolve_capacity(value: int | str | None, longest: int) -> int | None:
    """Tokens; None where they are the longest sequence's.

    Raises:
        UserError: the longest sequence does not fit in.
    """
    tokens = math.ceil(float(value[:-1]) * longest) if isinstance(value, str) else value
    if tokens is not None and tokens < longest:
        raise UserError(
            f"capacity {tokens} is below the longest sequence, {longest} tokens: write a capacity"
            f" of at least {longest}, or exact"
        )
    return None if tokens == longest else tokens


@dataclass(frozen=True)
class Words(Values):
    """One word of a few."""

    choices: tuple[str, ...]
    #: Makes what people type one of the choices.
    fold: Callable[[str], str] = str.lower
    is_word: bool = True

    def parse(self, name: str, text: str) -> tuple[str, ...]:
        def value(item: str) -> list[str]:
            folded = self.fold(item)
            # Refused as it was typed.
            known = folded if folded in self.choices else item
            return [syntax.choose(name, known, self.choices)]

        return syntax.parse_list(name, text, value)

    def check(self, name: str, value: str) -> None:
        syntax.choose(name, value, self.choices)

    def reads(self, text: str) -> bool:
        return self.fold(text) in self.choices


@dataclass(frozen=True)
class Switch(Values):
    """True and False, a word for both."""

    on: str
    off: str
    json_type: type = bool
    kind: str = "true or false"
    is_word: bool = True

    def parse(self, name: str, text: str) -> tuple[bool, ...]:
        return syntax.parse_list(name, text, lambda item: [self._value(name, item.lower())])

    def _value(self, name: str, item: str) -> bool:
        if item in (self.on, "yes"):
            return True
        if item in (self.off, "no"):
            return False
        raise UserError(
            f"{name} {item!r} is not understood, write yes or {self.on}, no or {self.off}"
        )

    def check(self, name: str, value: bool) -> None:
        if not isinstance(value, bool):
            raise UserError(f"{name} {value!r} is neither true nor false, give one of them")

    def write(self, value: bool) -> str:
        return self.on if value else self.off

    def reads(self, text: str) -> bool:
        return text.lower() in (self.on, self.off)


class HeadPairs(Values):
    """(q_heads, kv_heads) pairs from ``56,32/8``; one number means as many KV heads as query
    heads.
    """

    _SYNTAX = "query heads, or query/KV heads, such as 56 or 32/8"
    _HINT = ", or query heads/KV heads such as 32/8"

    def parse(self, name: str, text: str) -> tuple[tuple[int, int], ...]:
        return syntax.parse_list(name, text, lambda item: self._pairs(name, item))

    def _pairs(self, name: str, item: str) -> list[tuple[int, int]]:
        if "/" not in item:
            numbers = syntax.numbers_of(name, item, self._SYNTAX, self._HINT)
            return [(number, number) for number in numbers]
        parts = item.split("/")
        if len(parts) != 2 or not all(map(str.strip, parts)):
            raise UserError(
                f"{name} {item!r} is not understood, write query heads/KV heads such as 32/8"
            )
        q_heads = syntax.parse_number(name, parts[0], self._SYNTAX)
        kv_heads = syntax.parse_number(name, parts[1], self._SYNTAX)
        self.check(name, (q_heads, kv_heads))
        return [(q_heads, kv_heads)]

    def check(self, name: str, value: tuple[int, int]) -> None:
        q_heads, kv_heads = value
        if q_heads % kv_heads:
            raise UserError(
                f"{name} '{q_heads}/{kv_heads}': {q_heads} query heads are not a multiple of"
                f" {kv_heads} KV heads, every KV head serves the same number of query heads: write"
                " for example 32/8"
            )

    def write(self, value: tuple[int, int]) -> str:
        q_heads, kv_heads = value
        return f"{q_heads}" if q_heads == kv_heads else f"{q_heads}/{kv_heads}"
