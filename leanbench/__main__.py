"""The command `leanbench`, and `python -m leanbench`: Ctrl-C and SIGTERM have a meaning before the
first slow import.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, whose number is its argument. Once a plain KeyboardInterrupt has passed
    through `eval`, Python ends by the signal, whatever exit code it is given.
    """


def main() -> None:
    """Runs the command line. Ctrl-C ends it with exit code 130 and SIGTERM with 143, without a
    traceback, also while modules load.
    """
    # A shell script's background job ignores Ctrl-C, and goes on doing so.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    heeded = [number for number, action in usual.items() if signal.getsignal(number) is action]
    _handle_by(heeded, _interrupt)
    # Registered first, called last. Python then gives signals their usual action, which would end
    # by the signal what has an exit code; one that is ignored stays so.
    atexit.register(_handle_by, heeded, signal.SIG_IGN)
    try:
        try:
            from leanbench.cli.main import main as run

            run()
        finally:
            # Only the interpreter's own end is left.
            _handle_by(heeded, _end)
    except KeyboardInterrupt as error:
        sys.exit(128 + error.args[0] if error.args else 130)


def _handle_by(
    numbers: Iterable[int], action: Callable[[int, FrameType | None], None] | signal.Handlers
) -> None:
    for number in numbers:
        signal.signal(number, action)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises Interrupted, but ends the process at once while a module loads: from there an
    exception may come out as another, or be lost.
    """
    if _loads(frame) and not _has_children() and not _has_pools():
        _end(number)
    # A wait of Ray raises a KeyboardInterrupt of its own in the place of this one.
    if (interruption := sys.modules.get("leanbench.cli.interruption")) is not None:
        vars(interruption)["came"] = number
    raise Interrupted(number)


def _loads(frame: FrameType | None) -> bool:
    """Whether a module is being loaded where the program is."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _has_children() -> bool:
    """Whether there are processes that somebody must end. A sweep's worker ends with this one by
    itself.
    """
    # Perhaps it is what is being loaded.
    children = getattr(sys.modules.get("multiprocessing"), "active_children", None)
    return children is not None and bool(children())


def _has_pools() -> bool:
    """Whether a pool of processes is open, also before its first process starts: Python reports
    semaphores that nobody takes away.
    """
    return bool(getattr(sys.modules.get("leanbench.compile.build"), "open_pools", ()))


def _end(number: int, frame: FrameType | None = None) -> None:
    os._exit(128 + number)


# Processes that compile import this file again, under another name.
if __name__ == "__main__":
    main()
