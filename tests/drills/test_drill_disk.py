"""A disk that is full, folders that cannot be written, two writers at once: a sentence, and what
was written stays.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from depth import deep
from drill_sweeps import command, environment, rows, run, start, wait_until
from tuned_examples import family

from leanbench.configs.tuned_file import read
from leanbench.records.reading import read_run
from leanbench.report import write_report

CELLS = ("--kernels", "steady", "--context", "1k:50k:+1k")
FEW = ("--kernels", "steady", "--context", "1k,2k")


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in errors[0]


def small_files(most_bytes: int, **more: str) -> dict[str, Any]:
    """Options of a process whose files may not become larger, which is how a full disk looks to a
    writer. It keeps no bytecode: Python would leave modules that are cut off to all others.

    Args:
        more: variables of its environment.
    """
    return {
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        "env": environment(PYTHONDONTWRITEBYTECODE="1", **more),
    }


@pytest.mark.parametrize(
    ("most_bytes", "where", "least_rows"),
    [(100, "manifest.json", 0), (15_000, "results.jsonl", 10), deep(60_000, "report.html", 50)],
)
def test_a_full_disk_is_a_sentence_and_what_was_written_stays(
    tmp_path, most_bytes, where, least_rows
):
    command = ["sweep", "-q", *CELLS, "--name", "r", "--out", str(tmp_path)]
    if where != "report.html":
        command += ["--no-report"]
    done = run(*command, **small_files(most_bytes))
    path = tmp_path / "r"
    assert_one_sentence(done, f"cannot write {path / where}")
    if least_rows:
        assert len(read_run(path).results) >= least_rows
        assert [file.name for file in write_report(path, tmp_path / "report")] == [
            "report.html",
            "report.csv",
        ]
    # What is torn is dropped, and the rest runs.
    assert run(*command, "--resume").returncode == 0
    assert [row["problem"]["context"] for row in rows(path)] == [*range(1024, 51 * 1024, 1024)]
    assert not [
        file.name for file in path.iterdir() if "part" in file.name or file.name.startswith(".")
    ]


@pytest.mark.parametrize("most_bytes", [deep(100), 15_000])
def test_a_merge_on_a_full_disk_is_a_sentence_and_leaves_no_run(tmp_path, most_bytes):
    shards = [tmp_path / f"s{index}" for index in (1, 2)]
    for index, shard in enumerate(shards, 1):
        words = ("--shard", f"{index}/2", "--name", shard.name, "--out", str(tmp_path))
        assert run("sweep", "-q", "--no-report", *CELLS, *words).returncode == 0
    out = tmp_path / "both"
    merge = ["merge", *map(str, shards), "--out", str(out)]
    done = run(*merge, **small_files(most_bytes))
    assert_one_sentence(
        done, f"cannot write {out} (", "): make room, or choose another folder with --out"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s1", "s2"]
    assert run(*merge).returncode == 0
    assert [row["problem"]["context"] for row in rows(out)] == [*range(1024, 51 * 1024, 1024)]


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 28 KB, where one can be mounted without being asked."""
    script = (
        'mount -t tmpfs -o size=28k none "$1" || exit 77; shift; "$@"; code=$?; cp -r "$OUT"/r'
        ' "$KEEP"; exit $code'
    )
    out = tmp_path / "out"
    out.mkdir()
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(out)]
    arguments = ["sweep", "-q", "--no-report", *CELLS, "--name", "r", "--out", str(out)]
    try:
        done = subprocess.run(
            [*words, *command(*arguments)],
            env=environment(OUT=str(out), KEEP=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=240,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare, which is not here")
    if done.returncode in (1, 77) and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"needs a mount of one's own, which this system refuses: {done.stderr.strip()}")
    assert_one_sentence(
        done, f"cannot write {out}/r/", "No space left on device", "go on with --resume"
    )
    assert 5 <= len(read_run(tmp_path / "r").results) < 50


def without_roots_rights() -> None:
    """Called in the child: root may write what is read-only, so it is root no more in that
    respect.
    """
    set_capability, bounding_set = ctypes.CDLL(None).prctl, 24
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        set_capability(bounding_set, capability, 0, 0, 0)


def test_a_read_only_folder_is_a_sentence(tmp_path):
    tmp_path.chmod(0o555)
    try:
        done = run(
            "sweep", "-q", *FEW, "--out", str(tmp_path / "runs"), preexec_fn=without_roots_rights
        )
    finally:
        tmp_path.chmod(0o755)
    assert_one_sentence(
        done,
        f"cannot write {tmp_path}/runs/",
        "Permission denied",
        "choose another folder with --out",
    )


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", *FEW, "--out", "closed/runs"),
        ("sweep", *FEW, "--out", "closed/runs", "--resume"),
        ("sweep", *FEW, "--out", "closed/runs", "--name", "r", "--resume"),
        ("report", "closed/r"),
        ("report", "r", "--out", "closed/report"),
        ("merge", "closed/r", "--out", "both"),
        ("merge", "r", "--out", "closed/both"),
        ("compare", "closed/r", "r"),
        ("compare", "r", "closed/r:steady"),
    ],
    ids=" ".join,
)
def test_a_closed_folder_is_a_sentence(finished, tmp_path, words):
    (tmp_path / "closed").mkdir()
    for place in (tmp_path, tmp_path / "closed"):
        shutil.copytree(finished, place / "r")
    (tmp_path / "closed").chmod(0o000)
    try:
        done = run(*words, preexec_fn=without_roots_rights, cwd=tmp_path)
    finally:
        (tmp_path / "closed").chmod(0o755)
    assert_one_sentence(done, "closed/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "r"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two rows, which a test copies."""
    out = tmp_path_factory.mktemp("finished")
    done = run("sweep", "-q", "--no-report", *FEW, "--name", "r", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out / "r"


def test_a_log_that_cannot_be_read_is_named_by_merge(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "r")
    (path / "worker.log").chmod(0o000)
    words = ("merge", str(path), "--out", str(tmp_path / "both"))
    done = run(*words, preexec_fn=without_roots_rights)
    assert_one_sentence(done, f"cannot read {path / 'worker.log'} (permission denied): make it")
    assert [file.name for file in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize(
    "name", [*map(deep, ("manifest.json", "worker.log", "lock")), "results.jsonl", "."]
)
def test_a_run_that_became_read_only_is_a_sentence(finished, tmp_path, name):
    command = [
        "sweep",
        "-q",
        "--no-report",
        *FEW,
        "--name",
        "r",
        "--out",
        str(tmp_path),
        "--resume",
    ]
    path = shutil.copytree(finished, tmp_path / "r")
    results = path / "results.jsonl"
    first = results.read_bytes().splitlines(keepends=True)[0]
    results.write_bytes(first)
    (path / name).chmod(0o000 if name == "manifest.json" else 0o555)
    try:
        done = run(*command, preexec_fn=without_roots_rights)
    finally:
        (path / name).chmod(0o755)
    assert results.read_bytes().startswith(first)
    if name == ".":
        # Its files can be written; only an environment that is new, as after a commit, wants the
        # folder.
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr
        assert run(*command).returncode == 0
        assert [row["problem"]["context"] for row in rows(path)] == [1024, 2048]
    else:
        assert_one_sentence(done, str(path))


def test_reports_into_a_read_only_folder_are_a_sentence(finished, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    words = ("report", str(finished), "--out", str(tmp_path / "closed"))
    done = run(*words, preexec_fn=without_roots_rights)
    assert_one_sentence(done, f"cannot write {tmp_path / 'closed'}", "ermission denied")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("stream", ["stdout", deep("stderr")])
def test_output_to_a_full_disk_ends_no_sweep(tmp_path, stream):
    with Path("/dev/full").open("w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        words = ["sweep", *FEW, "--name", "r", "--out", str(tmp_path)]
        done = run(*words, capture_output=False, **streams)
    assert done.returncode == (2 if stream == "stdout" else 0)
    assert (tmp_path / "r" / "report.html").is_file()
    assert "Traceback" not in (done.stdout or "") + (done.stderr or "")
    assert [row["status"] for row in rows(tmp_path / "r")] == ["ok", "ok"]


def test_the_second_of_two_sweeps_into_one_run_refuses(tmp_path):
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    words = ["sweep", "-q", "--no-report", "--kernels", "gated", "--context", "1k:25k:+1k"]
    words += ["--name", "r", "--out", str(tmp_path)]
    variables = {"LEANBENCH_DRILL_MARK": str(mark), "LEANBENCH_DRILL_GATE": str(gate)}
    with start(*words, **variables) as first:
        # In the middle of its cells, and there until the gate opens.
        wait_until(mark.exists, "the thirteenth cell")
        for again in (words, [*words, "--resume"]):
            assert_one_sentence(run(*again), str(tmp_path / "r"))
        assert first.poll() is None
        gate.touch()
        _, stderr = first.communicate(timeout=240)
    assert first.returncode == 0, stderr
    assert [row["problem"]["context"] for row in rows(tmp_path / "r")] == [
        *range(1024, 26 * 1024, 1024)
    ]


def test_two_sweeps_that_start_at_once_make_one_run(tmp_path):
    command = ["sweep", "-q", "--no-report", *CELLS, "--name", "r", "--out", str(tmp_path)]
    with start(*command) as first, start(*command) as second:
        errors = first.communicate(timeout=240)[1] + second.communicate(timeout=240)[1]
    assert sorted([first.returncode, second.returncode]) == [0, 2], errors
    assert "Traceback" not in errors
    assert [row["problem"]["context"] for row in rows(tmp_path / "r")] == [
        *range(1024, 51 * 1024, 1024)
    ]


SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
from tuned_examples import H200, family
from leanbench.configs.store import save_families
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 40):
    save_families(H200, [family(group_size=number)])
    print(number, flush=True)
"""


def test_no_entry_is_lost_between_two_tunings_of_which_one_is_killed(tmp_path):
    tests = str(Path(__file__).parents[1])
    path = tmp_path / "configs" / "h200.json"
    env = environment(LEANBENCH_HOME=str(tmp_path))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", SAVER, tests]
    with (
        subprocess.Popen([*words, "1"], env=env, **pipes) as killed,
        subprocess.Popen([*words, "101"], env=env, **pipes) as survivor,
    ):
        assert killed.stdout is not None
        sizes = [int(killed.stdout.readline()) for _ in range(10)]
        killed.send_signal(signal.SIGKILL)
        sizes += [int(line) for line in killed.communicate(timeout=240)[0].split()]
        sizes += [int(line) for line in survivor.communicate(timeout=240)[0].split()]
    assert survivor.returncode == 0
    saved = [saved.group_size for saved in read(path).families]
    # The one that was saved when it was killed may not have been said.
    assert set(sizes) <= set(saved)
    assert len(set(saved) - set(sizes)) <= 1
    assert {*range(101, 141)} <= set(saved)
    assert read(path).families[0].candidates == family().candidates


def test_a_full_disk_leaves_the_tuned_configs_as_they_were(tmp_path):
    env = environment(LEANBENCH_HOME=str(tmp_path))
    tests = str(Path(__file__).parents[1])
    script = SAVER.replace("40", "1")
    words = [sys.executable, "-c", script, tests]
    assert subprocess.run([*words, "1"], env=env, timeout=240, check=False).returncode == 0
    path = tmp_path / "configs" / "h200.json"
    before = path.read_bytes()
    limited = small_files(len(before), LEANBENCH_HOME=str(tmp_path))
    done = subprocess.run([*words, "2"], capture_output=True, text=True, **limited)
    assert (
        f"UserError: cannot write {path} (File too large): choose a writable folder" in done.stderr
    )
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) == [".h200.json.lock", "h200.json"]


def test_a_run_on_a_path_with_unusual_letters(tmp_path):
    out = tmp_path / "with space, 'quote' and ü"
    assert run("sweep", "-q", *FEW, "--name", "r", "--out", str(out)).returncode == 0
    assert len(rows(out / "r")) == 2
    shutil.rmtree(out)
