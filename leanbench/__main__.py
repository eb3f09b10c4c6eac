"""The command `leanbench`, and `python -m leanbench`."""

from __future__ import annotations

import signal
from types import FrameType


def main() -> None:
    """Run the command line. SIGTERM stops it as Ctrl-C does."""
    from leanbench.cli.main import main as run

    signal.signal(signal.SIGTERM, _stop)
    run()


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


# Processes that compile import this file again, under another name.
if __name__ == "__main__":
    main()
