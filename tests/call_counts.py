"""What code costs, on any machine and however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def function_calls(call: Callable[[], object]) -> int:
    """Calls of Python functions that one call makes: what its time goes with, on any machine."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
