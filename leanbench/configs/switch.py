"""The switch of tuned configs."""

from __future__ import annotations

import os

from leanbench.core.errors import UserError

#: `off` or 0: heuristics alone choose.
SWITCH = "LEANBENCH_CONFIGS"
_OFF, _ON = ("off", "0"), ("", "on", "1")


def is_off() -> bool:
    """Whether heuristics alone choose.

    Raises:
        UserError: the switch says neither.
    """
    word = os.environ.get(SWITCH, "").lower()
    if word not in (*_OFF, *_ON):
        raise UserError(
            f"{SWITCH} {word!r} is neither on nor off: set it to off for the heuristics alone, or"
            " unset it"
        )
    return word in _OFF
