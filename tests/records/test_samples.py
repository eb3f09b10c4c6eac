"""Raw samples: format, truncation, and kills between samples and row."""

import gzip
import json
import os
import random
import re
import subprocess
import tempfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from example_rows import opened, row
from hypothesis import given
from hypothesis import strategies as st

from leanbench.core.errors import UserError
from leanbench.records.directory import RunDirectory, read_rows
from leanbench.records.row import Row
from leanbench.records.samples import SAMPLES, Samples, pack, read_samples, whole_length

ASKED = {
    "source": "measured",
    "gpu": {"name": "a100"},
    "sweep": {"name": "s"},
    "environments": {},
    "cells": ["a", "b"],
}


def samples(cell: str, *samples_us: float, clocks: list[int | None] | None = None) -> Samples:
    count = len(samples_us)
    us: dict[str, Any] = {"samples_us": [*samples_us], "crosscheck_us": [samples_us[0] + 0.5]}
    return Samples(cell=cell, rounds=[*range(count)], sm_clock_mhz=clocks or [None] * count, **us)


A = samples("a", 10.25, 10.5, clocks=[1980, None])
B = samples("b", 20.0)
AGAIN = samples("a", 11.0, 11.5, 11.25)


def write(run: Path, content: bytes) -> Path:
    (run / SAMPLES).write_bytes(content)
    return run


def test_samples_are_read_as_they_were_written_and_later_ones_of_a_cell_win(tmp_path):
    assert read_samples(tmp_path) == {}
    assert read_samples(write(tmp_path, b"")) == {}
    assert read_samples(write(tmp_path, pack(A) + pack(B))) == {"a": A, "b": B}
    assert read_samples(write(tmp_path, pack(A) + pack(B) + pack(AGAIN))) == {"a": AGAIN, "b": B}
    assert pack(A) == pack(A.model_copy())


def test_the_file_is_one_gzip_file_of_json_lines(tmp_path):
    path = write(tmp_path, pack(A) + pack(B)) / SAMPLES
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert lines == [A.model_dump(), B.model_dump()]
    assert lines[0] == {
        "cell": "a",
        "samples_us": [10.25, 10.5],
        "rounds": [0, 1],
        "sm_clock_mhz": [1980, None],
        "crosscheck_us": [10.75],
        "window": [],
        "processes_us": [],
    }
    unpacked = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, check=True).stdout
    assert unpacked.count(b"\n") == 2


def test_a_member_with_a_wrong_checksum_ends_the_file(tmp_path):
    damaged = bytearray(pack(B))
    damaged[-6] ^= 1
    run = write(tmp_path, pack(A) + bytes(damaged) + pack(AGAIN))
    assert read_samples(run) == {"a": A}
    assert whole_length((run / SAMPLES).read_bytes()) == len(pack(A))


@pytest.mark.parametrize(
    "content",
    [b"garbage", b"\0", pack(A)[:-1], pack(A)[1:]],
    ids=["not-gzip", "zero", "cut-off", "headless"],
)
def test_a_file_without_a_whole_member_is_damaged(tmp_path, content):
    with pytest.raises(ValueError, match="it has no whole gzip member"):
        read_samples(write(tmp_path, content))
    assert whole_length(content) == 0


NUMBERS = st.floats(0, 1e9, allow_nan=False)
MANY = st.lists(
    st.builds(
        Samples,
        cell=st.sampled_from("abc"),
        samples_us=st.lists(NUMBERS, max_size=5),
        rounds=st.lists(st.integers(0, 99), max_size=5),
        sm_clock_mhz=st.lists(st.none() | st.integers(0, 3000), max_size=5),
        crosscheck_us=st.lists(NUMBERS, max_size=3),
    ),
    max_size=6,
)


@given(many=MANY, cut=st.integers(0, 2000))
def test_any_cut_keeps_the_members_before_it(many, cut):
    members = [pack(member) for member in many]
    content = b"".join(members)[:cut]
    ends = [sum(map(len, members[:count])) for count in range(len(members) + 1)]
    kept = max(count for count, end in enumerate(ends) if end <= len(content))
    assert whole_length(content) == ends[kept]
    with tempfile.TemporaryDirectory() as folder:
        run = write(Path(folder), content)
        if content and not kept:
            with pytest.raises(ValueError, match="no whole gzip member"):
                read_samples(run)
        else:
            assert read_samples(run) == {member.cell: member for member in many[:kept]}


def test_members_larger_and_smaller_than_what_is_read_at_once(tmp_path):
    generator = random.Random(7)
    # About 1, 40 and 400 KB packed, and many small ones.
    large = [
        samples(f"large{count}", *(generator.random() for _ in range(count)))
        for count in (100, 4_000, 40_000, 4_001)
    ]
    small = [samples(f"small{number}", float(number)) for number in range(200)]
    expected = {member.cell: member for member in [*large, *small]}
    content = b"".join(map(pack, expected.values()))
    assert read_samples(write(tmp_path, content)) == expected
    assert whole_length(content) == len(content)
    assert whole_length(content[:-1]) == len(content) - len(pack(small[-1]))


@pytest.mark.deep
def test_a_member_of_a_few_bytes_does_not_fill_the_memory():
    compressor = zlib.compressobj(1, wbits=31)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(256)) + compressor.flush()
    assert len(bomb) < 2_000_000
    tracemalloc.start()
    try:
        assert whole_length(pack(A) + bomb + pack(B)) == len(pack(A))
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "r"


def test_samples_are_on_disk_before_their_row(run):
    with RunDirectory.create(run, ASKED) as directory:
        directory.append(row("a"), A)
        assert read_samples(run) == {"a": A}
        directory.append(row("b"))
    assert [row.cell for row in read_rows(run)] == ["a", "b"]
    assert read_samples(run) == {"a": A}


def test_resume_drops_what_was_cut_off(run):
    with RunDirectory.create(run, ASKED) as directory:
        directory.append(row("a"), A)
    whole = (run / SAMPLES).read_bytes()
    write(run, whole + pack(B)[:-3])
    with RunDirectory.resume(run, ASKED) as directory:
        assert (run / SAMPLES).read_bytes() == whole
        directory.append(row("b"), B)
    assert read_samples(run) == {"a": A, "b": B}
    # The very first ones.
    first = run.with_name("first")
    with RunDirectory.create(first, ASKED):
        write(first, pack(A)[:-3])
    with RunDirectory.resume(first, ASKED):
        assert (first / SAMPLES).read_bytes() == b""


def measured_run(path: Path) -> bytes:
    """Write an unfinished run of cell a. Return its samples file."""
    with RunDirectory.create(path, ASKED) as directory:
        directory.append(row("a", samples=2), A)
    return (path / SAMPLES).read_bytes()


@pytest.mark.parametrize(
    ("tail", "fault"),
    [
        (b"garbage", " after {whole} of its {length} bytes: put back a copy of it, or do without"),
        (b"\0" * 9, " after {whole} of its {length} bytes"),
        (pack(B)[:-6] + b"\0" * 6 + pack(AGAIN), " after {whole} of its {length} bytes"),
        (gzip.compress(b"no samples\n"), ": put back a copy of it, or remove it"),
    ],
    ids=["not-gzip", "zeros", "wrong-checksum", "no-samples"],
)
def test_resume_refuses_samples_that_no_kill_left_so(run, tail, fault):
    whole = measured_run(run)
    write(run, whole + tail)
    rows = (run / "results.jsonl").read_bytes()
    said = fault.format(whole=len(whole), length=len(whole + tail))
    with pytest.raises(UserError, match=re.escape(f"{run / SAMPLES} is damaged{said}")):
        opened(RunDirectory.resume(run, ASKED))
    assert (run / SAMPLES).read_bytes() == whole + tail
    assert (run / "results.jsonl").read_bytes() == rows
    # As the sentence says.
    os.truncate(run / SAMPLES, len(whole))
    assert opened(RunDirectory.resume(run, ASKED)) == {"a"}


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_resume_refuses_samples_that_were_cut_off_before_those_of_a_row(run, kept):
    whole = measured_run(run)
    write(run, whole[:kept])
    with pytest.raises(UserError, match=r"samples\.jsonl\.gz is damaged: put back a copy of it"):
        opened(RunDirectory.resume(run, ASKED))
    (run / SAMPLES).unlink()
    with RunDirectory.resume(run, ASKED) as directory:
        directory.append(row("b", samples=1), B)
    # Without those of a, nothing is cut off.
    assert opened(RunDirectory.resume(run, ASKED)) == {"a", "b"}
    assert read_samples(run) == {"b": B}


class Killed(BaseException):
    pass


def killed_between_samples_and_row(directory: RunDirectory, row: Row, raw: Samples) -> None:
    write_bytes = directory._write

    def write_samples_only(file: int, content: bytes, name: str) -> None:
        if name != SAMPLES:
            raise Killed
        write_bytes(file, content, name)

    directory._write = write_samples_only
    directory.append(row, raw)


def test_a_kill_between_samples_and_row_runs_the_cell_again(run):
    with RunDirectory.create(run, ASKED) as directory:
        directory.append(row("b"), B)
        with pytest.raises(Killed):
            killed_between_samples_and_row(directory, row("a"), A)
    assert read_samples(run) == {"b": B, "a": A}
    with RunDirectory.resume(run, ASKED) as directory:
        assert directory.finished == {"b"}
        directory.append(row("a"), AGAIN)
    assert [row.cell for row in read_rows(run)] == ["b", "a"]
    assert read_samples(run) == {"b": B, "a": AGAIN}
