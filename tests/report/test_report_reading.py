import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from example_runs import WriteRun, problem, row

from leanbench.core.errors import UserError
from leanbench.records.reading import find_run, read_run
from leanbench.report import write_report


def test_rows_come_back_in_order_with_their_problems(write_run: WriteRun) -> None:
    run = read_run(write_run([row(problem(1024), "lean", 10.0), row(problem((7, 9)), "fa2", 20.0)]))
    assert [(r.kernel, r.latency_us, p.contexts) for r, p in run.results] == [
        ("lean", 10.0, (1024,)),
        ("fa2", 20.0, (7, 9)),
    ]
    assert run.notes == ()


def test_a_cut_off_line_is_noted_and_left_out(write_run, caplog):
    whole = json.dumps(row(problem(2048), "fa2", 20.0))
    directory = write_run([row(problem(), "lean", 10.0)], tail=whole[: len(whole) // 2])
    run = read_run(directory)
    assert [r.kernel for r, _ in run.results] == ["lean"]
    assert run.notes == ("results.jsonl line 2 was cut off in writing and is left out",)
    with caplog.at_level(logging.WARNING):
        [page] = write_report(directory, directory, ["html"])
    assert [record.message for record in caplog.records] == list(run.notes)
    assert f"Note: {run.notes[0]}." in page.read_text()


def test_copies_of_a_row_count_once_and_are_noted(write_run: WriteRun) -> None:
    first, second = row(problem(), "lean", 10.0), row(problem(), "fa2", 20.0)
    # The same cell measured at another time is no copy.
    later = {**first, "time": "2026-01-02T03:04:06+00:00"}
    run = read_run(write_run([first, second, first, later, second], tail=json.dumps(first)))
    kept = [(r.kernel, r.time) for r, _ in run.results]
    assert kept == [(own["kernel"], own["time"]) for own in (first, second, later)]
    assert run.notes == (
        "results.jsonl: 1 cell has several different rows, which all count",
        "results.jsonl: 3 rows are copies of another row and left out",
    )
    one = read_run(write_run([first], tail=json.dumps(first), folder="one"))
    assert one.notes == ("results.jsonl: 1 row is a copy of another row and left out",)


def test_samples_without_a_whole_member_are_noted(write_run, caplog):
    directory = write_run([row(problem(), "lean", 10.0)])
    note = "samples.jsonl.gz is damaged, it has no whole gzip member: there are no raw samples"
    whole = gzip.compress(b"{}\n")
    cut = (
        f"samples.jsonl.gz is cut off or damaged after {len(whole)} of its {len(whole) + 9} bytes:"
        " raw samples that follow are left out"
    )
    contents = {b"": (), whole: (), whole + whole[:9]: (cut,), whole[:-1]: (note,)}
    for content, notes in contents.items():
        (directory / "samples.jsonl.gz").write_bytes(content)
        assert read_run(directory).notes == notes, content
    with caplog.at_level(logging.WARNING):
        [page] = write_report(directory, directory, ["html"])
    assert [record.message for record in caplog.records] == [note]
    assert f"Note: {note}." in page.read_text()


@pytest.mark.parametrize(("tail", "rows"), [('{"reason": "µ'.encode()[:-1], 1), (b"", 2)])
def test_a_last_line_without_a_newline(write_run: WriteRun, tail: bytes, rows: int) -> None:
    """It counts if it is whole; it may be cut off inside a character."""
    first = row(problem(), "lean", 10.0)
    directory = write_run([first], tail="" if tail else json.dumps({**first, "cell": "other"}))
    with (directory / "results.jsonl").open("ab") as file:
        file.write(tail)
    assert len(read_run(directory).results) == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "no JSON at column 2"),
        ("[1, 2]", "a row is a JSON object, this is [1, 2]"),
        ({"status": "fine"}, "status: Input should be 'ok'"),
        ({"problem": {"batch": 1}}, "problem.q_heads: Field required"),
        (
            {"problem": {**problem().to_dict(), "head_dim": 65}},
            "head_dim 65 is not a multiple of 8",
        ),
        *(({"latency_us": value}, "latency_us: ") for value in (True, "1.5")),
        ({"schema_version": 99}, "has schema version 99, this leanbench reads 2"),
    ],
)
def test_any_other_bad_line_is_named(write_run: WriteRun, line: Any, says: str) -> None:
    good = row(problem(), "lean", 10.0)
    text = line if isinstance(line, str) else json.dumps({**good, **line})
    directory = write_run([good], tail=f"{text}\n{json.dumps(good)}\n")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        read_run(directory)
    sentence = str(caught.value)
    assert sentence.startswith(f"{directory / 'results.jsonl'}, line 2 is not a row (")
    assert sentence.endswith("): delete that line, its cell will run again with --resume")
    assert "\n" not in sentence


def test_run_is_found_by_path_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="runs/ holds no run yet"):
        find_run("smoke")
    named = tmp_path / "runs" / "smoke-1"
    named.mkdir(parents=True)
    (named / "results.jsonl").write_text("")
    assert find_run("smoke-1").resolve() == named
    assert find_run(str(named)) == named
    for typed in ("smok-1", "smok-1/"):
        with pytest.raises(UserError, match=f"there is no run '{typed}', did you mean 'smoke-1'"):
            find_run(typed)


#: What is typed where there is no run; the snapshot has what is said.
TYPED = (
    "smoke trace-yz reports/h200/smoek ./reports/h200/smoek/ reports/h200/nope reports/trace"
    " report/h200/smoke reports/h200/smoke/results.jsonl"
)


def test_a_run_that_is_not_there_is_told_its_neighbours(tmp_path, monkeypatch, snapshot) -> None:
    monkeypatch.chdir(tmp_path)
    named = [f"runs/smoke-h200-20260101-00000{count}" for count in range(4)]
    for run in (*named, "runs/x", "reports/h200/smoke", "reports/h200/a-a"):
        Path(run).mkdir(parents=True)
        Path(run, "results.jsonl").write_text("")
    # A trace, and a sweep that is yet to begin.
    Path("runs/trace/deep").mkdir(parents=True)
    Path("runs/file").write_text("")
    Path("reports/h200/nop").mkdir()
    messages = []
    for typed in TYPED.split():
        with pytest.raises(UserError) as caught:
            find_run(typed)
        messages.append(str(caught.value))
    assert "\n".join(messages) == snapshot
