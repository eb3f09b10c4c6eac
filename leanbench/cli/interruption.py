"""What ended a command before it was done."""

from __future__ import annotations

import signal

#: Number of the last signal for which `leanbench.__main__` raised, which does so for SIGTERM, too.
came = int(signal.SIGINT)


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """SIGINT or SIGTERM: the number that came along, or that of the last signal where none did."""
    return signal.Signals(error.args[0] if error.args else came)
