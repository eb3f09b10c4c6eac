"""Commands of the gate end with all their children, at their limit and with the gate."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_within

GATE = (
    "import sys; from pathlib import Path; from processes import end_together, run_within\n"
    "end_together(); run_within(60, sys.argv[1:], Path('.'), {})"
)


def test_a_command_has_its_folder_and_environment(tmp_path):
    words = [sys.executable, "-c", "import os; print(os.getcwd(), os.environ['OWN']); os._exit(3)"]
    code, output, _ = run_within(60, words, tmp_path, {"OWN": "mine"})
    assert (code, output) == (3, f"{tmp_path} mine\n")
    code, output, _ = run_within(1, ["no-such-program"], tmp_path, {})
    assert (code, output) == (127, "no-such-program is not here: put it on the PATH")


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Return a program and the reading end of a pipe, which the program's child holds open."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    endless = f"import time; pipe = open({str(path)!r}, 'wb', 0); pipe.write(b'x'); time.sleep(60)"
    yield f"import subprocess, sys; subprocess.run([sys.executable, '-c', {endless!r}])", reading
    os.close(reading)


def test_nothing_outlives_the_limit(tmp_path, mark):
    """A gate within a gate leaves nothing behind either."""
    program, pipe = mark
    words = [sys.executable, "-c", GATE, sys.executable, "-c", program]
    own = {"PYTHONPATH": str(Path(__file__).parent)}
    assert run_within(2, words, tmp_path, own)[:2] == (None, "")
    assert_ended(pipe)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_gate(mark, number):
    program, pipe = mark
    gate = subprocess.Popen(
        [sys.executable, "-c", GATE, sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    select.select([pipe], [], [])
    gate.send_signal(number)
    assert gate.wait() == 128 + number
    assert_ended(pipe)


def assert_ended(pipe: int) -> None:
    """Check that all writers are gone. Reading would be an error if there had been none."""
    assert os.read(pipe, 1) == b"x"
    while select.select([pipe], [], [], 30)[0]:
        if os.read(pipe, 1) == b"":
            return
    raise AssertionError("somebody still has the pipe")
