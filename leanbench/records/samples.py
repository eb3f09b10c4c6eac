"""Raw samples: `samples.jsonl.gz` has one gzip member with one JSON line for each measured cell.

Members are appended whole, so `zcat` reads the file at any time. The samples of a cell are written
before its row. After a kill between the two, the cell runs again and its later samples count.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leanbench.core.errors import UserError
from leanbench.core.files import UnreadableFile, parse_json, read_if_there
from leanbench.records.manifest import MOST_MB

SAMPLES = "samples.jsonl.gz"
#: Size of a read. Data after a member is copied with it, so large reads take quadratic time.
_PIECE_BYTES = 4096
#: Limit of a member: a few bytes can unpack to gigabytes.
MAX_MEMBER_BYTES = 1 << 26
#: Limit of all members together.
_MAX_BYTES = 1 << 30


class Samples(BaseModel):
    """Raw measurements of one cell, in order of time."""

    model_config = ConfigDict(allow_inf_nan=False)

    #: The row's `cell`.
    cell: str
    #: Microseconds of one launch: a graph replay's time over its launches.
    samples_us: list[float]
    #: Round of each sample. The problem's kernels are sampled in the same rounds, unless one failed
    #: and the others were measured again.
    rounds: list[int]
    #: Clock after each sample; null without NVML.
    sm_clock_mhz: list[int | None]
    #: Latency of each cross-check replay.
    crosscheck_us: list[float] = []
    #: Seconds since the start of the window in which energy was measured, SM clock and power in W.
    window: list[tuple[float, int | None, float | None]] = []
    #: Median of each process that measured the cell; the other fields are those of one process.
    processes_us: list[float] = []


def pack(samples: Samples) -> bytes:
    """Return one gzip member."""
    text = samples.model_dump_json() + "\n"
    # mtime=0: equal samples give equal bytes.
    return gzip.compress(text.encode(), mtime=0)


def read_samples(run: Path) -> dict[str, Samples]:
    """Read the latest samples of each cell. A truncated member ends the file.

    Raises:
        ValueError: No member is whole, or one holds something else.
        UnreadableFile: It cannot be read.
    """
    content = read_if_there(run / SAMPLES, MOST_MB)
    if content and next(_whole_members(content), None) is None:
        raise ValueError("it has no whole gzip member")
    return _by_cell(content)


def read_whole_samples(run: Path) -> dict[str, Samples]:
    """Read the samples of a finished run, with nothing truncated.

    Raises:
        UserError: The file is damaged or cannot be read.
    """
    path = run / SAMPLES
    content, samples_by_cell, whole = _read(path)
    if whole < len(content):
        raise _damaged(path, whole, len(content))
    return samples_by_cell


def length_to_resume(run: Path, measured: Collection[str]) -> int:
    """Return the length in bytes of the samples to resume with. A truncated last member can follow.

    Args:
        measured: Cells with rows that have samples.

    Raises:
        UserError: The file is damaged or cannot be read.
    """
    path = run / SAMPLES
    content, samples_by_cell, whole = _read(path)
    is_cut_off = _is_begun(content[whole:]) and set(measured) <= samples_by_cell.keys()
    if whole < len(content) and not is_cut_off:
        raise _damaged(path, whole, len(content))
    return whole


def _read(path: Path) -> tuple[bytes, dict[str, Samples], int]:
    """Return the file, its samples by cell, and the length of its whole members."""
    try:
        content = read_if_there(path, MOST_MB)
        return content, _by_cell(content), whole_length(content)
    except UnreadableFile as error:
        raise UserError(
            f"cannot read {path} ({error.reason}): make it readable, or put back a copy of it"
        ) from None
    except ValueError:
        raise _damaged(path, 0, 0) from None


def _damaged(path: Path, whole: int, length: int) -> UserError:
    if not whole:
        return UserError(
            f"{path} is damaged: put back a copy of it, or remove it, then there are no raw samples"
            " of its cells"
        )
    return UserError(
        f"{path} is damaged after {whole} of its {length} bytes: put back a copy of it, or do"
        f" without the raw samples that follow (truncate -s {whole} {path})"
    )


def _by_cell(content: bytes) -> dict[str, Samples]:
    samples_by_cell: dict[str, Samples] = {}
    for member, _ in _whole_members(content):
        for line in member.decode().splitlines():
            samples = Samples.model_validate(parse_json(line))
            samples_by_cell[samples.cell] = samples
    return samples_by_cell


def _is_begun(content: bytes) -> bool:
    """Return True if this is the start of a gzip member, without its end."""
    member = zlib.decompressobj(wbits=31)
    try:
        member.decompress(content, MAX_MEMBER_BYTES)
    except zlib.error:
        return False
    return not (member.eof or member.unconsumed_tail)


def whole_length(content: bytes) -> int:
    """Return the length in bytes of the whole members of a samples file."""
    return max((end for _, end in _whole_members(content)), default=0)


def _whole_members(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each member and its end, up to the first that is not whole."""
    at = unpacked = 0
    while at < len(content):
        member = zlib.decompressobj(wbits=31)
        data, end = b"", at
        try:
            while not member.eof and end < len(content) and len(data) < MAX_MEMBER_BYTES:
                data += member.decompress(content[end : end + _PIECE_BYTES], MAX_MEMBER_BYTES)
                end += _PIECE_BYTES
        except zlib.error:
            return
        unpacked += len(data)
        if not member.eof or unpacked > _MAX_BYTES:
            return
        at = min(end, len(content)) - len(member.unused_data)
        yield data, at
