import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from leanbench.doctor.checks import examine
from leanbench.doctor.machine import Machine
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.gpu.nvml import GpuLimits, GpuState, Nvml
from leanbench.gpu.nvml_library import (
    GpuLostError,
    GpuNotFoundError,
    NvmlError,
    NvmlUnavailableError,
)
from leanbench.gpu.visible import local_gpus, why_no_gpu, why_silent

Install = Callable[..., Any]
A = {"uuid": "GPU-aaaa0000-0000-0000-0000-000000000000", "product": "NVIDIA H200"}
B = {
    "uuid": "GPU-bbbb0000-0000-0000-0000-000000000000",
    "product": "NVIDIA A100-SXM4-80GB",
    "compute_capability": (8, 0),
}
WARM_B = {**B, "temperature_c": 77}


def test_local_gpus_and_none_behind_the_driver(fake_nvml):
    fake = fake_nvml(A, B)
    first, second = local_gpus()
    assert (first.index, first.product, first.uuid) == (0, "NVIDIA H200", A["uuid"])
    assert (first.memory_total_bytes, first.memory_free_bytes) == (150_754_820_096, 150_000_000_000)
    assert (first.driver_version, first.compute_capability) == ("580.65.06", (9, 0))
    assert not first.mig
    assert (second.index, second.product) == (1, "NVIDIA A100-SXM4-80GB")
    assert second.compute_capability == (8, 0)
    assert fake.open == 0
    assert why_no_gpu() is None
    fake_nvml()
    assert local_gpus() == []
    assert (why_no_gpu(), why_silent()) == ("the NVIDIA driver finds no GPU", None)


#: UUIDs of eight GPUs; two begin alike.
UUIDS = [f"GPU-{start}-a134-0fdd" for start in "9942 9e8d e429 eee1 bbcd 472e e562 1c20".split()]


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        # Numbers end at the first character that is none.
        ("1gpu2,2ampere", [1, 2]),
        ("1x", [1]),
        (" 2, +3,-0 , 5", [2, 3, 0, 5]),
        # The first entry that names no GPU ends the list.
        ("0,1,2,-1,3", [0, 1, 2]),
        ("0,8,1", [0]),
        ("4,3,two,one", [4, 3]),
        ("one,2", []),
        ("-1", []),
        ("", []),
        (",0", []),
        ("NoDevFiles", []),
        # A repeated GPU empties it.
        ("0,0", []),
        ("0,1,2,1", []),
        ("0,00", []),
        ("0,-1,0", [0]),
        # UUIDs may be abbreviated; numbers do not stand among them, nor the other way round.
        ("GPU-9942,GPU-9e8d", [0, 1]),
        ("GPU-1,GPU-47", [7, 5]),
        (UUIDS[6], [6]),
        ("GPU-bbcd,2", [4]),
        ("2,GPU-bbcd", [2]),
        ("GPU-9,GPU-bbcd", []),
        ("GPU-bbcd,GPU-9", [4]),
        ("GPU-bbcd,GPU-ffff,GPU-472e", [4]),
        ("GPU-", []),
        ("GPU-bbcd,GPU-bbcd", []),
        ("GPU-bbcd,GPU-bb", []),
    ],
)
def test_cuda_visible_devices(fake_nvml, monkeypatch, visible, numbers):
    fake_nvml(*({"uuid": uuid} for uuid in UUIDS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(gpu.index, gpu.uuid) for gpu in local_gpus()] == list(
        enumerate(UUIDS[number] for number in numbers)
    )
    reason = why_no_gpu()
    assert (reason is None) is bool(numbers)
    if reason is not None:
        assert reason.startswith(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
        twice = ("0,0", "0,1,2,1", "0,00", "GPU-bbcd,GPU-bbcd", "GPU-bbcd,GPU-bb")
        assert ("names one twice" in reason) is (visible in twice)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("MIG-1111", ["MIG-1111"]),
        ("MIG-1111,MIG-2222", ["MIG-1111"]),  # CUDA opens one
        ("MIG-1111,MIG-1111", []),
        ("MIG-3333", []),
        ("MIG-11", []),
    ],
)
def test_mig_instances_in_cuda_visible_devices(fake_nvml, monkeypatch, visible, uuids):
    fake_nvml(A, {"uuid": "MIG-1111"}, {"uuid": "MIG-2222"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in local_gpus()] == uuids


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 999]
)
def test_no_driver(fake_nvml, error):
    fake_nvml().init_error = error
    assert local_gpus() == []
    for reason in (why_no_gpu(), why_silent()):
        assert "there is no working NVIDIA driver here" in str(reason)
    with pytest.raises(NvmlUnavailableError, match="no working NVIDIA driver"), Nvml(0):
        pass


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nvmlDeviceGetCount", pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)),
        ("nvmlDeviceGetCount", pynvml.NVMLLibraryMismatchError("Function not found")),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVMLLibraryMismatchError("Function not found")),
        ("nvmlSystemGetDriverVersion", pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)),
    ],
)
def test_nvml_that_fails_on_the_way_is_a_sentence(fake_nvml, monkeypatch, name, error):
    fake = fake_nvml(A)

    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(pynvml, name, fail)
    with pytest.raises(NvmlError, match=r"^NVML fails \(.+\): see what `nvidia-smi` says$"):
        local_gpus()
    if name != "nvmlSystemGetDriverVersion":
        assert str(why_silent()).startswith("NVML fails (")
        with pytest.raises(NvmlError, match="NVML fails"), Nvml(0):
            pass
    assert fake.open == 0


#: What fails of a GPU that is lost or forbidden, and with which error.
UNREADABLE = pytest.mark.parametrize(
    ("function", "error", "kind"),
    [
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_RESET_REQUIRED, GpuLostError),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION, NvmlError),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_UNKNOWN, NvmlError),
        ("nvmlDeviceGetName", pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError),
        ("nvmlDeviceGetName", pynvml.NVML_ERROR_NO_PERMISSION, NvmlError),
        ("nvmlDeviceGetUUID", pynvml.NVML_ERROR_UNKNOWN, NvmlError),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError),
    ],
)


@UNREADABLE
def test_a_gpu_that_cannot_be_read_keeps_its_place(fake_nvml, monkeypatch, function, error, kind):
    fake = fake_nvml(A, {**A, "uuid": "GPU-lost", "errors": {function: error}}, B)
    first, lost, last = local_gpus()
    assert (first.product, first.fault) == ("NVIDIA H200", None)
    assert (last.index, last.product, last.uuid) == (2, B["product"], B["uuid"])
    assert (lost.index, lost.product, lost.uuid, type(lost.fault)) == (1, "", "", kind)
    assert str(lost.fault).startswith("GPU 1 ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert [gpu.product for gpu in local_gpus()] == [B["product"], ""]
    with Nvml(0) as nvml:
        assert nvml.state().temperature_c == 41
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb")
    assert [(gpu.index, gpu.product) for gpu in local_gpus()] == [(0, B["product"])]
    assert fake.open == 0


def test_the_number_of_a_lost_gpu_is_nvidia_smi_s(fake_nvml, monkeypatch):
    lost = {"errors": {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}}
    fake = fake_nvml(A, B, lost)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with pytest.raises(GpuLostError, match=r"^GPU 2 no longer answers"), Nvml(0):
        pass
    assert fake.open == 0


def test_states_and_the_older_power_call(fake_nvml):
    fake = fake_nvml({"event_reasons": 0x4 | 0x40})
    with Nvml(0) as nvml:
        assert fake.open == 1
        state = nvml.state()
    assert fake.open == 0
    assert state == GpuState(1755, 3201, 41, 476.0, ["sw_power_cap", "hw_thermal_slowdown"])
    gpu = fake_nvml({"errors": {"field 186": pynvml.NVML_ERROR_NOT_SUPPORTED}}).gpus[0]
    with Nvml(0) as nvml:
        assert nvml.state().power_w == 310.0
        gpu.errors["nvmlDeviceGetPowerUsage"] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert nvml.state().power_w is None


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, 999]
)
@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetCurrentClocksEventReasons", None),
    ],
)
def test_one_unsupported_field_leaves_the_others(fake_nvml, error, function, field):
    fake_nvml({"errors": {function: error}, "event_reasons": 0x4})
    with Nvml(0) as nvml:
        state = nvml.state()
    # Older drivers know the throttle reasons by their older name only.
    assert state.throttle_reasons == ["sw_power_cap"]
    assert state.power_w == 476.0
    if field is not None:
        assert getattr(state, field) is None


def test_limits(fake_nvml):
    gpu = fake_nvml({}).gpus[0]
    with Nvml(0) as nvml:
        limits = nvml.limits()
        assert (limits.sm_clock_mhz, limits.power_limit_w) == (1755, 700.0)
        # 6144 bits, both edges of 3201 MHz.
        assert limits.bandwidth_tb_s == pytest.approx(4.917, abs=1e-3)
        gpu.errors["nvmlDeviceGetMemoryBusWidth"] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert nvml.limits().bandwidth_tb_s is None


def findings_of(gpu: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Return what the doctor finds where torch cannot use the GPU."""
    target = Target(find(gpu), None, "torch is built without CUDA")
    monkeypatch.setattr("leanbench.doctor.machine.choose", lambda name, require_gpu: target)
    return dict(examine(Machine(folder), True, lambda what: None))


def test_a_gpu_that_supports_little(fake_nvml, monkeypatch, tmp_path):
    """A GB10 has neither memory, bus nor power limit of its own."""
    readable = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID")
    names = [name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")]
    errors = dict.fromkeys({*names} - {*readable}, pynvml.NVML_ERROR_NOT_SUPPORTED)
    fake_nvml({"product": "NVIDIA GB10", "errors": errors})
    (gpu,) = local_gpus()
    assert (gpu.product, gpu.fault) == ("NVIDIA GB10", None)
    assert (gpu.memory_total_bytes, gpu.memory_free_bytes, gpu.mig) == (None, None, False)
    assert gpu.compute_capability is None
    with Nvml(0) as nvml:
        assert nvml.limits() == GpuLimits(None, None, None)
        assert nvml.state() == GpuState(None, None, None, None, None)
        assert (nvml.power_limit_w(), nvml.total_energy_mj(), nvml.other_processes()) == (None,) * 3
    findings = findings_of("gb10", monkeypatch, tmp_path)
    statuses = {name: findings[name].status for name in ("gpu", "memory", "processes", "clocks")}
    assert statuses == {"gpu": "ok", "memory": "note", "processes": "note", "clocks": "ok"}


def test_doctor_tells_of_a_gpu_that_is_not_used(fake_nvml, monkeypatch, tmp_path):
    lost = {"errors": {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}}
    fake_nvml(A, lost)
    findings = findings_of("h200", monkeypatch, tmp_path)
    assert findings["gpu"].status == "note"
    assert "GPU 1 no longer answers" in findings["gpu"].text
    assert findings["memory"].status == "ok"
    assert findings["links"].values["pairs"][0]["peer_access"] is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    findings = findings_of("h200", monkeypatch, tmp_path)
    assert findings["gpu"].status == "problem"
    assert findings["gpu"].text.startswith("GPU 1 no longer answers")
    assert "memory" not in findings


#: Calls that ask one thing, the NVML function behind each, and what the pretended GPU answers.
SINGLE_CALLS = [
    ("total_energy_mj", "nvmlDeviceGetTotalEnergyConsumption", 5_000_000_000),
    ("power_instant_w", "field 186", 476.0),
    ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", 600.0),
    ("sm_clock_mhz", "nvmlDeviceGetClockInfo", 1755),
]


@pytest.mark.parametrize(("method", "function", "value"), SINGLE_CALLS)
def test_single_calls(fake_nvml, method, function, value):
    gpu = fake_nvml({}).gpus[0]
    with Nvml(0) as nvml:
        assert getattr(nvml, method)() == value
        for error in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
            gpu.errors[function] = error
            # No other call steps in: nvmlDeviceGetPowerUsage, for one, is an average over a second.
            assert getattr(nvml, method)() is None


@pytest.mark.parametrize(
    ("method", "function"),
    [
        *((method, function) for method, function, _ in SINGLE_CALLS if function[0] == "n"),
        ("state", "nvmlDeviceGetTemperature"),
        ("power_instant_w", "nvmlDeviceGetFieldValues"),
        ("throttle_reasons", "nvmlDeviceGetCurrentClocksEventReasons"),
        ("other_processes", "nvmlDeviceGetComputeRunningProcesses"),
        ("other_processes", "nvmlDeviceGetProcessUtilization"),
    ],
)
def test_lost_gpu_in_single_calls(fake_nvml, method, function):
    gpu = fake_nvml({}).gpus[0]
    with Nvml(0) as nvml:
        gpu.errors[function] = pynvml.NVML_ERROR_GPU_IS_LOST
        with pytest.raises(GpuLostError, match="reboot"):
            getattr(nvml, method)()


def test_throttle_reasons(fake_nvml):
    gpu = fake_nvml({"event_reasons": 0x4 | 0x2}).gpus[0]
    with Nvml(0) as nvml:
        assert nvml.throttle_reasons() == ["sw_power_cap"]
        # Idle and user-defined clocks are no throttling.
        for gpu.event_reasons in (0x0, 0x1, 0x2, 0x100, 0x103):
            assert nvml.throttle_reasons() == nvml.state().throttle_reasons == []
        gpu.errors["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        gpu.errors["nvmlDeviceGetCurrentClocksThrottleReasons"] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert nvml.throttle_reasons() is None


@pytest.mark.parametrize(
    ("visible", "device"),
    [("0,1", 1), ("1", 0), ("0,1", B["uuid"]), ("0,1", B["uuid"].removeprefix("GPU-"))],
)
def test_device_by_index_or_uuid(fake_nvml, monkeypatch, visible, device):
    fake_nvml(A, WARM_B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Nvml(device) as nvml:
        assert nvml.state().temperature_c == 77


def test_index_follows_torch_once_it_runs_cuda(fake_nvml, monkeypatch):
    """CUDA puts the fastest GPU first, NVML the one with the lowest bus address."""
    fake_nvml(A, WARM_B)
    gpus = [SimpleNamespace(uuid=gpu["uuid"].removeprefix("GPU-")) for gpu in (B, A)]
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2)
    cuda.get_device_properties = lambda index: gpus[index]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with Nvml(0) as nvml:
        assert nvml.state().temperature_c == 77


@pytest.mark.parametrize(
    ("device", "message"),
    [(2, "there is no GPU 2, visible here: 1"), ("GPU-cccc", "there is no GPU with UUID GPU-cccc")],
)
def test_unknown_device(fake_nvml, device, message):
    fake = fake_nvml(A)
    with pytest.raises(GpuNotFoundError, match=message), Nvml(device):
        pass
    assert fake.open == 0
