"""A pretended NVML: the real `pynvml` with other functions, but its names and errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


@dataclass
class FakeGpu:
    product: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa0000-0000-0000-0000-000000000000"
    memory_total_bytes: int = 150_754_820_096
    memory_free_bytes: int = 150_000_000_000
    compute_capability: tuple[int, int] = (9, 0)
    sm_clock_mhz: int = 1755
    memory_clock_mhz: int = 3201
    memory_bus_bits: int = 6144
    temperature_c: int = 41
    #: What the instantaneous field and the older call read; they differ, as they do on the H200.
    power_instant_mw: int = 476_000
    power_usage_mw: int = 310_000
    event_reasons: int = 0
    mig: bool = False
    total_energy_mj: int = 5_000_000_000
    power_limit_mw: int = 600_000
    #: Of an NVLink one way; 0: the driver does not say.
    nvlink_mb_s: int = 26_562
    pcie: tuple[int, int] = (5, 16)
    bus: int = 0
    #: Process ids by the kind of their context.
    compute_pids: list[int] = field(default_factory=list)
    mps_pids: list[int] = field(default_factory=list)
    graphics_pids: list[int] = field(default_factory=list)
    #: (pid, time stamp in us, percent of SM time)
    utilisation: list[tuple[int, int, int]] = field(default_factory=list)
    #: NVML function names that answer with an error, and which.
    errors: dict[str, int] = field(default_factory=dict)


#: Fields of `FakeGpu` by the end of the NVML function that reads one alone.
_ATTRIBUTES = {
    "UUID": "uuid",
    "Name": "product",
    "CudaComputeCapability": "compute_capability",
    "MemoryBusWidth": "memory_bus_bits",
    "Temperature": "temperature_c",
    "PowerUsage": "power_usage_mw",
    "EnforcedPowerLimit": "power_limit_mw",
    **dict.fromkeys(("CurrentClocksEventReasons", "CurrentClocksThrottleReasons"), "event_reasons"),
    "TotalEnergyConsumption": "total_energy_mj",
}


@dataclass
class FakeNvml:
    gpus: list[FakeGpu]
    #: nvmlInit calls without their nvmlShutdown.
    open: int = 0
    init_error: int | None = None
    #: What nvmlSystemGetProcessName says of a pid; it does not find the others.
    process_names: dict[int, str] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def no_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Return a function that installs GPUs with these `FakeGpu` fields and returns their NVML."""

    def install(*gpus: dict[str, Any]) -> FakeNvml:
        fake = FakeNvml([FakeGpu(**fields) for fields in gpus])
        for name, function in _functions(fake).items():
            monkeypatch.setattr(pynvml, name, function)
        return fake

    return install


def _functions(fake: FakeNvml) -> dict[str, Callable[..., Any]]:
    def init() -> None:
        if fake.init_error is not None:
            raise pynvml.NVMLError(fake.init_error)
        fake.open += 1

    def shutdown() -> None:
        fake.open -= 1

    def by_uuid(uuid: str) -> FakeGpu:
        for gpu in fake.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def field_values(gpu: FakeGpu, fields: list[int]) -> list[Any]:
        (asked,) = fields
        error = gpu.errors.get(f"field {asked}", pynvml.NVML_SUCCESS)
        value = {186: gpu.power_instant_mw, 90: gpu.nvlink_mb_s}[asked]
        return [SimpleNamespace(nvmlReturn=error, value=SimpleNamespace(uiVal=value))]

    def process_utilisation(gpu: FakeGpu, since_us: int) -> list[Any]:
        samples = [
            SimpleNamespace(pid=pid, timeStamp=stamp_us, smUtil=percent)
            for pid, stamp_us, percent in gpu.utilisation
            if stamp_us > since_us or stamp_us == 0  # entries that were never filled come along
        ]
        if not samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return samples

    def process_name(pid: int) -> str:
        if pid not in fake.process_names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return fake.process_names[pid]

    handle = _failing("nvmlDeviceGetHandleByIndex", lambda gpu: gpu)
    clocks = {pynvml.NVML_CLOCK_SM: "sm_clock_mhz", pynvml.NVML_CLOCK_MEM: "memory_clock_mhz"}

    def attribute(name: str) -> Callable[..., Any]:
        return lambda gpu, *args: getattr(gpu, name)

    def running(pids: str) -> Callable[..., Any]:
        return lambda gpu: [SimpleNamespace(pid=p, usedGpuMemory=None) for p in getattr(gpu, pids)]

    per_gpu: dict[str, Callable[..., Any]] = {
        **{name: attribute(field) for name, field in _ATTRIBUTES.items()},
        "MemoryInfo": lambda gpu: SimpleNamespace(
            total=gpu.memory_total_bytes, free=gpu.memory_free_bytes
        ),
        "MigMode": lambda gpu: [int(gpu.mig), int(gpu.mig)],
        "ClockInfo": lambda gpu, clock: getattr(gpu, clocks[clock]),
        "MaxClockInfo": lambda gpu, clock: getattr(gpu, clocks[clock]),
        "FieldValues": field_values,
        "PowerManagementDefaultLimit": lambda gpu: 700_000,
        "DeviceHandleFromMigDeviceHandle": _no_mig_instance,
        "ComputeRunningProcesses": running("compute_pids"),
        "MPSComputeRunningProcesses": running("mps_pids"),
        "GraphicsRunningProcesses": running("graphics_pids"),
        "ProcessUtilization": process_utilisation,
        "PciInfo": lambda gpu: SimpleNamespace(domain=0, bus=gpu.bus, device=0),
        "MaxPcieLinkGeneration": lambda gpu: gpu.pcie[0],
        "MaxPcieLinkWidth": lambda gpu: gpu.pcie[1],
    }
    named = {f"nvmlDeviceGet{name}": function for name, function in per_gpu.items()}
    return {
        "nvmlInit": init,
        "nvmlShutdown": shutdown,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetProcessName": process_name,
        "nvmlDeviceGetCount": lambda: len(fake.gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: handle(fake.gpus[index]),
        "nvmlDeviceGetHandleByUUID": by_uuid,
        **{name: _failing(name, function) for name, function in named.items()},
    }


def _no_mig_instance(gpu: FakeGpu) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _failing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(gpu: FakeGpu, *args: Any) -> Any:
        if name in gpu.errors:
            raise pynvml.NVMLError(gpu.errors[name])
        return function(gpu, *args)

    return call
