"""A full disk in the run folder: one sentence, and what was written stays."""

from __future__ import annotations

import resource

import pytest
from depth import deep
from drill_sweeps import environment, rows, run

from leanbench.records.reading import read_run
from leanbench.report import write_report

CONTEXTS = [*range(1024, 51 * 1024, 1024)]
CELLS = ("sweep", "-q", "--kernels", "steady", "--context", "1k:50k:+1k")


def small_files(most_bytes: int) -> dict[str, object]:
    """Return options of a process with small files, like on a full disk.

    It keeps no bytecode, because truncated modules would break other processes.
    """
    return {
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        "env": environment(PYTHONDONTWRITEBYTECODE="1"),
    }


@pytest.mark.parametrize(
    ("most_bytes", "where", "least_rows"),
    [
        deep(100, "manifest.json", 0),
        (15_000, "results.jsonl", 10),
        deep(60_000, "report.html", 50),
    ],
)
def test_a_full_disk_is_a_sentence_and_what_was_written_stays(
    tmp_path, most_bytes, where, least_rows
):
    out = tmp_path / "with space, 'quote' and ü"
    command = [*CELLS, "--name", "r", "--out", str(out)]
    command += [] if where == "report.html" else ["--no-report"]
    done = run(*command, **small_files(most_bytes))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    path = out / "r"
    assert str(path / where) in error
    if least_rows:
        assert len(read_run(path).results) >= least_rows
        written = write_report(path, tmp_path / "report")
        assert [file.name for file in written] == ["report.html", "report.csv"]
    # A truncated row is dropped, and the other cells run.
    assert run(*command, "--resume").returncode == 0
    assert [row["problem"]["context"] for row in rows(path)] == CONTEXTS
    assert not [file for file in path.iterdir() if "part" in file.name or file.name[0] == "."]


@pytest.mark.deep
def test_a_merge_on_a_full_disk_leaves_no_run(tmp_path):
    for shard in "12":
        words = ("--shard", f"{shard}/2", "--name", f"s{shard}", "--out", str(tmp_path))
        assert run(*CELLS, "--no-report", *words).returncode == 0
    out = tmp_path / "both"
    merge = ["merge", str(tmp_path / "s1"), str(tmp_path / "s2"), "--out", str(out)]
    done = run(*merge, **small_files(15_000))
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: cannot write {out} (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s1", "s2"]
    assert run(*merge).returncode == 0
    assert [row["problem"]["context"] for row in rows(out)] == CONTEXTS
