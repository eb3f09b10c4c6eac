"""Which checks run where, and what their exceptions become."""

from collections.abc import Callable
from typing import Any

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
        fields = ("name", "needs", "slow", "deep")
        real_checks = [[getattr(check, field) for field in fields] for check in real(machine)]
        return [Check(name, lambda machine: ok("fine"), *more) for name, *more in real_checks]

    monkeypatch.setattr(checks, "checks", named)
    monkeypatch.setattr(checks, "find_spec", lambda module: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def names(machine: Machine, quick: bool = False) -> list[str]:
    return [name for name, _ in examine(machine, quick, lambda what: None)]


SOFTWARE = ["leanbench", "python", "torch", "triton", "calls", "environment", "gpu"]
STATE = ["driver", "memory", "mig", "links", "processes", "clocks", "throttling"]
ALWAYS = ["libraries", "triton cache", "runs"]
MAIN = ["kernel fa2", "kernel fixed_split", "kernel lean"]
KERNELS = [f"kernel {name}" for name in kernels() if name != "reference"]


@pytest.mark.usefixtures("harmless")
def test_on_a_gpu_the_kernels_of_a_default_sweep_are_checked_and_in_depth_all(machine):
    shown = names(machine)
    assert sorted(name for name in shown if name.startswith("kernel ")) == MAIN
    measured = ["energy", "events", "timer", "bandwidth", "noise", "counters"]
    others = [name for name in shown if not name.startswith("kernel ")]
    assert others == [*SOFTWARE, *STATE, *measured, *ALWAYS]
    machine.deep = True
    measured = ["energy", "events", "timer", *KERNELS, "bandwidth", "noise", "spread", "counters"]
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


def test_every_library_and_every_default_kernel_is_looked_at():
    wrapped = {getattr(kernel, "distribution", "torch") for kernel in kernels().values()}
    assert wrapped - {"torch"} == {*software.LIBRARIES.values()}
    assert checks.MAIN_KERNELS == DEFAULT_KERNELS


@pytest.mark.usefixtures("harmless")
def test_quick_leaves_out_what_takes_seconds(machine):
    progress: list[str] = []
    names = [name for name, _ in examine(machine, True, progress.append)]
    quick = [name for name in names if name not in ALWAYS]
    assert quick == [*SOFTWARE, *STATE, "events", "counters"]
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
def test_without_a_gpu_and_with_one_that_torch_cannot_use(machine):
    machine.device_index = None
    assert names(machine) == [*SOFTWARE, *STATE, "energy", *ALWAYS]
    machine.gpus = []
    assert names(machine) == [*SOFTWARE, *ALWAYS]


@pytest.mark.usefixtures("harmless")
def test_the_interpreter_is_not_measured(machine, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not {"bandwidth", "noise", "kernel lean"} & set(names(machine))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


def test_an_exception_is_a_finding_and_not_the_end(machine, monkeypatch):
    lost = UserError("the GPU no longer answers: reboot")
    of_cuda = "CUDA error: out of luck\nCUDA kernel errors might be reported elsewhere"
    listed = [
        Check("clocks", raising(lost)),
        Check("one", raising(RuntimeError(of_cuda))),
        Check("two", raising(KeyError())),
        Check("three", lambda machine: ok("fine")),
    ]
    monkeypatch.setattr(checks, "checks", lambda machine: listed)
    findings = dict(examine(machine, False, lambda what: None))
    # A user error is a problem with its sentence.
    assert (findings["clocks"].status, findings["clocks"].text) == ("problem", str(lost))
    assert findings["one"].status == "problem"
    assert findings["one"].text == "this check failed: RuntimeError: CUDA error: out of luck"
    assert findings["two"].text == "this check failed: KeyError"
    assert findings["three"] == ok("fine")


def test_a_broken_driver_is_one_problem(monkeypatch):
    updated = "the NVIDIA driver was updated while its kernel module kept running: reboot"
    monkeypatch.setattr("leanbench.doctor.machine.local_gpus", raising(NvmlError(updated)))
    findings = dict(examine(Machine(), True, lambda what: None))
    assert findings["gpu"].status == "problem"
    assert findings["gpu"].text.endswith("kept running: reboot")
    assert findings["torch"].status == "ok"
    assert not set(STATE) & set(findings)


def test_a_torch_that_fails_to_start_is_one_problem(machine, monkeypatch):
    failed = RuntimeError("CUDA driver initialization failed")
    monkeypatch.setattr("leanbench.doctor.machine.choose", raising(failed))
    gpus = machine.gpus
    machine = Machine(machine.runs)
    machine.gpus = gpus
    monkeypatch.setattr(machine, "nvml", raising(NvmlError("the GPU is gone")))
    findings = dict(examine(machine, True, lambda what: None))
    assert findings["torch"].text == f"this check failed: RuntimeError: {failed}"
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
