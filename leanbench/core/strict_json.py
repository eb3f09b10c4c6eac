"""JSON from files that anybody may have written: one exception for all that is wrong with it."""

from __future__ import annotations

import json
import math
from typing import Any


def parse(text: bytes | str) -> Any:
    """The value, without what Python's json takes and the rest of the world does not.

    Raises:
        ValueError: empty, no JSON in UTF-8, nested too deep, NaN or infinite, a whole number of
            more than 64 bits, or half a character; the message says which in one line.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(text, parse_int=_int64, parse_float=_finite, parse_constant=_finite)
        # "\ud800" alone is half a character: it can be read, and never be written.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8 text") from None
    return value


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]} is no number of 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value
