"""An interrupted tuning goes on."""

from __future__ import annotations

from leanbench.registry import KernelConfig
from leanbench.tune.journal import Journal
from leanbench.tune.space import FamilyKey
from leanbench.tune.stopwatch import Time

FAMILY = FamilyKey(64, 4)
TIMES = {KernelConfig(64, 4, 3, 1, 1, True): Time(10.5, 10.4, 10.6), KernelConfig(128, 4, 3, 2, 1, False): Time(12.0)}


def test_what_was_noted_is_read_back(tmp_path):
    journal = Journal(tmp_path / "deep" / "h200.jsonl", {"triton": "3.6.0"})
    assert journal.read() == []
    journal.begin([])
    noted = [(FAMILY, FAMILY.problem(tiles, 1000), TIMES) for tiles in (8, 20)]
    for one in noted:
        journal.add(*one)
    assert Journal(tmp_path / "deep" / "h200.jsonl", {"triton": "3.6.0"}).read() == noted


def test_another_tuning_begins_anew(tmp_path):
    path = tmp_path / "h200.jsonl"
    journal = Journal(path, {"triton": "3.6.0"})
    journal.begin([(FAMILY, FAMILY.problem(8, 1000), TIMES)])
    assert Journal(path, {"triton": "3.7.0"}).read() == []


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "h200.jsonl"
    journal = Journal(path, {})
    journal.begin([(FAMILY, FAMILY.problem(8, 1000), TIMES), (FAMILY, FAMILY.problem(20, 1000), TIMES)])
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert [problem for _, problem, _ in journal.read()] == [FAMILY.problem(8, 1000)]
    path.write_bytes(b"\xff\xfe\x00")
    assert journal.read() == []


def test_the_end_removes_it(tmp_path):
    journal = Journal(tmp_path / "h200.jsonl", {})
    journal.begin([])
    journal.end()
    journal.end()
    assert not (tmp_path / "h200.jsonl").exists()
