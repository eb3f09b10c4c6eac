"""JSON from files that anybody may have written: one exception for all that is wrong with it."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(text: bytes | str) -> Any:
    """Parse JSON that this project wrote.

    Raises:
        ValueError: Empty, not JSON, not UTF-8, nested too deep, a number that is not finite, an
            integer of more than 64 bits, or half a character. The message is one line.
    """
    return _parse(text, _int64, _finite)


def parse_foreign(text: bytes | str) -> Any:
    """Parse JSON of another program, such as a config.json.

    Numbers that no reader asks for are harmless: Infinity, NaN and integers of more than 64 bits
    become floats. Whoever reads a size checks that it is an int.

    Raises:
        ValueError: As `parse`, numbers apart.
    """
    return _parse(text, _int_or_float, float)


def _parse(text: bytes | str, read_int: Any, read_float: Any) -> Any:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(
            text, parse_int=read_int, parse_float=read_float, parse_constant=read_float
        )
        # "\ud800" alone is half a character: it can be read, and never be written.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"no JSON at {line}column {error.colno}") from None
    return value


def short_json(value: Any) -> str:
    """Return a value as JSON for a message, cut where it is long."""
    words = json.dumps(value)
    return words if len(words) <= 40 else f"{words[:40]}..."


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]} is no number of 64 bits")
    return int(digits)


def _int_or_float(digits: str) -> int | float:
    is_int64 = len(digits) <= 20 and -(2**63) <= int(digits) < 2**63
    return int(digits) if is_int64 else float(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value
