"""`leanbench doctor` on a machine without a GPU, and what becomes of its findings."""

import json
import sys

import pytest
from cli.running import invoke as invoke_any
from typer.testing import Result

from leanbench.doctor.machine import note, ok, problem

FOLDER = ("runs", problem("cannot be written", "--out"))
SLOW = ("environment", problem("X=[1] makes it slow", "unset X"))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("leanbench.doctor.machine.local_gpus", list)
    monkeypatch.setattr("leanbench.doctor.gpu.why_no_gpu", lambda: "the NVIDIA driver finds no GPU")


@pytest.fixture
def findings(monkeypatch):
    """Call with what the checks shall find."""

    def install(*results):
        def examine(machine, quick, announce):
            announce("looking")
            yield from results

        monkeypatch.setattr("leanbench.doctor.checks.examine", examine)
        monkeypatch.setattr("leanbench.doctor.machine.Machine.can_launch", True)

    return install


def invoke(*words: str) -> Result:
    return invoke_any("doctor", *words)


def closing(*words: str) -> tuple[int, str]:
    """Return the exit code and the last line."""
    result = invoke(*words)
    return result.exit_code, result.stdout.splitlines()[-1]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path):
    result = invoke("--out", str(tmp_path / "runs"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    [line] = [line for line in lines if line.startswith("gpu ")]
    assert line.rstrip().split(maxsplit=2)[1:] == [
        "note",
        "the NVIDIA driver finds no GPU; sweeps predict with the performance model, nothing is"
        " measured",
    ]
    assert any(line.startswith("runs ") and str(tmp_path / "runs") in line for line in lines)
    assert lines[-1].startswith("no problems, ")
    assert lines[-1].endswith(": nothing can be measured here, sweeps predict.")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_gpu")
def test_json_of_a_machine_without_a_gpu():
    result = invoke("--json", "--quick")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["can_measure"] is False
    by_name = {finding["check"]: finding for finding in content["findings"]}
    assert by_name["gpu"]["values"] == {"gpus": 0}
    assert by_name["python"]["values"]["python"] == ".".join(map(str, sys.version_info[:3]))
    keys = {"check", "status", "text", "fix", "values"}
    assert all({*finding} == keys for finding in content["findings"])


def test_a_problem_is_shown_with_its_fix_and_exits_with_1(findings):
    findings(("torch", ok("torch 9")), SLOW, ("mig", note("half a GPU")))
    result = invoke()
    assert result.exit_code == 1
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("environment"))
    assert lines[at].split(maxsplit=2) == ["environment", "problem", "X=[1] makes it slow"]
    assert lines[at + 1].strip() == "-> unset X"
    assert lines[-1] == (
        "1 problem, 1 note: solve the problems before you trust a figure of this machine."
    )
    assert result.stderr == "looking...\n"
    assert invoke("--json").exit_code == 1


def test_a_folder_alone_says_nothing_about_figures(findings):
    findings(("torch", ok("torch 9")), FOLDER)
    before = "solve the problems before you"
    assert closing() == (1, f"1 problem, no notes: {before} sweep here.")
    findings(FOLDER, SLOW)
    assert closing() == (1, f"2 problems, no notes: {before} trust a figure of this machine.")


def test_a_machine_that_can_measure(findings):
    mig = note("half a GPU", "buy another", mig=True)
    findings(("torch", ok("torch 9", torch="9")), ("mig", mig))
    said = "no problems, 1 note: this machine can measure."
    assert closing() == (0, f"{said} --deep looks at every kernel, library and counter.")
    assert closing("--deep") == (0, said)
    result = invoke("--json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["can_measure"] is True
    assert [" ".join(map(str, finding.values())) for finding in content["findings"]] == [
        "torch ok torch 9 None {'torch': '9'}",
        "mig note half a GPU buy another {'mig': True}",
    ]


@pytest.mark.parametrize(
    ("words", "quick", "deep"),
    [((), False, False), (("--deep",), False, True), (("--quick",), True, False)],
)
def test_options_reach_the_checks(monkeypatch, tmp_path, words, quick, deep):
    calls = []

    def examine(machine, quick, announce):
        calls.append((machine.runs, machine.deep, quick))
        return ()

    monkeypatch.setattr("leanbench.doctor.checks.examine", examine)
    monkeypatch.setattr("leanbench.doctor.machine.Machine.can_launch", False)
    assert invoke(*words, "--out", str(tmp_path)).exit_code == 0
    assert calls == [(tmp_path, deep, quick)]
