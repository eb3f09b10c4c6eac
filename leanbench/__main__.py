"""The command `leanbench`, and `python -m leanbench`."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line. SIGTERM stops it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        from leanbench.cli.main import main as run

        run()
    except KeyboardInterrupt as error:
        # Commands exit by themselves; this is an import's or an exit's.
        sys.exit(128 + (*error.args, signal.SIGINT)[0])


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


# Processes that compile import this file again, under another name.
if __name__ == "__main__":
    main()
