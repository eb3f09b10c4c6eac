"""What all commands share: flags, completion, and output in any encoding."""

import errno
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, get_args

import pytest
import typer
from cli.running import invoke, printed
from typer.models import ArgumentInfo, OptionInfo
from typer.testing import CliRunner

from leanbench.__main__ import main as run_main
from leanbench.cli.main import app


def commands(group: typer.Typer) -> Iterator[Any]:
    yield from (command.callback for command in group.registered_commands)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from commands(inner.typer_instance)


def parameters() -> Iterator[tuple[str, str, Any, Any]]:
    """Generate (command, parameter, what Typer knows of it, type)."""
    for command in commands(app):
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            for info in get_args(parameter.annotation):
                yield command.__name__, name, info, parameter.annotation


def test_every_flag_is_spelled_out():
    """Typer 0.27.0 to 0.27.3 lose an option with a metavar and without an explicit flag."""
    options = [each for each in parameters() if isinstance(each[2], OptionInfo)]
    assert len(options) > 60
    # Inside Annotated, the first of the flags stands where a default would.
    unspelt = [
        (command, name)
        for command, name, info, _ in options
        if not str(info.default).startswith("-") and not info.param_decls
    ]
    assert unspelt == []


def test_every_value_has_a_word_in_the_help():
    metavars = {
        (command, name): info.metavar
        for command, name, info, annotation in parameters()
        if isinstance(info, OptionInfo | ArgumentInfo) and bool not in get_args(annotation)
    }
    assert len(metavars) > 60
    assert [where for where, metavar in metavars.items() if not metavar] == []
    # Typer adds dots to a repeatable argument.
    assert "RUN..." not in metavars.values()


def completed(words: str) -> list[str]:
    """Return what bash offers at the end of the words."""
    count = len(words.split(" ")) - 1
    env = {"COMP_WORDS": words, "COMP_CWORD": str(count)}
    env["_LEANBENCH_COMPLETE"] = "complete_bash"
    return CliRunner().invoke(app, [], prog_name="leanbench", env=env).stdout.split()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("leanbench sweep paper-fig7", ["paper-fig7a", "paper-fig7b", "paper-fig7c"]),
        ("leanbench sweep --kernels lean,fa2_", ["lean,fa2_triton", "lean,fa2_cuda"]),
        ("leanbench check --kernels lean_t", ["lean_triton"]),
        ("leanbench sweep --gpu rtx", ["rtx-4090", "rtx-5090", "rtx-pro-6000"]),
        ("leanbench sweep --model llama-3-8b,llama-3-7", ["llama-3-8b,llama-3-70b"]),
        ("leanbench list g", ["gpus"]),
        ("leanbench report par", ["part", "party"]),
        ("leanbench compare part part", ["part", "party"]),
        ("leanbench rep", ["report"]),
    ],
)
def test_names_are_completed(words, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("part", "party", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "manifest.json").write_text("{}")
    (tmp_path / "runs" / "partial").mkdir()
    assert completed(words) == names


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--help", "List kernels, sweeps, axes, quantities, lengths, models or GPUs."),
        ("--help", "--install-completion"),
        ("report --help", "report [OPTIONS] RUN... "),
        ("sweep --help", "of least energy times latency. [default: (default, or FILE's)]"),
        ("predict show --help", "[default: (the GPU that is here, or else h200)]"),
        ("predict claims --help", "[default: a100-80gb]"),
    ],
)
def test_help_says_what_there_is(command, words):
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert words in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("error", "name", "code"),
    [(KeyboardInterrupt(), "SIGINT", 130), (KeyboardInterrupt(signal.SIGTERM), "SIGTERM", 143)],
)
def test_a_command_that_was_interrupted_says_so(monkeypatch, error, name, code):
    def interrupted(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("leanbench.cli.check._run", interrupted)
    # What --interpreter sets is put back.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = invoke("check", "--interpreter", "--limit", "1")
    assert result.exit_code == code
    assert result.stdout.startswith("Checking lean, fa2, fixed_split over 1 problem ")
    assert result.stderr == f"Stopped by {name} before it was done.\n"


def test_an_interrupt_of_the_imports_leaves_no_traceback(monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leanbench.cli.main.main", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    with pytest.raises(SystemExit) as ended:
        run_main()
    assert ended.value.code == 130


#: Too long for every file system.
LONG = "a" * 300


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    words = f"sweep --context 1k --gpu h200 --no-report -q --name run --out {out}"
    printed(*words.split())
    return out / "run"


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"sweep --context 1k --gpu h200 --out {LONG}{more}"
            for more in ("", " --name r", " --resume", " --name r --resume")
        ),
        *(f"sweep {LONG}", f"report {LONG}", f"report run --out {LONG}"),
        *(f"merge {LONG} --out both", f"merge run --out {LONG}", f"merge run --out {LONG}/both"),
        # Until it is whole, a run has a longer name.
        f"merge run --out {'a' * 253}",
        *(f"compare {LONG} run", f"compare run {LONG}:lean"),
    ],
)
def test_a_name_that_is_too_long_is_a_sentence(one_run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(one_run, "run")
    Path("runs").mkdir()
    result = invoke(*words.split())
    assert result.exit_code == 2, result.output
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "ile name too long): " in error
    assert ".part" not in error
    assert {path.name for path in tmp_path.iterdir()} == {"run", "runs"}
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["report closed", "merge closed --out both", "compare closed run", "sweep --out closed/in"],
)
def test_a_folder_that_may_not_be_looked_into_is_a_sentence(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path.parts[:1] == ("closed",):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    result = invoke(*words.split())
    assert result.exit_code == 2, result.output
    [error] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    cannot = r"Error: cannot (open or write|read) closed.* \(Permission denied\): c.+"
    assert re.fullmatch(cannot, error)


#: Runs commands in one process; an exit code for each.
DRIVER = """
import sys
from leanbench.__main__ import main
for command in sys.argv[1:]:
    sys.argv = ["leanbench", *command.split()]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code or 0)
"""


@pytest.mark.deep
def test_commands_print_in_an_ascii_locale(tmp_path):
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    commands = [
        *("list gpus", "list kernels", "list sweeps"),
        "sweep --context 1k --kernels lean,fa2 --gpu h100",
        "sweep --context 1k --kernels lean --gpu h100 --dry-run",
        "trace h8 n1k d64 --gpu h100",
        *("predict show", "configs list"),
    ]
    words = [sys.executable, "-c", DRIVER, *commands]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True)
    assert done.stdout.count(b"exit code 0") == len(commands), done.stdout + done.stderr
    assert (done.stdout + done.stderr).isascii()
    assert b"?s" in done.stdout


@pytest.mark.parametrize(("stream", "code"), [("1", 0), ("2 --nope", 2)])
def test_a_closed_stream_is_no_traceback(stream, code):
    words = f'"$0" -m leanbench list gpus {stream[1:]} {stream[0]}>&-'
    done = subprocess.run(["sh", "-c", words, sys.executable], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr


def written_to(stdout: IO[str], command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "leanbench", *command.split()]
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.deep
@pytest.mark.parametrize("command", ["sweep --help", "list kernels"])
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word(command):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = written_to(nobody, command)
    # 1 says that something is wrong or slower.
    assert done.returncode == 128 + signal.SIGPIPE
    assert [line for line in done.stderr.splitlines() if not line.startswith("No GPU here")] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_help_that_cannot_be_written_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        done = written_to(full, "--help")
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert re.fullmatch(r"Error: .* the output \(No space left on device\): .+", message)
