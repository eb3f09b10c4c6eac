"""Axes as people type them: ``1k,4k,16k``, ``1k:512k:x2``, ``4k:32k:+4k``, ``56,32/8``.

The same strings stand in flags and in sweep files. Every parser raises UserError and nothing else,
and no axis is longer than `MAX_VALUES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from leanbench.core.errors import UserError
from leanbench.core.problem import DTYPES, HEAD_DIMS, KV_LAYOUTS, MAX_Q_LEN, PAGE_SIZES

#: Longest axis; a typo such as ``1:1m:+1`` must not fill the memory.
MAX_VALUES = 10_000
#: Largest number on an axis: kernels count tokens in 32 bits.
MAX_NUMBER = 2**31 - 1

_SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}
_NUMBER = re.compile(r"(\d{1,40})([km]?)", re.ASCII | re.IGNORECASE)
_COUNT_SYNTAX = "a whole number such as 8"
#: Axes that such a number does not fit: usually large, of a few values, or that take something else
#: too.
_SYNTAX = {
    "heads": "query heads, or query/KV heads, such as 56 or 32/8",
    "head_dim": f"one of {', '.join(map(str, HEAD_DIMS))}",
    "context": "a whole number such as 4096, 4k (4 x 1024) or 1m (1024 x 1024)",
    "page_size": "a number of tokens such as 64, or none for a contiguous cache",
}
_AXIS_SYNTAX = (
    "numbers such as 1k,4k,16k, or a range such as 1k:512k:x2 (times 2) or 4k:32k:+4k (plus 4k)"
)

T = TypeVar("T")


def parse_numbers(axis: str, text: str) -> tuple[int, ...]:
    """The numbers of one axis, each at least 1, in the order given and without repeats.

    Raises:
        UserError: `text` is not a list of numbers and ranges, or holds more than MAX_VALUES.
    """
    return _parse_list(
        axis, text, lambda item: _range(axis, item) if ":" in item else [_number(axis, item)]
    )


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """(q_heads, kv_heads) pairs from ``56,32/8``; one number means as many KV heads as
    query heads.
    """

    def pairs(item: str) -> list[tuple[int, int]]:
        if "/" not in item:
            return [
                (number, number)
                for number in (_range("heads", item) if ":" in item else [_number("heads", item)])
            ]
        numbers = item.split("/")
        if len(numbers) != 2 or not all(map(str.strip, numbers)):
            raise UserError(
                f"heads {item!r} is not understood, write query heads/KV heads such as 32/8"
            )
        q_heads, kv_heads = (_number("heads", number) for number in numbers)
        if q_heads % kv_heads:
            raise UserError(
                f"heads {item!r}: {q_heads} query heads are not a multiple of {kv_heads} KV heads, "
                "every KV head serves the same number of query heads: write for example 32/8"
            )
        return [(q_heads, kv_heads)]

    return _parse_list("heads", text, pairs)


def parse_head_dims(text: str) -> tuple[int, ...]:
    """Head dimensions, each one that the kernels have."""
    numbers = parse_numbers("head_dim", text)
    for number in numbers:
        if number not in HEAD_DIMS:
            raise UserError(
                f"head_dim {number} is not supported, choose from {', '.join(map(str, HEAD_DIMS))}"
            )
    return numbers


def parse_q_lens(text: str) -> tuple[int, ...]:
    """New tokens per sequence, each number as many as a decode call takes."""
    numbers = parse_numbers("q_len", text)
    if max(numbers) > MAX_Q_LEN:
        raise UserError(
            f"q_len {max(numbers)} is above the limit of {MAX_Q_LEN}: choose from 1 to {MAX_Q_LEN}"
        )
    return numbers


def parse_page_sizes(text: str) -> tuple[int | None, ...]:
    """Page sizes; ``none``, which is None here, is a contiguous cache."""

    def sizes(item: str) -> list[int | None]:
        if item.lower() == "none":
            return [None]
        numbers = _range("page_size", item) if ":" in item else [_number("page_size", item)]
        for number in numbers:
            if number not in PAGE_SIZES:
                known = ", ".join(map(str, PAGE_SIZES))
                raise UserError(
                    f"page_size {number} is not supported, choose from {known}, or none for a"
                    " contiguous cache"
                )
        return [*numbers]

    return _parse_list("page_size", text, sizes)


def parse_dtypes(text: str) -> tuple[str, ...]:
    return _parse_list("dtype", text, lambda item: [choose("dtype", item.lower(), DTYPES)])


def parse_kv_layouts(text: str) -> tuple[str, ...]:
    return _parse_list(
        "kv_layout", text, lambda item: [choose("kv_layout", item.upper(), KV_LAYOUTS)]
    )


def parse_names(axis: str, text: str) -> tuple[str, ...]:
    """Comma-separated names, in the order given and without repeats."""
    return _parse_list(axis, text, lambda item: [item])


def parse_ragged(text: str) -> tuple[float, ...]:
    """Ratios of mean to longest context, each above 0 and at most 1; 1 is a uniform batch."""

    def ratio(item: str) -> list[float]:
        # Plain decimals only: float() would also take "nan", "inf" and "1_0".
        value = float(item) if re.fullmatch(r"\d{0,4}\.?\d{1,9}", item, re.ASCII) else 0.0
        if not 0 < value <= 1:
            raise UserError(
                f"ragged {item!r} is not a mean context over the longest one, "
                "write numbers above 0 and up to 1 such as 0.25,0.5"
            )
        return [value]

    return _parse_list("ragged", text, ratio)


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


def choose(axis: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is known.

    Raises:
        UserError: it is not; what there is is listed.
    """
    if value not in known:
        # Not the nearest: fp16 is no answer to somebody who wants fp32.
        raise UserError(f"{axis} {value!r} is not supported, choose from {', '.join(known)}")
    return value


def _parse_list(axis: str, text: str, parse: Callable[[str], Sequence[T]]) -> tuple[T, ...]:
    # A dict keeps the first of equal values in place.
    values: dict[T, None] = {}
    for item in text.split(","):
        if not item.strip():
            raise UserError(f"{axis} {text!r} has an empty entry: separate values by single commas")
        values.update(dict.fromkeys(parse(item.strip())))
        if len(values) > MAX_VALUES:
            raise _too_long(axis, text)
    return tuple(values)


def _number(axis: str, text: str, syntax: str | None = None) -> int:
    syntax = syntax or _SYNTAX.get(axis, _COUNT_SYNTAX)
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        if re.fullmatch(r"-\d+[kmKM]?", text.strip(), re.ASCII):
            raise UserError(f"{axis} {text.strip()} is negative, the least is 1: write {syntax}")
        raise UserError(f"{axis} {text!r} is not understood, write {syntax}")
    number = int(match[1]) * _SUFFIXES[match[2].lower()]
    if number < 1:
        raise UserError(f"{axis} {text.strip()} is below 1, the least there is: write {syntax}")
    if number > MAX_NUMBER:
        raise UserError(
            f"{axis} {text.strip()} is above the limit of {MAX_NUMBER}: write a smaller number"
        )
    return number


def _range(axis: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        hint = ", or query heads/KV heads such as 32/8" if axis == "heads" else ""
        raise UserError(f"{axis} {text!r} is not a range, write {_AXIS_SYNTAX}{hint}")
    first, last = (_number(axis, part, _AXIS_SYNTAX) for part in parts[:2])
    step = _number(axis, parts[2][1:], _AXIS_SYNTAX)
    if first > last:
        raise UserError(
            f"{axis} {text!r} starts above its end: write the smaller number first, as in"
            " 1k:512k:x2"
        )
    if parts[2][0] == "+":
        if (last - first) // step >= MAX_VALUES:
            raise _too_long(axis, text)
        return list(range(first, last + 1, step))
    if step < 2:
        raise UserError(
            f"{axis} {text!r} never reaches its end: multiply by at least 2, as in 1k:512k:x2"
        )
    values = []
    while first <= last:
        values.append(first)
        first *= step
    return values


def _too_long(axis: str, text: str) -> UserError:
    return UserError(
        f"{axis} {text!r} holds more than {MAX_VALUES} values: take larger steps, as in 1k:512k:x2"
    )
