"""Values as people type them: ``1k,4k,16k``, ``1k:512k:x2``, ``4k:32k:+4k``, ``10m``, ``5%``.

The same texts stand in flags and in sweep files. Every parser raises UserError and nothing else,
and no list is longer than `MAX_VALUES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from leanbench.core.errors import UserError

#: Longest list; a typo such as ``1:1m:+1`` must not fill the memory.
MAX_VALUES = 10_000
#: Largest number of a list: kernels count tokens in 32 bits.
MAX_NUMBER = 2**31 - 1
#: Largest seed: what a manifest's JSON holds.
MAX_SEED = 2**63 - 1

COUNT = "a whole number such as 8"
_LIST = "numbers such as 1k,4k,16k, or a range such as 1k:512k:x2 (times 2) or 4k:32k:+4k (plus 4k)"
_SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}
_NUMBER = re.compile(r"(\d{1,40})([km]?)", re.ASCII | re.IGNORECASE)

T = TypeVar("T")


def parse_list(name: str, text: str, parse: Callable[[str], Sequence[T]]) -> tuple[T, ...]:
    """What `parse` makes of each entry between commas, in the order given and without repeats.

    Raises:
        UserError: an entry is empty, or there are more than MAX_VALUES values.
    """
    # A dict keeps the first of equal values in place.
    values: dict[T, None] = {}
    for item in text.split(","):
        if not item.strip():
            raise UserError(f"{name} {text!r} has an empty entry: separate values by single commas")
        values.update(dict.fromkeys(parse(item.strip())))
        if len(values) > MAX_VALUES:
            raise _too_long(name, text)
    return tuple(values)


def parse_numbers(name: str, text: str, syntax: str = COUNT) -> tuple[int, ...]:
    """The whole numbers of a list, each at least 1, in the order given and without repeats.

    Args:
        syntax: what one entry may be, for the sentence that refuses another.

    Raises:
        UserError: `text` is not a list of numbers and ranges, or holds more than MAX_VALUES.
    """
    return parse_list(name, text, lambda item: numbers_of(name, item, syntax))


def numbers_of(
    name: str,
    item: str,
    syntax: str = COUNT,
    hint: str = "",
    least: int = 1,
    limit: int = MAX_NUMBER,
) -> list[int]:
    """The whole numbers of one entry, which is a number or a range.

    Args:
        limit: that the sentence about a number above MAX_NUMBER names.
    """
    if ":" in item:
        return _range(name, item, hint)
    return [parse_number(name, item, syntax, least, limit)]


def parse_number(
    name: str, text: str, syntax: str = COUNT, least: int = 1, limit: int = MAX_NUMBER
) -> int:
    """A whole number from `least` to MAX_NUMBER; ``k`` and ``m`` are 1024 and 1024 x 1024.

    Args:
        limit: that the sentence about a number above MAX_NUMBER names.

    Raises:
        UserError: `text` is no such number.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        if re.fullmatch(r"-\d+[kmKM]?", text.strip(), re.ASCII):
            raise UserError(
                f"{name} {text.strip()} is negative, the least is {least}: write {syntax}"
            )
        raise UserError(f"{name} {text!r} is not understood, write {syntax}")
    number = int(match[1]) * _SUFFIXES[match[2].lower()]
    if number < least:
        raise UserError(
            f"{name} {text.strip()} is below {least}, the least there is: write {syntax}"
        )
    if number > MAX_NUMBER:
        raise UserError(
            f"{name} {text.strip()} is above the limit of {limit}: write a smaller number"
        )
    return number


def check_seed(name: str, seed: int) -> None:
    """Refuses a seed that a manifest cannot hold.

    Raises:
        UserError: it is below 0 or above MAX_SEED.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"{name} {seed} is not a seed: choose from 0 to {MAX_SEED}")


def parse_names(name: str, text: str) -> tuple[str, ...]:
    """Comma-separated names, in the order given and without repeats."""
    return parse_list(name, text, lambda item: [item])


def parse_seconds(name: str, text: str) -> float:
    """Seconds from ``90``, ``90s``, ``10m`` or ``2h``.

    Raises:
        UserError: no number with a unit of time, or 0.
    """
    match = re.fullmatch(
        r"(\d{1,7}(?:\.\d{1,3})?)\s*([smh]?)", text.strip(), re.ASCII | re.IGNORECASE
    )
    if match is None:
        raise UserError(f"{name} {text!r} is not a duration, write for example 90s, 10m or 2h")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2].lower()]
    if seconds == 0:
        raise UserError(f"{name} {text!r} must be above 0, write for example 90s, 10m or 2h")
    return seconds


def parse_percent(name: str, text: str, *, most: int, above_zero: bool = False) -> float:
    """A share from a percentage with its sign, which is optional nowhere: ``5`` and ``0.05`` could
    mean either.

    Args:
        most: largest percentage.
        above_zero: refuse 0%.

    Raises:
        UserError: no number with a percent sign, one above `most`, or a refused 0%.
    """
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,6})?)\s*%", text.strip(), re.ASCII)
    limits = f"above 0% and up to {most}%" if above_zero else f"from 0% to {most}%"
    if match is None or float(match[1]) > most:
        raise UserError(
            f"{name} {text!r} is not a percentage, write a number {limits} with its sign, as in 5%"
        )
    if above_zero and float(match[1]) == 0:
        raise UserError(
            f"{name} {text!r} must be above 0%, write a number up to {most}% with its sign, as"
            " in 5%"
        )
    return float(match[1]) / 100


def choose(name: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is known.

    Raises:
        UserError: it is not; what there is is listed.
    """
    if value not in known:
        # Not the nearest: fp16 is no answer to somebody who wants fp32.
        raise UserError(f"{name} {value!r} is not supported, choose from {', '.join(known)}")
    return value


def _range(name: str, text: str, hint: str) -> list[int]:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        raise UserError(f"{name} {text!r} is not a range, write {_LIST}{hint}")
    first = parse_number(name, parts[0], _LIST)
    last = parse_number(name, parts[1], _LIST)
    step = parse_number(name, parts[2][1:], _LIST, least=0)
    if first > last:
        raise UserError(
            f"{name} {text!r} starts above its end: write the smaller number first, as in"
            " 1k:512k:x2"
        )
    if parts[2][0] == "+":
        if step == 0:
            raise UserError(
                f"{name} {text!r} never reaches its end: add at least 1, as in 4k:32k:+4k"
            )
        if (last - first) // step >= MAX_VALUES:
            raise _too_long(name, text)
        return list(range(first, last + 1, step))
    if step < 2:
        raise UserError(
            f"{name} {text!r} never reaches its end: multiply by at least 2, as in 1k:512k:x2"
        )
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return values


def _too_long(name: str, text: str) -> UserError:
    return UserError(
        f"{name} {text!r} holds more than {MAX_VALUES} values: take larger steps, as in 1k:512k:x2"
    )
