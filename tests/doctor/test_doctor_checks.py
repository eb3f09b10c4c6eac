"""Which checks run where, and what their exceptions become."""

from __future__ import annotations

import pytest

from leanbench.core.errors import UserError
from leanbench.core.registry import kernels
from leanbench.doctor import checks, software
from leanbench.doctor.checks import Check, examine, run_check
from leanbench.doctor.machine import Machine, ok
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.gpu.nvml_library import NvmlError
from leanbench.run.cells import DEFAULT_KERNELS


@pytest.fixture
def harmless(monkeypatch):
    """Replace every check by one that passes."""
    real = checks.checks

    def named(machine):
        return [
            Check(check.name, lambda machine: ok("fine"), check.needs, check.slow, check.deep)
            for check in real(machine)
        ]

    monkeypatch.setattr(checks, "checks", named)
    monkeypatch.setattr(checks, "find_spec", lambda module: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def names(machine: Machine, quick: bool = False) -> list[str]:
    return [name for name, _ in examine(machine, quick, lambda what: None)]


SOFTWARE = ["leanbench", "python", "torch", "triton", "environment", "gpu"]
STATE = ["driver", "memory", "mig", "links", "processes", "clocks", "throttling"]
ALWAYS = ["libraries", "triton cache", "runs"]
MAIN = ["kernel fa2", "kernel fixed_split", "kernel lean"]
KERNELS = [f"kernel {name}" for name in kernels() if name != "reference"]


@pytest.mark.usefixtures("harmless")
def test_on_a_gpu_the_kernels_of_a_default_sweep_are_checked_and_in_depth_all(machine):
    assert sorted(name for name in names(machine) if name.startswith("kernel ")) == MAIN
    assert [name for name in names(machine) if not name.startswith("kernel ")] == [
        *SOFTWARE,
        *STATE,
        *["energy", "events", "timer", "bandwidth", "noise", "counters"],
        *ALWAYS,
    ]
    machine.deep = True
    measured = ["energy", "events", "timer", *KERNELS, "bandwidth", "noise", "counters"]
    assert len(KERNELS) > 20
    assert names(machine) == [*SOFTWARE, *STATE, *measured, *ALWAYS]


@pytest.mark.parametrize("installed", [(), ("flashinfer", "cudnn"), tuple(software.LIBRARIES)])
def test_missing_libraries_share_one_line(machine, monkeypatch, installed):
    monkeypatch.setattr(checks, "find_spec", lambda module: module in installed or None)
    listed = checks.checks(machine)
    named = [check.name for check in listed if check.name in software.LIBRARIES]
    assert named == [module for module in software.LIBRARIES if module in installed]
    [check] = [check for check in listed if check.name == "libraries"]
    missing = [name for module, name in software.LIBRARIES.items() if module not in installed]
    finding = run_check(check, machine)
    assert finding.values == {"missing": missing}
    assert finding.status == ("note" if missing else "ok")


def test_every_library_that_a_kernel_wraps_is_looked_for():
    wrapped = {getattr(kernel, "distribution", "torch") for kernel in kernels().values()}
    assert wrapped - {"torch"} == {*software.LIBRARIES.values()}


def test_the_kernels_that_are_always_checked_are_those_of_a_sweep_that_names_none():
    assert checks.MAIN_KERNELS == DEFAULT_KERNELS


@pytest.mark.usefixtures("harmless")
def test_quick_leaves_out_what_takes_seconds(machine):
    progress: list[str] = []
    names = [name for name, _ in examine(machine, True, progress.append)]
    assert [name for name in names if name not in ALWAYS] == [
        *SOFTWARE,
        *STATE,
        "events",
        "counters",
    ]
    assert progress == []


@pytest.mark.usefixtures("harmless")
def test_what_takes_seconds_is_announced(machine):
    progress: list[str] = []
    machine.deep = True
    for name, _ in examine(machine, False, progress.append):
        if name == "energy":
            assert progress == ["watching the energy counter of the idle GPU (2 s)"]
    assert "compiling and checking lean" in progress
    assert "reading hardware counters for a try (half a minute)" in progress


@pytest.mark.usefixtures("harmless")
def test_without_a_gpu(machine):
    machine.gpus = []
    machine.device_index = None
    assert names(machine) == [*SOFTWARE, *ALWAYS]


@pytest.mark.usefixtures("harmless")
def test_with_a_gpu_that_torch_cannot_use(machine):
    machine.device_index = None
    assert names(machine) == [*SOFTWARE, *STATE, "energy", *ALWAYS]


@pytest.mark.usefixtures("harmless")
def test_the_interpreter_is_not_measured(machine, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not {"bandwidth", "noise", "kernel lean"} & set(names(machine))


def test_a_user_error_is_a_problem_with_its_sentence(machine):
    def check(machine):
        raise UserError("the GPU no longer answers: reboot")

    finding = run_check(Check("clocks", check), machine)
    assert (finding.status, finding.text) == ("problem", "the GPU no longer answers: reboot")


def test_an_exception_is_a_finding_and_not_the_end(machine, monkeypatch):
    def broken(machine):
        raise RuntimeError(
            "CUDA error: out of luck\nCUDA kernel errors might be reported elsewhere"
        )

    def silent(machine):
        raise KeyError

    listed = [
        Check("one", broken),
        Check("two", silent),
        Check("three", lambda machine: ok("fine")),
    ]
    monkeypatch.setattr(checks, "checks", lambda machine: listed)
    findings = dict(examine(machine, False, lambda what: None))
    assert findings["one"].status == "problem"
    assert findings["one"].text == "this check failed: RuntimeError: CUDA error: out of luck"
    assert findings["two"].text == "this check failed: KeyError"
    assert findings["three"] == ok("fine")


def test_a_broken_driver_is_one_problem(monkeypatch):
    def broken():
        raise NvmlError(
            "the NVIDIA driver was updated while its kernel module kept running: reboot"
        )

    monkeypatch.setattr("leanbench.doctor.machine.local_gpus", broken)
    findings = dict(examine(Machine(), True, lambda what: None))
    assert findings["gpu"].status == "problem"
    assert findings["gpu"].text.endswith("kept running: reboot")
    assert findings["torch"].status == "ok"
    assert not set(STATE) & set(findings)


def test_a_torch_that_fails_to_start_is_one_problem(machine, monkeypatch):
    def broken(gpu_name, require_gpu):
        raise RuntimeError("CUDA driver initialization failed")

    def gone():
        raise NvmlError("the GPU is gone")

    monkeypatch.setattr("leanbench.doctor.machine.choose", broken)
    gpus = machine.gpus
    machine = Machine(machine.runs)
    machine.gpus = gpus
    monkeypatch.setattr(machine, "nvml", gone)
    findings = dict(examine(machine, True, lambda what: None))
    assert (
        findings["torch"].text
        == "this check failed: RuntimeError: CUDA driver initialization failed"
    )
    assert findings["gpu"].status == "ok"
    assert findings["memory"].status == "ok"
    assert findings["clocks"].text == "the GPU is gone"
    assert "events" not in findings


def test_the_gpu_is_the_one_that_torch_means(monkeypatch, machine):
    import torch

    first = machine.gpus[0]
    second = type(first)(1, "NVIDIA A2", "GPU-bbbb", None, None, "580", (8, 6), False)
    properties = type("Properties", (), {"uuid": "bbbb"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    examined = Machine()
    examined.gpus = [first, second]
    examined.target = Target(find("h200"), 0)
    assert examined.gpu is second
