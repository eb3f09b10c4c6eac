"""Parsers for values in flags and sweep files: ``1k,4k,16k``, ``1k:512k:x2``, ``10m``, ``5%``.

Every parser raises InvalidValue and nothing else. No list exceeds `MAX_VALUES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from leanbench.core.errors import InvalidValue, Reason

#: Longest list. Protects the memory against a typo such as ``1:1m:+1``.
MAX_VALUES = 10_000
#: Largest number of a list. Kernels count tokens in 32 bits.
MAX_NUMBER = 2**31 - 1
#: Largest seed. A manifest stores it as a JSON integer.
MAX_SEED = 2**63 - 1

COUNT = "a whole number such as 8"
_RANGE = "a range such as 1k:512k:x2 (times 2) or 4k:32k:+4k (plus 4k)"
_DURATION = "write a duration such as 90s, 10m or 2h"
_SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}
_NUMBER = re.compile(r"(-?\d{1,40})([km]?)", re.ASCII | re.IGNORECASE)

T = TypeVar("T")


def parse_list(
    name: str,
    text: str,
    parse: Callable[[str], Sequence[T]],
    split: Callable[[str], list[str]] = lambda text: text.split(","),
) -> tuple[T, ...]:
    """Parse each comma-separated entry. Keep the order, drop duplicates.

    Args:
        split: Splits the text; of entries that may contain commas, such as paths.
    """
    values: dict[T, None] = {}
    for item in split(text):
        if not item.strip():
            raise InvalidValue(name, text, Reason.EMPTY_ENTRY, "separate values with single commas")
        values.update(dict.fromkeys(parse(item.strip())))
        if len(values) > MAX_VALUES:
            raise _too_many(name, text)
    return tuple(values)


def numbers_of(
    name: str, item: str, syntax: str = COUNT, least: int = 1, most: int = MAX_NUMBER
) -> list[int]:
    """Parse one entry of a list: a whole number or a range."""
    if ":" in item:
        return _parse_range(name, item, syntax)
    return [parse_number(name, item, syntax, least, most)]


def parse_number(
    name: str, text: str, syntax: str = COUNT, least: int = 1, most: int = MAX_NUMBER
) -> int:
    """Parse a whole number from `least` to `most`; ``k`` is 1024, ``m`` is 1024 x 1024."""
    fix = f"write {syntax}"
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise InvalidValue(name, text, Reason.SYNTAX, fix)
    number = int(match[1]) * _SUFFIXES[match[2].lower()]
    if number < least:
        raise InvalidValue(name, text, Reason.BELOW_MINIMUM, fix, least)
    if number > most:
        raise InvalidValue(name, text, Reason.ABOVE_MAXIMUM, fix, most)
    return number


def check_seed(name: str, seed: int) -> None:
    """Raise InvalidValue for a seed that a manifest cannot store."""
    if seed < 0:
        raise InvalidValue(name, seed, Reason.BELOW_MINIMUM, "choose a larger seed", 0)
    if seed > MAX_SEED:
        raise InvalidValue(name, seed, Reason.ABOVE_MAXIMUM, "choose a smaller seed", MAX_SEED)


def parse_names(name: str, text: str) -> tuple[str, ...]:
    """Split comma-separated names. Keep the order, drop duplicates."""
    return parse_list(name, text, lambda item: [item])


def parse_seconds(name: str, text: str) -> float:
    """Parse ``90``, ``90s``, ``10m`` or ``2h`` into seconds."""
    match = re.fullmatch(
        r"(\d{1,7}(?:\.\d{1,3})?)\s*([smh]?)", text.strip(), re.ASCII | re.IGNORECASE
    )
    if match is None:
        raise InvalidValue(name, text, Reason.SYNTAX, _DURATION)
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2].lower()]
    if seconds == 0:
        raise InvalidValue(name, text, Reason.NOT_POSITIVE, _DURATION)
    return seconds


def parse_percent(name: str, text: str, *, most: int, above_zero: bool = False) -> float:
    """Parse a percentage into a fraction. The sign is required: ``5`` could also mean 500%.

    Args:
        most: Largest percentage.
        above_zero: Reject 0%.
    """
    least = "above 0%" if above_zero else "from 0%"
    fix = f"write a percentage {least} to {most}%, with its sign"
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,6})?)\s*%", text.strip(), re.ASCII)
    if match is None:
        raise InvalidValue(name, text, Reason.SYNTAX, fix)
    percent = float(match[1])
    if percent > most:
        raise InvalidValue(name, text, Reason.ABOVE_MAXIMUM, fix, f"{most}%")
    if above_zero and percent == 0:
        raise InvalidValue(name, text, Reason.NOT_POSITIVE, fix)
    return percent / 100


def choose(name: str, value: str, known: Sequence[str]) -> str:
    """Return `value` if it is known. The error lists all choices.

    It does not suggest the nearest: fp16 is no answer to somebody who wants fp32.
    """
    if value not in known:
        raise InvalidValue(name, value, Reason.UNSUPPORTED, f"choose from {', '.join(known)}")
    return value


def _parse_range(name: str, text: str, syntax: str) -> list[int]:
    """Parse ``first:last:xFACTOR`` or ``first:last:+STEP``."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        raise InvalidValue(name, text, Reason.SYNTAX, f"write {syntax}, or {_RANGE}")
    first, last = (parse_number(name, part, _RANGE) for part in parts[:2])
    step = parse_number(name, parts[2][1:], _RANGE, least=0)
    adds = parts[2][0] == "+"
    if first > last:
        raise InvalidValue(name, text, Reason.REVERSED_RANGE, "write the smaller number first")
    if step < (1 if adds else 2):
        fix = "add at least 1, as in 4k:32k:+4k" if adds else "multiply by at least 2"
        raise InvalidValue(name, text, Reason.ENDLESS_RANGE, fix)
    if adds:
        if (last - first) // step >= MAX_VALUES:
            raise _too_many(name, text)
        return list(range(first, last + 1, step))
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return values


def _too_many(name: str, text: str) -> InvalidValue:
    fix = "take larger steps, as in 1k:512k:x2"
    return InvalidValue(name, text, Reason.TOO_MANY_VALUES, fix, MAX_VALUES)


def short_count(count: int) -> str:
    """Format tokens: 1024 -> ``1k``, 524288 -> ``512k``, 1000 -> ``1000``."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
