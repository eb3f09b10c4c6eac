"""Ctrl-C and SIGTERM at any moment: the end, no process left, and words on how to go on."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from depth import DEEP, deep
from drill_sweeps import (
    answer_signals,
    children,
    environment,
    is_gone,
    rows,
    start,
    wait_until,
    whole_rows,
)

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def asked(kernel: str, out: object) -> list[str]:
    words = f"sweep --kernels {kernel} --context 1k:50k:+1k --name r --out"
    return [*words.split(), str(out)]


def stop(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    """What it says after the signal; its workers are gone, though their kernel never ends."""
    workers = children(process.pid)
    process.send_signal(number)
    output = process.communicate(timeout=240)
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker), "the worker's end")
    return output


@pytest.mark.parametrize(
    ("kernel", "number", "code"),
    [
        ("ignores_signals", signal.SIGTERM, 143),
        deep("unhurried", signal.SIGINT, 130),
        deep("unhurried", signal.SIGTERM, 143),
        deep("loops", signal.SIGINT, 130),
        deep("loops", signal.SIGTERM, 143),
        deep("ignores_signals", signal.SIGINT, 130),
    ],
)
def test_a_stopped_sweep_says_what_is_done_and_goes_on_as_it_says(tmp_path, kernel, number, code):
    with start(*asked(kernel, tmp_path), "--no-report") as process:
        # The two others are at their thirteenth cell then and never leave it.
        wait_until(lambda: whole_rows(tmp_path / "r") >= 12, "twelve rows")
        _, stderr = stop(process, number)
    assert process.returncode == code
    assert "Traceback" not in stderr
    done = len(rows(tmp_path / "r"))
    assert done == 12 or (kernel == "unhurried" and done < 50)
    sentence, again = stderr.splitlines()[-2:]
    assert (
        sentence
        == f"Stopped by {signal.Signals(number).name}: {done} of 50 cells are done, {50 - done} are"
        " left."
    )
    words = shlex.split(again.removeprefix("Go on with: leanbench "))
    assert words[-3:] == ["--name", "r", "--resume"]
    finished = subprocess.run(
        [sys.executable, "-m", "leanbench", *words, "--timeout", "1s"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == (0 if kernel == "unhurried" else 1), finished.stderr
    assert sorted(row["problem"]["context"] for row in rows(tmp_path / "r")) == [
        *range(1024, 51 * 1024, 1024)
    ]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_stopped_at_random_moments_from_the_start_on(tmp_path, number, code):
    """Also while modules load, the worker starts or the report is written."""
    moments = random.Random(number)
    for turn in range(6 if DEEP else 1):
        out = tmp_path / str(turn)
        with start(*asked("steady", out)) as process:
            time.sleep(moments.uniform(0.1, 1.6))
            if process.poll() is not None:
                continue
            stdout, stderr = stop(process, number)
        # Before and after the cells the system itself ends it, which a shell tells as the same
        # code.
        assert process.returncode in (code, -number, 0), stderr
        if whole_rows(out / "r"):
            assert "Traceback" not in stdout + stderr


#: Sends Ctrl-C when the module is searched whose number is given, counted from leanbench's first
#: one on.
INTERRUPTS = """
import os, signal, sys

class Finder:
    left = int(os.environ["MODULES"])

    def find_spec(self, name, path=None, target=None):
        if name == "leanbench.cli" or Finder.left < int(os.environ["MODULES"]):
            Finder.left -= 1
            if Finder.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def script() -> str:
    """What the console script `leanbench` runs."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["leanbench"].partition(":")
    return f"from {module} import {function}; {function}()"


@pytest.mark.parametrize("entry", [["-m", "leanbench"], ["-c", script()]], ids=["module", "script"])
def test_ctrl_c_while_modules_load_is_an_exit_code_and_not_a_word(tmp_path, entry):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    moments = random.Random(entry[0])
    for modules in (1, 2, *moments.sample(range(3, 150), 10 if DEEP else 1)):
        done = subprocess.run(
            [sys.executable, *entry, *asked("steady", tmp_path), "--dry-run"],
            env=environment(PYTHONPATH=str(tmp_path), MODULES=str(modules)),
            preexec_fn=answer_signals,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), modules


def test_ctrl_c_is_left_alone_where_it_is_ignored(tmp_path):
    """As in a background job of a shell script."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    done = subprocess.run(
        [sys.executable, "-m", "leanbench", "--version"],
        env=environment(PYTHONPATH=str(tmp_path), MODULES="5"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("leanbench ")


def test_more_ctrl_c_changes_nothing(tmp_path):
    with start(*asked("loops", tmp_path), "--no-report") as process:
        wait_until(lambda: whole_rows(tmp_path / "r") >= 12, "twelve rows")
        # Also while Python ends.
        until = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "12 of 50 cells are done, 38 are left." in stderr


def test_the_end_of_the_terminal_leaves_no_worker(tmp_path):
    with start(*asked("loops", tmp_path), "--no-report") as process:
        wait_until(lambda: whole_rows(tmp_path / "r") >= 12, "twelve rows")
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGHUP)
        process.communicate(timeout=240)
    assert workers
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker), "the worker's end")
    assert len(rows(tmp_path / "r")) == 12


#: Loaded by every Python. In the server of a pool's processes it says when, with its modules still
#: to be loaded, a process is asked for; they are there once who asked is gone.
SLOW_SERVER = """
import os, re, select, sys, time

class Finder:
    def __init__(self, listener, parent):
        self.listener, self.parent = listener, parent

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            select.select([self.listener], [], [])
            open(os.environ["ASKED"], "w").close()
            while os.getppid() == self.parent:
                time.sleep(0.01)

called = re.match(r"from multiprocessing.forkserver import main; main.(\\d+)", sys.orig_argv[-1])
if called:
    sys.meta_path.insert(0, Finder(int(called[1]), os.getppid()))
"""


@pytest.mark.parametrize(("number", "code"), [*SIGNALS, (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.parametrize("to_all", [False, deep(True)], ids=["one", "all"])
def test_a_tuning_stopped_while_its_processes_start_leaves_nothing(tmp_path, number, code, to_all):
    (tmp_path / "sitecustomize.py").write_text(SLOW_SERVER)
    asked = tmp_path / "asked"
    more = {"PYTHONPATH": str(tmp_path), "ASKED": str(asked), "LEANBENCH_HOME": str(tmp_path)}
    with start("tune", "--gpu", "a100", "--no-keep", **more) as process:
        wait_until(asked.exists, "the request for a process")
        started = children(process.pid)
        (os.killpg if to_all else os.kill)(process.pid, number)
        # Ends once no process holds the pipes.
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == code
    assert len(started) == 2
    for child in started:
        wait_until(lambda child=child: is_gone(child), "the end of a process of the pool")
    assert "Traceback" not in stderr
    # Python's own process takes away what a killed one leaves, and says so.
    if number != signal.SIGKILL:
        assert stderr.splitlines()[-1] == (
            "Stopped: nothing was saved but what was compiled, the same command takes less time."
        )


#: A pool that is open, none of whose processes has started, while a module loads.
LOADING = """
import signal
from leanbench.__main__ import _interrupt
from leanbench.compile import build

build._COMPILING = ()
signal.signal(signal.SIGINT, _interrupt)
try:
    with build.process_pool(2):
        import interrupts
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_while_modules_load_beside_a_pool_leaves_no_semaphore(tmp_path):
    (tmp_path / "interrupts.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", LOADING],
        env=environment(PYTHONPATH=str(tmp_path)),
        preexec_fn=answer_signals,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


def test_a_sweep_that_is_to_ignore_ctrl_c_goes_on(tmp_path):
    """As in a background job of a shell script, or under nohup."""
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    variables = {"LEANBENCH_DRILL_MARK": str(mark), "LEANBENCH_DRILL_GATE": str(gate)}
    with subprocess.Popen(
        [sys.executable, "-m", "leanbench", *asked("gated", tmp_path), "--no-report"],
        env=environment(**variables),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(mark.exists, "the thirteenth cell")
        process.send_signal(signal.SIGINT)
        gate.touch()
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert len(rows(tmp_path / "r")) == 50
