"""NVML that is missing, old or silent costs a run the columns it cannot fill, no more."""

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest

from leanbench.gpu.nvml import Nvml
from leanbench.gpu.nvml_library import GpuLostError
from leanbench.gpu.visible import local_gpus
from leanbench.measure import ranks
from leanbench.records.environment import (
    environment_key,
    environment_of_several,
    measured_environment,
    predicted_environment,
)
from leanbench.run.worker import Announcer, _attempt

Install = Callable[..., Any]
H200 = {"product": "NVIDIA H200", "uuid": "GPU-aaaa"}
A100 = {"product": "NVIDIA A100-SXM4-80GB", "uuid": "GPU-bbbb"}
#: Everything that a reading of the GPU's state asks.


@pytest.fixture(autouse=True)
def torch_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """torch with the devices (product, UUID) of a call; an A100 and an H200 without one."""

    def install(*devices: tuple[str, str]) -> None:
        gpus = [SimpleNamespace(name=name, uuid=uuid) for name, uuid in devices]
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: gpus[index],
            can_device_access_peer=lambda device, peer: device != peer,
        )
        backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
        torch = SimpleNamespace(cuda=cuda, backends=backends, __version__="2.11.0+cu130")
        monkeypatch.setitem(sys.modules, "torch", torch)

    install(("NVIDIA H200", "aaaa"), ("NVIDIA A100-SXM4-80GB", "bbbb"))
    return install


def gpu_of(environment: dict[str, Any]) -> tuple[Any, ...]:
    assert environment["torch"] == "2.11.0+cu130"
    assert environment["cudnn"] == 91900
    assert environment.keys() >= predicted_environment().keys()
    return environment["driver"], environment["gpu_product"], environment["gpu_uuid"]


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NO_PERMISSION,
        999,
    ],
)
def test_without_nvml_rows_have_no_driver(fake_nvml, monkeypatch, error):
    fake_nvml(H200).init_error = error
    assert gpu_of(measured_environment(0)) == (None, "NVIDIA H200", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_of(measured_environment(1)) == (None, "NVIDIA A100-SXM4-80GB", None)


def test_gpus_are_found_by_their_uuid_or_not_at_all(fake_nvml, torch_here):
    # NVML has the A100 first, as its bus address says, torch the faster H200.
    fake_nvml(A100, H200)
    assert gpu_of(measured_environment(0)) == ("580.65.06", "NVIDIA H200", "GPU-aaaa")
    assert gpu_of(measured_environment(1)) == ("580.65.06", "NVIDIA A100-SXM4-80GB", "GPU-bbbb")
    torch_here(("NVIDIA H200", "eeee"), ("NVIDIA L4", "ffff"))
    fake_nvml(H200)
    assert gpu_of(measured_environment(1)) == (None, "NVIDIA L4", None)


def test_a_mig_instance_is_found_by_its_own_uuid(fake_nvml, torch_here, monkeypatch):
    torch_here(("NVIDIA H200 MIG 1g.18gb", "1111"))
    fake_nvml({**H200, "mig": True}, {"product": "NVIDIA H200 MIG 1g.18gb", "uuid": "MIG-1111"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111")
    (visible,) = local_gpus()
    assert visible.mig
    assert gpu_of(measured_environment(0)) == ("580.65.06", "NVIDIA H200 MIG 1g.18gb", "MIG-1111")


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_a_gpu_that_disappears_ends_its_worker_with_one_row(fake_nvml, error):
    """The next worker does not start then, and the sweep stops with what it has."""
    gpu = fake_nvml(H200).gpus[0]

    def run_problem(*arguments: Any) -> Any:
        with Nvml("GPU-aaaa") as nvml:
            gpu.errors["nvmlDeviceGetClockInfo"] = error
            return nvml.state()

    request: dict[str, Any] = {"kernels": ["lean", "fa2"], "configs": "default", "overrides": {}}
    request["problem"] = {"batch": 1, "q_heads": 8, "kv_heads": 8, "context": 1024, "head_dim": 64}
    announce = Announcer(cast("Connection", SimpleNamespace(send_bytes=lambda data: None)))
    announce("lean")
    rows, usable = _attempt(run_problem, request, announce)
    assert list(rows) == ["lean"]
    assert rows["lean"]["status"] == "crashed"
    assert rows["lean"]["reason"].startswith("GpuLostError: the GPU no longer answers: reset it")
    assert not usable
    with pytest.raises(GpuLostError), Nvml("GPU-aaaa") as nvml:
        nvml.state()


def test_the_gpus_of_ranks_and_their_links(fake_nvml, monkeypatch):
    """NVML has the A100 first, as its bus address says, torch the faster H200."""
    nvml = fake_nvml(A100, H200)
    status: dict[str, Callable[..., Any]] = {
        "nvmlDeviceGetP2PStatus": lambda first, second, capability: (
            # Of peer access it knows nothing, CUDA does.
            pynvml.NVML_P2P_STATUS_OK
            if capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            else pynvml.NVML_P2P_STATUS_UNKNOWN
        ),
        "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < 12),
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: None,
    }
    for name, function in status.items():
        monkeypatch.setattr(pynvml, name, function)
    pair = {"first": 0, "second": 1, "peer_access": True, "nvlink": True, "nvlinks": 12}
    several = environment_of_several([1, 0])
    assert several == {
        "gpu_products": ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"],
        "gpu_uuids": ["GPU-bbbb", "GPU-aaaa"],
        "gpu_links": [pair | {"gb_s": pytest.approx(318.744)}],
    }
    alone = measured_environment(0)
    assert environment_key(alone) == environment_key(dict(reversed(alone.items())))
    assert environment_key(alone) != environment_key(alone | several)
    assert ranks.environment_of_ranks(2, 1) == several
    assert ranks.environment_of_ranks(8, 1) == several
    assert ranks.environment_of_ranks(1, 1) == {}
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    unknown = environment_of_several([0, 1])
    assert unknown.pop("gpu_products") == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]
    assert unknown == {"gpu_uuids": [None, None], "gpu_links": None}
