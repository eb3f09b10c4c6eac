"""Reads untrusted files and JSON, and writes files atomically.

A reader must not hang on a FIFO, fill the memory from a device, or leave the folder that a file
belongs to. A writer can be killed, and other processes can write the same file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from leanbench.core.errors import UserError

#: Suffix of a file that is being written. A crash can leave it.
PART = ".part"
_MB = 1_000_000
_PIECE_BYTES = 1 << 20
_NAME_LETTERS = 200


class FileFault(StrEnum):
    """Cause of an unreadable file. Messages use the text; tests compare the member."""

    MISSING = "there is no such file"
    FOLDER = "it is a folder"
    NOT_REGULAR = "it is no regular file"
    OUTSIDE = "it lies outside of {limit}"
    TOO_LARGE = "it has more than {limit} MB"
    NOT_UTF8 = "it is not UTF-8 text"
    #: The limit is the message of the operating system.
    SYSTEM = "{limit}"


_FIXES = {
    FileFault.MISSING: "check its name",
    FileFault.FOLDER: "name a file in it",
    FileFault.NOT_REGULAR: "name a regular file",
    FileFault.OUTSIDE: "move it into that folder",
    FileFault.TOO_LARGE: "keep a part of it",
    FileFault.NOT_UTF8: "save it as UTF-8",
    FileFault.SYSTEM: "name a file that can be read",
}


@dataclass(eq=False)
class UnreadableFile(UserError):
    """A file that is not read."""

    #: File, as given.
    path: Path
    fault: FileFault
    #: Violated limit, if the fault has one.
    limit: object = None

    @property
    def reason(self) -> str:
        """Fault in words, for a message that names the file itself."""
        return self.fault.format(limit=self.limit)

    def __str__(self) -> str:
        name = str(self.path)
        if len(name) > _NAME_LETTERS:
            name = f"{name[:_NAME_LETTERS]}..."
        return f"cannot read {name} ({self.reason}): {_FIXES[self.fault]}"


def read_file(
    path: Path, most_mb: int, inside: Path | None = None, *, or_pipe: bool = False
) -> bytes:
    """Read a regular file.

    Args:
        most_mb: Largest size in MB. No more is read, whatever size the system reports.
        inside: Folder that must hold the file, links followed. Required if another file names it.
        or_pipe: Read a pipe, too, such as a process substitution. Without a writer it is empty.

    Raises:
        UnreadableFile: It cannot be read, is no regular file, too large or outside the folder.
    """
    try:
        if inside is not None and not _is_inside(path, inside):
            raise UnreadableFile(path, FileFault.OUTSIDE, inside)
        # Opening a device can have effects, so look first.
        _check_kind(path, os.stat(path), or_pipe)
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            _check_kind(path, status, or_pipe)
            os.set_blocking(file, True)
            content = _read_at_most(file, status.st_size, most_mb * _MB)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableFile(path, FileFault.MISSING) from None
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise UnreadableFile(path, FileFault.SYSTEM, words) from None
    except ValueError:  # NUL, or half a character
        raise UnreadableFile(path, FileFault.SYSTEM, "no file can have this name") from None
    if content is None:
        raise UnreadableFile(path, FileFault.TOO_LARGE, most_mb)
    return content


def read_if_there(path: Path, most_mb: int) -> bytes:
    """Read a regular file. Return no bytes if there is none."""
    try:
        return read_file(path, most_mb)
    except UnreadableFile as error:
        if error.fault is FileFault.MISSING:
            return b""
        raise


def read_text(path: Path, most_mb: int, inside: Path | None = None) -> str:
    """Read a regular file as UTF-8. See `read_file`.

    Some editors begin a file with a byte order mark: it is dropped.

    Raises:
        UnreadableFile: As `read_file`, or it is not UTF-8.
    """
    try:
        return read_file(path, most_mb, inside).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableFile(path, FileFault.NOT_UTF8) from None


def _read_at_most(file: int, size: int, most: int) -> bytes | None:
    """Read to the end, or return None if that is more than `most` bytes."""
    if size > most:
        return None
    pieces = []
    # Files in /proc have content and a size of 0.
    while piece := os.read(file, _PIECE_BYTES):
        pieces.append(piece)
        most -= len(piece)
        if most < 0:
            return None
    return b"".join(pieces)


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_kind(path: Path, status: os.stat_result, or_pipe: bool) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnreadableFile(path, FileFault.FOLDER)
    is_pipe = or_pipe and stat.S_ISFIFO(status.st_mode)
    if not (stat.S_ISREG(status.st_mode) or is_pipe):
        raise UnreadableFile(path, FileFault.NOT_REGULAR)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on `path`. The lock file stays: removing it would admit two.

    Raises:
        OSError: The lock file cannot be created.
    """
    from filelock import FileLock

    lock = path.with_name(f".{path.name}.lock")
    # FileLock waits for ever for a file that cannot be made, as in /proc.
    os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o644))
    with FileLock(lock):
        yield


def append_whole(file: int, content: bytes) -> None:
    """Append in one write and wait until it is on disk. `file` was opened to append.

    Raises:
        OSError: The write failed. A part of the content can be there.
    """
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def whole_lines(content: bytes) -> bytes:
    """Drop a last line that was cut off while it was written."""
    return content[: content.rfind(b"\n") + 1]


def replace_file(path: Path, text: str) -> None:
    """Replace a file. A reader, or a crash, sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def parse_json(text: bytes | str) -> Any:
    """Parse JSON that this project wrote.

    Raises:
        ValueError: Empty, not JSON, not UTF-8, nested too deep, a number that is not finite, an
            integer of more than 64 bits, or half a character. The message is one line.
    """
    return _writable(_load(text, parse_int=_int64, parse_float=_finite, parse_constant=_finite))


def parse_foreign_json(text: bytes | str) -> Any:
    """Parse JSON of another program, such as a config.json.

    Infinity, NaN and integers of more than 64 bits become floats, or text if no float is as large:
    they are harmless in keys that nothing reads. Callers check that a size is an int.

    Raises:
        ValueError: As `parse_json`, except for numbers.
    """
    return _writable(_load(text, parse_int=_int_or_float))


def parse_unchecked_json(text: bytes | str) -> Any:
    """Parse JSON in a third of the time, if every value is checked afterwards.

    Raises:
        ValueError: As `parse_json`, except for numbers and halves of characters.
    """
    return _load(text)


def _load(text: bytes | str, **hooks: Any) -> Any:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"no JSON at {line}column {error.colno}") from None
    except ValueError as error:
        # Without hooks it is Python's: an integer of more than 4300 digits.
        raise ValueError(str(error) if hooks else "it has a number of too many digits") from None


def _writable(value: Any) -> Any:
    """Check that the value can be written: "\\ud800" alone is half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeError:
        raise ValueError("it is not UTF-8 text") from None
    return value


def printable_json(value: Any) -> Any:
    """Apply `printable` to every text of parsed JSON.

    Raises:
        ValueError: It is nested too deep.
    """
    try:
        if isinstance(value, list):
            return [printable_json(item) for item in value]
        if isinstance(value, dict):
            return {printable(key): printable_json(item) for key, item in value.items()}
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return printable(value) if isinstance(value, str) else value


def printable(text: str, keep: str = "") -> str:
    """Write characters that control a terminal as escapes, such as ``\\x1b``.

    Args:
        keep: Characters that stay, such as line breaks.
    """
    if text.isprintable():
        return text
    # Wide spaces are harmless. Half a character is a byte of a file name.
    harmless = ("Zs", "Cs")
    return "".join(
        letter
        if letter.isprintable() or letter in keep or unicodedata.category(letter) in harmless
        else repr(letter)[1:-1]
        for letter in text
    )


def short_json(value: Any) -> str:
    """Return a value as JSON for a message, truncated if long."""
    words = json.dumps(value)
    return words if len(words) <= 40 else f"{words[:40]}..."


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]} is no number of 64 bits")
    return int(digits)


def _int_or_float(digits: str) -> int | float | str:
    if len(digits) <= 20 and -(2**63) <= int(digits) < 2**63:
        return int(digits)
    return value if math.isfinite(value := float(digits)) else f"{digits[:20]}..."


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is no finite number")
    return value
