"""What ended a command before it was done."""

from __future__ import annotations

import signal


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """SIGINT or SIGTERM. `leanbench.__main__`, which raises for both, gives the number along."""
    return signal.Signals(error.args[0]) if error.args else signal.SIGINT
