"""kill -9 at any moment: the next --resume finds everything that was done, and every cell has one
row in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from depth import DEEP, diagonal
from drill_sweeps import (
    answer_signals,
    children,
    environment,
    is_gone,
    rows,
    run,
    stand_in_us,
    start,
    wait_until,
)

from leanbench.records.directory import RunDirectory
from leanbench.records.manifest import read_manifest
from leanbench.records.reading import read_run
from leanbench.records.samples import Samples, pack, read_samples, whole_length
from leanbench.report import write_report

KILLS = 20 if DEEP else 3
CONTEXTS = [1024 * count for count in range(1, 51)]
ASKED = "sweep --no-report --quiet --kernels unhurried --context 1k:50k:+1k --name r".split()


def report_rows(path: Path) -> int:
    """Rows of the report that can be written now."""
    html, csv = write_report(path, path.with_name("report"))
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', html.read_text(), re.DOTALL
    )
    assert data
    count = len(csv.read_text().splitlines()) - 1
    assert len(json.loads(data[1])["rows"]) == count
    return count


def test_killed_at_random_moments_and_resumed_every_cell_once(tmp_path):
    # From before the folder is made until long after the last cell, were it not killed.
    moments = random.Random(20)
    path = tmp_path / "r"
    done = waits = 0
    for _ in range(KILLS):
        words = [*ASKED, "--out", str(tmp_path), *(["--resume"] if path.exists() else [])]
        with start(*words) as process:
            if moments.random() < 0.7:
                # Once cells run, so that they get done.
                before = done + moments.randrange(3)
                waits += 1
                wait_until(
                    lambda before=before, process=process: (
                        len(done_rows(path)) > before or process.poll() is not None
                    ),
                    "a row",
                )
                time.sleep(moments.uniform(0, 0.03))
            else:
                time.sleep(moments.uniform(0, 0.9))
            workers = children(process.pid) if process.poll() is None else []
            # It may have ended by itself meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for worker in workers:
            wait_until(lambda worker=worker: is_gone(worker), "the worker's end")
        contexts = done_rows(path)
        assert contexts[:done] == [*range(1024, 1024 * (done + 1), 1024)]
        done = len(contexts)
        if (path / "manifest.json").exists():
            assert report_rows(path) == done
    assert 0 < waits <= done <= 50
    finished = run(*ASKED, "--out", str(tmp_path), "--resume")
    assert finished.returncode == 0, finished.stderr
    assert Counter(row["problem"]["context"] for row in rows(path)) == dict.fromkeys(CONTEXTS, 1)
    assert all(row["latency_us"] == stand_in_us(row["problem"]["context"]) for row in rows(path))
    assert (
        sorted(file.name for file in path.iterdir())
        == "lock manifest.json results.jsonl worker.log".split()
    )
    assert report_rows(path) == 50


def done_rows(path: Path) -> list[int]:
    """Contexts of the rows that are whole, as a reader finds them at any time."""
    return (
        [row.problem["context"] for row, _ in read_run(path).results]
        if (path / "manifest.json").exists()
        else []
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    words = "sweep --no-report -q --kernels lean,fa2 --context 1k,2k --name r --out".split()
    assert run(*words, str(out)).returncode == 0
    return out / "r"


def test_a_results_file_cut_at_any_byte_of_its_last_line_is_a_report(finished, tmp_path):
    path = tmp_path / "r"
    shutil.copytree(finished, path)
    whole = (path / "results.jsonl").read_bytes()
    cells = [row["cell"] for row in rows(path)]
    manifest = read_manifest(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    assert len(whole) - last > 500
    # Some by default, and every place around the end of the row.
    lengths = {*range(last, len(whole), 1 if DEEP else 9), *range(len(whole) - 3, len(whole) + 1)}
    for length in sorted(lengths):
        (path / "results.jsonl").write_bytes(whole[:length])
        # All but its newline: the report has the row, and a resumed sweep runs the cell again.
        known = 4 if length >= len(whole) - 1 else 3
        assert len(read_run(path).results) == known
        if length == last or length > len(whole) - 3:
            assert report_rows(path) == known
        with RunDirectory.resume(path, manifest) as directory:
            assert directory.finished == set(cells if length == len(whole) else cells[:3])
        assert (path / "results.jsonl").read_bytes() == (
            whole if length == len(whole) else whole[:last]
        )


def test_samples_cut_at_any_byte_of_the_last_member_keep_the_others(finished, tmp_path):
    members = [
        pack(
            Samples(cell=name, samples_us=[1.5] * 20, rounds=[*range(20)], sm_clock_mhz=[1980] * 20)
        )
        for name in "ab"
    ]
    path = tmp_path / "r"
    path.mkdir()
    for length in range(len(members[1]) + 1):
        content = members[0] + members[1][:length]
        (path / "samples.jsonl.gz").write_bytes(content)
        is_whole = length == len(members[1])
        assert set(read_samples(path)) == ({"a", "b"} if is_whole else {"a"})
        assert whole_length(content) == (len(content) if is_whole else len(members[0]))


@pytest.mark.parametrize(
    ("leftover", "resume"),
    diagonal(
        [["lock"], ["lock", "results.jsonl"], ["lock", "results.jsonl", "manifest.json.part"]],
        [[], ["--resume"]],
        keep=2,
    ),
)
def test_a_sweep_killed_before_it_had_a_manifest_can_start_again(tmp_path, leftover, resume):
    path = tmp_path / "r"
    path.mkdir()
    for name in leftover:
        (path / name).write_bytes(b'{"sche' if name.endswith(".part") else b"")
    words = "sweep --no-report -q --kernels steady --context 1k --name r --out".split()
    done = run(*words, str(tmp_path), *resume)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows(path)] == ["ok"]


#: A worker that is busy and one that waits for a job, in a pool as `leanbench tune` makes it.
POOL = """
import time
from leanbench.compile import build

build._COMPILING = ()
with build.process_pool(2) as pool:
    pool.submit(time.sleep, 0.1).result()
    pool.submit(time.sleep, 1000)
    pool.submit(time.sleep, 0.1).result()
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_killed_pool_of_compiling_processes_leaves_none_behind():
    with subprocess.Popen(
        [sys.executable, "-c", POOL], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The resource tracker, the forkserver, and its workers.
        started = children(process.pid)
        workers = [worker for child in started for worker in children(child)]
        assert (len(started), len(workers)) == (2, 2)
        process.kill()
    for child in (*workers, *started):
        wait_until(lambda child=child: is_gone(child), "the end of a process of the pool")


#: More jobs than a pool of two hands out at once, each of which takes long. Python's end wakes each
#: pool's thread that still runs, without a lock: slowed, its write comes after the pipe is closed.
INTERRUPTED = """
import concurrent.futures.process, time
from leanbench.compile import build

class Slow(concurrent.futures.process._ThreadWakeup):
    def wakeup(self):
        if not self._closed:
            time.sleep(0.3)
            self._writer.send_bytes(b"")

concurrent.futures.process._ThreadWakeup = Slow
build._COMPILING = ()
try:
    with build.process_pool(2) as pool:
        jobs = [pool.submit(time.sleep, seconds) for seconds in (0.1, *[1000] * 5)]
        jobs[0].result()
        print("ready", flush=True)
        jobs[1].result()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_a_pool_that_is_interrupted_waits_for_no_job_and_ends_in_silence():
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=environment(),
        preexec_fn=answer_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started = children(process.pid)
        started += [worker for child in started for worker in children(child)]
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, stdout, stderr) == (0, "stopped\n", "")
    for child in started:
        wait_until(lambda child=child: is_gone(child), "the end of a process of the pool")


#: The same as `leanbench check` makes it.
CHECKING = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from leanbench.compile.build import end_with_parent

with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), end_with_parent) as pool:
    pool.submit(time.sleep, 0.1).result()
    pool.submit(time.sleep, 1000)
    pool.submit(time.sleep, 0.1).result()
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_killed_pool_of_checking_processes_leaves_none_behind():
    with subprocess.Popen(
        [sys.executable, "-c", CHECKING], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The resource tracker and the workers.
        started = children(process.pid)
        assert len(started) == 3
        process.kill()
    for child in started:
        wait_until(lambda child=child: is_gone(child), "the end of a process of the pool")
