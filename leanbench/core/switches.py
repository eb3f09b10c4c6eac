"""Switches in environment variables. Every command reads one, so this module imports little."""

from __future__ import annotations

import os

from leanbench.core.errors import UserError

#: `off`: no timings are used or made, see leanbench.configs.store.
CONFIGS = "LEANBENCH_CONFIGS"
#: `on`: a server's warm-up is timed, see leanbench.integrations.vllm_backend.
AUTOTUNE = "LEANBENCH_AUTOTUNE"
#: `on`: calls read their tensors to check them, see leanbench.attention.checks.
CHECK_CALLS = "LEANBENCH_CHECK_CALLS"
_OFF, _ON = ("off", "0", "false", "no"), ("on", "1", "true", "yes")


def is_on(name: str, *, default: bool) -> bool:
    """Return the state of a switch; `default` if it is unset or empty.

    Raises:
        UserError: the variable has another value.
    """
    word = os.environ.get(name, "").strip().lower()
    if word and word not in (*_ON, *_OFF):
        raise UserError(
            f"{name} {word!r} is neither on nor off: set it to one of them, or unset it"
        )
    return word in _ON if word else default
