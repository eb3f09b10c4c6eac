"""Who else is on the GPU, with a pretended NVML."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from leanbench.gpu.nvml import GpuProcess, Nvml

Install = Callable[..., Any]
HERE = os.getpid()
#: Above the highest pid that Linux gives out.
ELSEWHERE = 2**22 + 1
FURTHER = ELSEWHERE + 1


@pytest.fixture
def runs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch holds memory of a GPU in this process."""
    torch: Any = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda: 2**21)
    torch.device_count = lambda: 0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch))


def others(since_us: int = 0) -> list[GpuProcess] | None:
    with Nvml(0) as nvml:
        return nvml.other_processes(since_us)


def test_contexts_of_all_kinds_and_work(fake_nvml):
    used = [(HERE, 10, 99), *((ELSEWHERE, at, use) for at, use in ((1, 30), (2, 70), (3, 40)))]
    fake_nvml({"compute_pids": [HERE, FURTHER, ELSEWHERE], "utilisation": used})
    assert others() == [GpuProcess(ELSEWHERE, None, 70), GpuProcess(FURTHER, None, 0)]
    last = ELSEWHERE + 2
    fake_nvml(
        {"compute_pids": [ELSEWHERE], "mps_pids": [last], "graphics_pids": [ELSEWHERE, FURTHER]}
    )
    assert [process.pid for process in others() or []] == [ELSEWHERE, FURTHER, last]


#: Entries that were never filled.
JUNK = [(ELSEWHERE, 0, 3), (ELSEWHERE, 40, 2_147_483_632), (ELSEWHERE, 50, 101)]


@pytest.mark.parametrize(
    ("since_us", "percent"), [(0, 70), (19, 70), (20, 40), (30, 0), (10**15, 0)]
)
def test_samples_from_before_do_not_count(fake_nvml, since_us, percent):
    used = [(ELSEWHERE, 20, 70), (ELSEWHERE, 30, 40), *JUNK]
    fake_nvml({"compute_pids": [ELSEWHERE], "utilisation": used})
    assert others(since_us) == [GpuProcess(ELSEWHERE, None, percent)]


@pytest.mark.parametrize(
    ("error", "percent"),
    [
        (pynvml.NVML_ERROR_NOT_FOUND, 0),
        (pynvml.NVML_SUCCESS, 0),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, None),
        (pynvml.NVML_ERROR_NO_PERMISSION, None),
    ],
)
def test_no_samples_and_no_such_call(fake_nvml, error, percent):
    fake_nvml({"compute_pids": [ELSEWHERE], "errors": {"nvmlDeviceGetProcessUtilization": error}})
    assert others() == [GpuProcess(ELSEWHERE, None, percent)]


def test_a_driver_that_does_not_list_processes(fake_nvml, monkeypatch):
    gpu = fake_nvml({"compute_pids": [ELSEWHERE]}).gpus[0]
    gpu.errors["nvmlDeviceGetGraphicsRunningProcesses"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert others() == [GpuProcess(ELSEWHERE, None, 0)]
    gpu.errors["nvmlDeviceGetComputeRunningProcesses"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert others() is None

    def too_old(gpu: Any) -> None:
        raise pynvml.NVMLLibraryMismatchError("too old")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", too_old)
    assert others() is None


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("/usr/bin/python3.12", "python3.12"),
        ("python", "python"),
        ("/opt/vllm/bin/vllm serve --model x/y", "vllm"),
        ("", None),
        (" ", None),
    ],
)
def test_names(fake_nvml, raw, name):
    fake_nvml({"compute_pids": [ELSEWHERE]}).process_names[ELSEWHERE] = raw
    assert others() == [GpuProcess(ELSEWHERE, name, 0)]


def test_name_from_proc(fake_nvml):
    parent = os.getppid()
    with open(f"/proc/{parent}/comm") as file:
        comm = file.read().split()[0]
    fake_nvml({"compute_pids": [HERE, parent]})
    assert others() == [GpuProcess(parent, comm.rsplit("/", 1)[-1], 0)]


@pytest.mark.usefixtures("runs_cuda")
@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        # The only stranger is this process; two cannot be told apart.
        ([ELSEWHERE], []),
        ([ELSEWHERE, FURTHER], None),
        # A process of this namespace is another one; where this one is listed, strangers are.
        ([ELSEWHERE, os.getppid()], [os.getppid()]),
        ([HERE, ELSEWHERE], [ELSEWHERE]),
        ([HERE], []),
    ],
)
def test_pids_of_another_namespace(fake_nvml, pids, expected):
    """In a container the driver may list this process by the host's pid."""
    fake_nvml({"compute_pids": pids, "utilisation": [(pids[-1], 10, 5)]})
    found = others()
    assert expected == (None if found is None else [process.pid for process in found])
