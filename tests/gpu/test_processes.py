"""Who else is on the GPU, with a pretended NVML."""

from __future__ import annotations

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
    cuda = SimpleNamespace(
        is_initialized=lambda: True, memory_reserved=lambda: 2**21, device_count=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def others(since_us: int = 0) -> list[GpuProcess] | None:
    with Nvml(0) as nvml:
        return nvml.other_processes(since_us)


def test_nobody_else(fake_nvml):
    fake_nvml({"compute_pids": [HERE], "utilisation": [(HERE, 10, 99)]})
    assert others() == []


def test_a_context_is_told_from_work(fake_nvml):
    fake_nvml(
        {
            "compute_pids": [HERE, FURTHER, ELSEWHERE],
            "utilisation": [
                (HERE, 10, 99),
                (ELSEWHERE, 10, 30),
                (ELSEWHERE, 20, 70),
                (ELSEWHERE, 30, 40),
            ],
        }
    )
    assert others() == [GpuProcess(ELSEWHERE, None, 70), GpuProcess(FURTHER, None, 0)]


def test_all_kinds_of_contexts_each_once(fake_nvml):
    fake_nvml(
        {
            "compute_pids": [ELSEWHERE],
            "mps_pids": [ELSEWHERE + 2],
            "graphics_pids": [ELSEWHERE, ELSEWHERE + 1],
        }
    )
    assert [process.pid for process in others() or []] == [ELSEWHERE, ELSEWHERE + 1, ELSEWHERE + 2]


@pytest.mark.parametrize(
    ("since_us", "percent"), [(0, 70), (19, 70), (20, 40), (30, 0), (10**15, 0)]
)
def test_samples_from_before_do_not_count(fake_nvml, since_us, percent):
    fake_nvml(
        {"compute_pids": [ELSEWHERE], "utilisation": [(ELSEWHERE, 20, 70), (ELSEWHERE, 30, 40)]}
    )
    assert others(since_us) == [GpuProcess(ELSEWHERE, None, percent)]


def test_entries_that_were_never_filled_do_not_count(fake_nvml):
    junk = [(ELSEWHERE, 0, 3), (ELSEWHERE, 40, 2_147_483_632), (ELSEWHERE, 50, 101)]
    fake_nvml({"compute_pids": [ELSEWHERE], "utilisation": junk})
    assert others(10) == [GpuProcess(ELSEWHERE, None, 0)]


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
class TestPidsOfAnotherNamespace:
    """In a container the driver may count processes as the host does: this one is among them by
    another pid.
    """

    def test_the_only_stranger_is_this_process(self, fake_nvml):
        fake_nvml({"compute_pids": [ELSEWHERE], "utilisation": [(ELSEWHERE, 10, 99)]})
        assert others() == []

    def test_two_strangers_cannot_be_told_apart(self, fake_nvml):
        fake_nvml({"compute_pids": [ELSEWHERE, FURTHER]})
        assert others() is None

    def test_a_process_of_this_namespace_is_another(self, fake_nvml):
        fake_nvml({"compute_pids": [ELSEWHERE, os.getppid()]})
        assert [process.pid for process in others() or []] == [os.getppid()]

    def test_where_this_process_is_listed_strangers_are_others(self, fake_nvml):
        fake_nvml({"compute_pids": [HERE, ELSEWHERE], "utilisation": [(ELSEWHERE, 10, 5)]})
        assert others() == [GpuProcess(ELSEWHERE, None, 5)]
