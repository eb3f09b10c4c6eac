"""The switch of tuned configs."""

from __future__ import annotations

import os

from leanbench.core.errors import UserError

#: `off`, or another word of _OFF, leaves the choice to the heuristics.
SWITCH = "LEANBENCH_CONFIGS"
_OFF, _ON = ("off", "0", "false", "no"), ("", "on", "1", "true", "yes")


def is_off() -> bool:
    """Return True if only heuristics choose.

    Raises:
        UserError: the variable has another value.
    """
    word = os.environ.get(SWITCH, "").strip().lower()
    if word in _ON:
        return False
    if word in _OFF:
        return True
    raise UserError(
        f"{SWITCH} {word!r} is neither on nor off: set it to off for the heuristics alone, or unset"
        " it"
    )
