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
from depth import DEEP
from drill_sweeps import (
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
from leanbench.report import write_report

KILLS = 20 if DEEP else 3
CONTEXTS = [1024 * count for count in range(1, 51)]
ASKED = "sweep --no-report --quiet --kernels unhurried --context 1k:50k:+1k --name r".split()


def report_rows(path: Path) -> int:
    """Write a report and return its number of rows."""
    html, csv = write_report(path, path.with_name("report"))
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', html.read_text(), re.DOTALL
    )
    assert data
    count = len(csv.read_text().splitlines()) - 1
    assert len(json.loads(data[1])["rows"]) == count
    return count


@pytest.mark.deep
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
    """Return the contexts of the whole rows."""
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


@pytest.mark.deep
def test_a_results_file_cut_at_any_byte_of_its_last_line_is_a_report(finished, tmp_path):
    path = tmp_path / "r"
    shutil.copytree(finished, path)
    whole = (path / "results.jsonl").read_bytes()
    cells = [row["cell"] for row in rows(path)]
    manifest = read_manifest(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    assert len(whole) - last > 500
    # Some lengths, and all around the end of the row.
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


@pytest.mark.deep
@pytest.mark.parametrize(
    ("leftover", "resume"),
    [(["lock"], []), (["lock", "results.jsonl", "manifest.json.part"], ["--resume"])],
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


#: A worker that is busy and one that waits for a job, in pools as `leanbench tune` and `leanbench
#: check` make them.
POOL = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from leanbench.compile import build

build._COMPILING = ()
with {pool} as pool:
    pool.submit(time.sleep, 0.1).result()
    pool.submit(time.sleep, 1000)
    pool.submit(time.sleep, 0.1).result()
    print("ready", flush=True)
    time.sleep(1000)
"""
SPAWNED = "ProcessPoolExecutor(2, multiprocessing.get_context('spawn'), build.end_with_parent)"


@pytest.mark.parametrize("pool", ["build.process_pool(2)", SPAWNED], ids=["tune", "check"])
def test_a_killed_pool_leaves_no_process_behind(pool):
    with subprocess.Popen(
        [sys.executable, "-c", POOL.format(pool=pool)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The resource tracker, perhaps a forkserver, and two workers.
        started = children(process.pid)
        started += [worker for child in started for worker in children(child)]
        assert len(started) == (3 if pool == SPAWNED else 4)
        process.kill()
    for child in started:
        wait_until(lambda child=child: is_gone(child), "the end of a process of the pool")
