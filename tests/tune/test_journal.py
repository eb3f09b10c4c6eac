"""An interrupted tuning resumes."""

from __future__ import annotations

import errno
import os
import resource

import pytest
from leanbench.kernels.lean.configs import LeanTritonConfig

from leanbench.configs.space import FamilyKey
from leanbench.core.files import UnreadableFile
from leanbench.tune.journal import Journal
from leanbench.tune.stopwatch import Time

FAMILY, OTHER = FamilyKey(64, 4), FamilyKey(128, 1)
TIMES = {
    LeanTritonConfig(64, 4, 3, 1, 1, True): Time(10.5, 10.4, 10.6),
    LeanTritonConfig(128, 4, 3, 2, 1, False): Time(12.0),
}
ABOUT = {"triton": "3.6.0", "gpu_uuid": "GPU-1"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "h200.jsonl"


def test_what_was_noted_is_read_back(path):
    journal = Journal(path, ABOUT)
    assert journal.read([FAMILY]) == []
    noted = [(FAMILY, FAMILY.problem(tiles, 1000), TIMES) for tiles in (8, 20)]
    for note in noted:
        journal.add(*note)
    assert Journal(path, ABOUT).read([FAMILY]) == noted
    assert Journal(path, ABOUT).read([OTHER]) == []
    assert Journal(path, {**ABOUT, "triton": "3.7.0"}).read([FAMILY]) == []


def test_what_is_saved_is_forgotten_and_nothing_else(path):
    mine, others = Journal(path, ABOUT), Journal(path, {**ABOUT, "gpu_uuid": "GPU-2"})
    mine.add(FAMILY, FAMILY.problem(8, 1000), TIMES)
    mine.add(OTHER, OTHER.problem(8, 1000), TIMES)
    others.add(FAMILY, FAMILY.problem(8, 1000), TIMES)
    mine.forget([FAMILY])
    assert mine.read([FAMILY, OTHER]) == [(OTHER, OTHER.problem(8, 1000), TIMES)]
    assert len(others.read([FAMILY])) == 1
    mine.forget([OTHER])
    others.forget([FAMILY])
    assert not path.exists()
    mine.forget([FAMILY])


def test_a_thorough_tuning_takes_up_thorough_lines_only(path):
    Journal(path, ABOUT).add(FAMILY, FAMILY.problem(8, 1000), TIMES)
    Journal(path, ABOUT, thorough=True).add(FAMILY, FAMILY.problem(20, 1000), TIMES)
    assert len(Journal(path, ABOUT).read([FAMILY])) == 2
    (only,) = Journal(path, ABOUT, thorough=True).read([FAMILY])
    assert only[1] == FAMILY.problem(20, 1000)


def test_damaged_lines_are_left_out(path):
    journal = Journal(path, ABOUT)
    journal.add(FAMILY, FAMILY.problem(8, 1000), TIMES)
    journal.add(FAMILY, FAMILY.problem(20, 1000), TIMES)
    whole = path.read_text()
    bad = whole.splitlines()[0].replace('"batch": 1', '"batch": 0')
    path.write_text(f"{bad}\n[]\nhello\n{whole[:-40]}")
    assert [problem for _, problem, _ in journal.read([FAMILY])] == [FAMILY.problem(8, 1000)]
    path.write_bytes(b"\xff\xfe\x00")
    assert journal.read([FAMILY]) == []


def test_what_is_no_file_is_not_waited_for(path):
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UnreadableFile):
        Journal(path, ABOUT).read([FAMILY])


def test_what_is_whole_is_read_wherever_the_last_line_was_cut_off(path):
    journal = Journal(path, ABOUT)
    first = (FAMILY, FAMILY.problem(8, 1000), TIMES)
    second = (FAMILY, FAMILY.problem(20, 1000), TIMES)
    third = (FAMILY, FAMILY.problem(40, 1000), TIMES)
    journal.add(*first)
    begun = path.stat().st_size
    journal.add(*second)
    whole = path.read_bytes()
    for end in range(begun, len(whole)):
        path.write_bytes(whole[:end])
        assert journal.read([FAMILY]) == [first]
        journal.add(*third)
        assert journal.read([FAMILY]) == [first, third], end
    path.write_bytes(whole + b"\xff\xfe\n" + b"[" * 100_000 + b"\n")
    assert journal.read([FAMILY]) == [first, second]


def test_a_full_disk_names_the_file_and_costs_the_last_problem_only(path):
    journal = Journal(path, ABOUT)
    first = (FAMILY, FAMILY.problem(8, 1000), TIMES)
    second = (FAMILY, FAMILY.problem(20, 1000), TIMES)
    journal.add(*first)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow, like on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(OSError, match="No space left") as full:
            journal.add(*second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    assert journal.read([FAMILY]) == [first]
    journal.add(*second)
    assert journal.read([FAMILY]) == [first, second]
