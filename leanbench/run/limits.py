"""How long a sweep may take."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a sweep, in seconds."""

    #: One kernel on one problem, everything included.
    timeout_s: float = 120.0
    #: No cell starts after this many seconds, also not once more because another kernel of its
    #: problem failed; None is no limit.
    budget_s: float | None = None


class Budget:
    """The time in which cells may start, from now on; without seconds, any time."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end_s = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        return None if self._end_s is None else self._end_s - time.monotonic()

    @property
    def is_spent(self) -> bool:
        return self._end_s is not None and time.monotonic() >= self._end_s
