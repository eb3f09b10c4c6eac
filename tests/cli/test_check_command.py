"""`leanbench check` in Triton's interpreter."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli.running import printed, refusal
from depth import deep

from leanbench.cli.check import _check_interpreter
from leanbench.core.errors import UserError
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target

H200 = find("h200")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "kernels"


pytestmark = pytest.mark.usefixtures("no_gpu", "same_interpreter")


@pytest.fixture
def same_interpreter(monkeypatch):
    # The command sets it for its worker processes: here it must be as it was, afterwards.
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))


@pytest.fixture
def interpreter():
    try:
        _check_interpreter()
    except UserError as error:
        pytest.skip(str(error))


def test_an_interpreter_that_cannot_work_is_refused(monkeypatch):
    installed = {"triton": "3.6.0", "numpy": "2.5.2"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed[name])
    sentence = r"Triton 3\.6\.0's interpreter does not work with numpy 2\.5\.2: install"
    with pytest.raises(UserError, match=sentence):
        _check_interpreter()
    installed["numpy"] = "2.3.5"
    _check_interpreter()


def command(*folders: Path) -> tuple[list[str], dict[str, str]]:
    """Return the start of a command line and an environment with the kernels of these folders."""
    line = [sys.executable, "-m", "leanbench", "check", "--jobs", "1", "--interpreter"]
    paths = os.pathsep.join(map(str, (FIXTURES, *folders)))
    environment = {"LEANBENCH_KERNEL_PATH": paths, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    return line, os.environ | environment


def check_fixtures(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process with the fixture kernels."""
    line, env = command()
    return subprocess.run([*line, *words], env=env, capture_output=True, text=True, timeout=120)


def table_row(output: str, kernel: str, dtype: str) -> list[str]:
    [line] = [
        line for line in output.splitlines() if re.search(rf"\b{kernel}\b.*\b{dtype}\b.*\d", line)
    ]
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.deep
@pytest.mark.usefixtures("interpreter")
def test_this_projects_kernels_pass():
    output = printed("check", "--limit", "2", "--jobs", "1")
    assert re.search(
        r"^Checking lean, fa2, fixed_split over 2 problems on Triton's interpreter on the CPU,"
        r" kernels [0-9a-f]{12}, settings heuristic, 20\d\d-\d\d-\d\d$",
        output,
        re.MULTILINE,
    )
    assert output.splitlines()[1] == (
        "Of lean, fa2, fixed_split the interpreter runs the Triton kernels alone: the CUDA C++ ones"
        " need a GPU and are skipped"
    )
    assert output.splitlines()[-1] == "all 6 passed"
    assert "FAILED" not in output


def test_libraries_kernels_need_a_gpu(monkeypatch):
    monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require_gpu: Target(H200, 0))
    assert refusal("check", "--kernels", "cudnn,torch_efficient", "--interpreter") == (
        "cudnn, torch_efficient are libraries' kernels and need a GPU: --interpreter does"
        " without; leave them out, or leave --interpreter out"
    )


@pytest.mark.deep
@pytest.mark.usefixtures("interpreter")
def test_kernels_that_torch_has_for_the_cpu_are_checked():
    words = ("--kernels", "torch_math,standard,standard", "--limit", "2", "--jobs", "1")
    assert printed("check", *words).startswith("Checking torch_math, standard over 2 problems")


@pytest.mark.parametrize(
    ("target", "why", "remedy"),
    [
        (Target(H200, 0), "--interpreter does without", "leave --interpreter out"),
        (Target(H200, None, "torch has no CUDA"), "torch has no CUDA", "use a machine with a GPU"),
    ],
)
def test_a_gpu_that_is_left_out_is_named(monkeypatch, target, why, remedy):
    monkeypatch.setattr("leanbench.gpu.local.choose", lambda name, require_gpu: target)
    assert refusal("check", "--kernels", "fa2_cuda", "--interpreter") == (
        f"fa2_cuda is CUDA C++ and needs a GPU: {why}, and Triton's interpreter runs Triton"
        f" kernels alone; check fa2_triton instead, or {remedy}"
    )


@pytest.mark.usefixtures("interpreter")
def test_wrong_kernels_fail_and_the_others_results_are_there():
    done = check_fixtures("--kernels", "wrong,shaky,lazy,broken,picky", "--limit", "3")
    assert done.returncode == 1, done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    for kernel, reason in [
        ("wrong", "relative error [45].* against the fp64 reference is above"),
        ("shaky", "a second run gave other bits"),
        ("lazy", "relative error inf against the fp64 reference is above"),
        ("broken", "raised RuntimeError: out of ideas$"),
    ]:
        start = rf"FAILED {kernel} on b\d.*: {reason}"
        assert len([line for line in failures if re.match(start, line)]) == 3, done.stdout
    # Of the three problems picky supports one.
    assert done.stdout.splitlines()[-1] == "1 of 13 passed"
    assert "picky does not support 2 of the 3 problems." in done.stdout.splitlines()
    assert "wrong does not support" not in done.stdout
    assert table_row(done.stdout, "picky", "fp16")[2] == "1"
    assert table_row(done.stdout, "shaky", "fp16")[-1] == "0 of 3"
    assert table_row(done.stdout, "broken", "fp16")[3] == "inf"


@pytest.mark.deep
@pytest.mark.usefixtures("interpreter")
def test_a_kernel_that_supports_nothing_does_not_pass():
    done = check_fixtures("--kernels", "absent,picky", "--limit", "3")
    assert done.returncode == 1
    # The results of other kernels are printed.
    assert done.stdout.splitlines()[-2:] == [
        "all 1 passed",
        "absent was not checked, it supports none of the 3 problems: leave it out, or raise"
        " --limit",
    ]
    done = check_fixtures("--kernels", "absent", "--fuzz", "1")
    assert done.returncode == 1
    assert "Checking absent over 1 problem on " in done.stdout
    assert done.stdout.splitlines()[1:] == [
        "absent was not checked, it does not support the only problem: leave it out, or raise"
        " --fuzz, or give another --seed"
    ]
    if find_spec("flash_mla") is None:
        done = check_fixtures("--kernels", "absent,flash_mla", "--limit", "1")
        assert done.returncode == 2
        # Before anything is checked.
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith("Error: flash_mla is not installed here (")


def start_check(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command in a new session, so that a signal reaches all its processes like Ctrl-C.

    The kernel `stuck` never returns from its ninth problem.
    """
    (tmp_path / "kernels" / "stuck").mkdir(parents=True)
    (tmp_path / "kernels" / "stuck" / "__init__.py").write_text(
        f"""
import time
from pathlib import Path

from leanbench.core.axes import AXES
from leanbench.kernels.steady import Steady

class Stuck(Steady):
    name = "stuck"
    axes = frozenset(AXES) - {{"parallel"}}

    def prepare(self, inputs, config):
        begun = Path({str(tmp_path)!r}, "begun")
        with begun.open("a") as file:
            file.write("x")
        while len(begun.read_text()) >= 9:
            time.sleep(3600)
        return super().prepare(inputs, config)

KERNELS = [Stuck()]
"""
    )
    line, env = command(tmp_path / "kernels")
    return subprocess.Popen(
        [*line, *words],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Under nohup, or in the background of a shell, children inherit that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.deep
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", [signal.SIGINT, deep(signal.SIGTERM)])
def test_a_signal_prints_what_was_checked(tmp_path, number):
    process = start_check(tmp_path, "--kernels", "stuck")
    while not (tmp_path / "begun").exists() or len((tmp_path / "begun").read_text()) < 9:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, number)
    # Ends once no process holds the pipes: the worker is gone too.
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    stopped = re.fullmatch(
        rf"(\d+) of \d+ problems checked\.\nStopped by {number.name} before it was done\.\n", stderr
    )
    assert stopped is not None, stderr
    # At most two builds' problems wait for the worker: the first one's results are in.
    assert 1 <= int(stopped[1]) < 9
    # It computes nothing.
    assert re.fullmatch(r"0 of [1-8] passed", stdout.splitlines()[-1])
