"""Files that several processes write, or that a crash may cut off: one at a time, and in
one piece.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

#: Ends the name of a file that is being written; a crash may leave it.
PART = ".part"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until nobody else writes `path`. The lock's file stays: removing it would let
    two in.

    Raises:
        OSError: the lock's file cannot be made.
    """
    from filelock import FileLock

    lock = path.with_name(f".{path.name}.lock")
    # FileLock waits for ever for a file that cannot be made, as in /proc.
    os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o644))
    with FileLock(lock):
        yield


def append_whole(file: int, content: bytes) -> None:
    """Appends in one piece and waits until it is on the disk; `file` was opened to append.

    Raises:
        OSError: it could not be, and a part may be there.
    """
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def whole_lines(content: bytes) -> bytes:
    """Without a last line that was cut off while it was written."""
    return content[: content.rfind(b"\n") + 1]


def replace_file(path: Path, text: str) -> None:
    """A reader, or a crash, sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
