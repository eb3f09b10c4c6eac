"""Raw samples, next to the rows: `samples.jsonl.gz`, one gzip member with one JSON line for each
measured cell.

The file is written like results.jsonl: appended, one cell in one piece, waited for. gzip members in
a row are one gzip file, so `zcat` and `gzip.open` read it. A cell's samples are written before its
row; where a kill came between the two, the cell runs again and its later samples count.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from leanbench.core.errors import UserError
from leanbench.core.files import UnreadableFile, read_if_there
from leanbench.core.strict_json import parse
from leanbench.records.manifest import MOST_MB

SAMPLES = "samples.jsonl.gz"
#: What follows a member is copied with it: in pieces, reading takes time in proportion to the file.
_PIECE_BYTES = 4096
#: Of a cell's samples, many times over: a few bytes can unpack to gigabytes.
MAX_MEMBER_BYTES = 1 << 26
#: Of all members together.
_MAX_BYTES = 1 << 30


class Samples(BaseModel):
    """The raw measurements of one cell, in the order of time."""

    model_config = ConfigDict(allow_inf_nan=False)

    #: The row's `cell`.
    cell: str
    #: Microseconds of one launch: a graph replay's time over its launches.
    samples_us: list[float]
    #: Of each sample, the round it was taken in: samples of the problem's other kernels with the
    #: same round were taken next to it, unless a kernel that failed had the others measured again.
    rounds: list[int]
    #: Of each sample, right after it. Null where NVML does not say.
    sm_clock_mhz: list[int | None]
    #: The figures of the cross-check, a replay each.
    crosscheck_us: list[float] = []


def pack(samples: Samples) -> bytes:
    """One gzip member."""
    text = samples.model_dump_json() + "\n"
    # mtime: the same samples give the same bytes.
    return gzip.compress(text.encode(), mtime=0)


def read_samples(run: Path) -> dict[str, Samples]:
    """The samples of a run directory by cell, the latest of each; empty where there are none.

    A member that was cut off while it was written ends the file.

    Raises:
        ValueError: no member is whole, or one holds something else than samples.
        UnreadableFile: it cannot be read.
    """
    content = read_if_there(run / SAMPLES, MOST_MB)
    if content and not has_whole_member(content):
        raise ValueError("it has no whole gzip member")
    return _by_cell(content)


def read_whole_samples(run: Path) -> dict[str, Samples]:
    """As `read_samples`, of a run whose cells all have their rows: nothing may be cut off.

    Raises:
        UserError: the file is damaged or cannot be read.
    """
    path = run / SAMPLES
    content, samples_by_cell, whole = _read(path)
    if whole < len(content):
        raise _damaged(path, whole, len(content))
    return samples_by_cell


def length_to_resume(run: Path, measured: Collection[str]) -> int:
    """Length in bytes of the samples with which a run goes on. What a kill cut off may follow, as
    the last samples, of a cell that has no row.

    Args:
        measured: cells whose rows are made of samples.

    Raises:
        UserError: the file is damaged or cannot be read.
    """
    path = run / SAMPLES
    content, samples_by_cell, whole = _read(path)
    is_cut_off = _is_begun(content[whole:]) and set(measured) <= samples_by_cell.keys()
    if whole < len(content) and not is_cut_off:
        raise _damaged(path, whole, len(content))
    return whole


def _read(path: Path) -> tuple[bytes, dict[str, Samples], int]:
    """What is in the file, its samples by cell, and the length of its whole members."""
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
            samples = Samples.model_validate(parse(line))
            samples_by_cell[samples.cell] = samples
    return samples_by_cell


def _is_begun(content: bytes) -> bool:
    """Whether this is how a gzip member begins, without its end."""
    member = zlib.decompressobj(wbits=31)
    try:
        member.decompress(content, MAX_MEMBER_BYTES)
    except zlib.error:
        return False
    return not (member.eof or member.unconsumed_tail)


def has_whole_member(content: bytes) -> bool:
    """Whether anything of a samples file can be read."""
    return next(_whole_members(content), None) is not None


def whole_length(content: bytes) -> int:
    """Length in bytes of the whole members of a samples file."""
    return max((end for _, end in _whole_members(content)), default=0)


def _whole_members(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Each member and where it ends, up to the first that is not whole."""
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
