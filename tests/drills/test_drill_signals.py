"""Ctrl-C, SIGTERM and SIGHUP in mid-run: the end, no process left, and how to continue."""

from __future__ import annotations

import os
import shlex
import signal

import pytest
from depth import deep
from drill_sweeps import children, is_gone, rows, run, start, wait_until, whole_rows


def command_of(kernel: str, out: object) -> list[str]:
    words = f"sweep --no-report --kernels {kernel} --context 1k:50k:+1k --name r --out"
    return [*words.split(), str(out)]


@pytest.mark.parametrize(
    ("kernel", "number", "code"),
    [
        ("ignores_signals", signal.SIGINT, 130),
        deep("ignores_signals", signal.SIGTERM, 143),
        deep("loops", signal.SIGTERM, 143),
        deep("unhurried", signal.SIGINT, 130),
    ],
)
def test_a_stopped_sweep_says_what_is_done_and_continues_as_it_says(tmp_path, kernel, number, code):
    with start(*command_of(kernel, tmp_path)) as process:
        # The faulty ones are at their thirteenth cell then and never leave it.
        wait_until(lambda: whole_rows(tmp_path / "r") >= 12, "twelve rows")
        workers = children(process.pid)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=240)
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker), "the worker's end")
    assert process.returncode == code
    assert "Traceback" not in stderr
    done = len(rows(tmp_path / "r"))
    assert done == 12 or (kernel == "unhurried" and done < 50)
    sentence, again = stderr.splitlines()[-2:]
    assert sentence.startswith(f"Stopped by {signal.Signals(number).name}: {done} of 50 cells")
    words = shlex.split(again.removeprefix("Go on with: leanbench "))
    assert words[-3:] == ["--name", "r", "--resume"]
    finished = run(*words, "--timeout", "1s")
    assert finished.returncode == (0 if kernel == "unhurried" else 1), finished.stderr
    contexts = sorted(row["problem"]["context"] for row in rows(tmp_path / "r"))
    assert contexts == [*range(1024, 51 * 1024, 1024)]


def test_the_end_of_the_terminal_leaves_no_worker(tmp_path):
    with start(*command_of("loops", tmp_path)) as process:
        wait_until(lambda: whole_rows(tmp_path / "r") >= 12, "twelve rows")
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGHUP)
        process.communicate(timeout=240)
    assert workers
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker), "the worker's end")
    assert len(rows(tmp_path / "r")) == 12
