"""Commands that end at a limit together with their children, and no later than this process."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

#: Time for a command to end by itself after a signal.
_GRACE_S = 5.0

_running: set[subprocess.Popen[str]] = set()
#: Set once nothing may start any more.
_ending = threading.Event()


class Ended(NamedTuple):
    """A command that has run."""

    #: Exit code; None if it was killed at its limit.
    code: int | None
    #: Output of stdout and stderr.
    output: str
    seconds: float


def run_within(
    limit_s: float, words: Sequence[str], folder: Path, own_env: Mapping[str, str]
) -> Ended:
    """Run a command with a time limit; a missing program has the exit code 127."""
    began_s = time.monotonic()
    if _ending.is_set():
        return Ended(None, "", 0.0)
    try:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | own_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        return Ended(127, f"{words[0]} is not here: put it on the PATH", 0.0)
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        output, code = process.communicate()[0], None
    _running.discard(process)
    return Ended(code, output, time.monotonic() - began_s)


def end_together() -> None:
    """Kill commands at this process's end. An endless kernel would occupy the GPU forever."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    _ending.set()
    for process in tuple(_running):
        _kill(process)
    os._exit(128 + number)


def _kill(process: subprocess.Popen[str]) -> None:
    """Signal it first, so that it can end its children, then kill the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
