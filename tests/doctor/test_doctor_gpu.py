"""The GPU and its state, as a pretended driver tells it."""

from dataclasses import asdict, replace

import pytest

from leanbench.doctor import gpu
from leanbench.doctor import instruments as figures
from leanbench.doctor.machine import Finding, Machine
from leanbench.gpu.catalogue import find
from leanbench.gpu.local import Target
from leanbench.gpu.nvml import GpuProcess, GpuState
from leanbench.gpu.nvml_library import NvmlError
from leanbench.gpu.topology import Pair, Topology


def found(finding: Finding) -> tuple[str, str]:
    return finding.status, finding.text


def test_a_gpu_of_the_catalogue(machine):
    finding = gpu.product(machine)
    text = "NVIDIA H200, 132 SMs, compute capability 9.0; `h200` in the catalogue"
    assert found(finding) == ("ok", text)
    named = {"product": "NVIDIA H200", "catalogue_name": "h200"}
    assert finding.values == {"gpus": 1, "sms": 132, "compute_capability": "9.0", **named}


def test_a_gpu_that_nobody_knows(machine):
    machine.gpus = [replace(machine.gpu, product="NVIDIA Z9", index=1)] * 2
    machine.gpu = machine.gpus[1]
    machine.target = Target(replace(find("h200"), sms=7), 1)
    finding = gpu.product(machine)
    assert finding.status == "note"
    of_two = "compute capability 9.0; GPU 1 of 2"
    assert finding.text.startswith(f"NVIDIA Z9, 7 SMs, {of_two}, CUDA_VISIBLE_DEVICES picks")
    assert finding.text.endswith("; not in the catalogue, its figures are the driver's")
    # torch cannot use it: nobody counted its SMs, and the target is another GPU's model.
    machine.device_index = None
    assert gpu.product(machine).text.startswith(f"NVIDIA Z9, ? SMs, {of_two}")


def test_a_gpu_that_is_too_old(machine):
    machine.gpu = replace(machine.gpu, compute_capability=(7, 5))
    finding = gpu.product(machine)
    assert (finding.status, finding.values["compute_capability"]) == ("problem", "7.5")
    assert finding.fix == "the kernels need compute capability 8.0 or newer: use another GPU"


def test_a_gpu_that_torch_alone_sees(tmp_path, monkeypatch):
    silent = Target(find("h200"), 0, "Clocks stay unknown, NVML cannot be used (no library)")
    monkeypatch.setattr("leanbench.doctor.machine.local_gpus", list)
    monkeypatch.setattr("leanbench.doctor.machine.choose", lambda name, require_gpu: silent)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    alone = Machine(runs=tmp_path)
    finding = gpu.product(alone)
    assert found(finding) == ("note", f"NVIDIA H200, which torch sees. {silent.note}")
    # It can measure, without what NVML would tell.
    assert (alone.has_gpu, alone.can_launch) == (False, True)
    assert figures._sizes(alone)[-1].batch == 4


def test_a_broken_driver_is_said_by_the_check_of_the_gpu(tmp_path, monkeypatch):
    def broken(*arguments: object, **options: object) -> object:
        raise NvmlError("reboot")

    for name in ("local_gpus", "choose"):
        monkeypatch.setattr(f"leanbench.doctor.machine.{name}", broken)
    alone = Machine(runs=tmp_path)
    assert (alone.target, alone.can_launch) == (None, False)
    with pytest.raises(NvmlError, match="reboot"):
        gpu.product(alone)


def test_no_gpu_is_no_problem(machine, monkeypatch):
    machine.gpus, machine.target, machine.device_index = [], None, None
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "the NVIDIA driver finds no GPU")
    finding = gpu.product(machine)
    assert finding.status == "note"
    assert finding.text.startswith("the NVIDIA driver finds no GPU; sweeps predict")


@pytest.mark.parametrize(
    ("free", "status", "text"),
    [
        (149_000_000_000, "ok", "149.0 of 150.0 GB free"),
        (135_000_000_000, "ok", "135.0 of 150.0 GB free"),
        (134_900_000_000, "note", "134.9 of 150.0 GB free: something else holds the rest"),
        (None, "note", "the driver does not say how much memory is free"),
    ],
)
def test_memory(machine, free, status, text):
    machine.gpu = replace(machine.gpu, memory_free_bytes=free)
    finding = gpu.memory(machine)
    assert found(finding) == (status, text)
    assert finding.values["memory_free_bytes"] == free


def test_mig_and_driver(machine):
    assert gpu.driver(machine).text == "NVIDIA driver 580.65.06"
    assert gpu.mig(machine).status == "ok"
    machine.gpu = replace(machine.gpu, mig=True)
    finding = gpu.mig(machine)
    assert (finding.status, finding.values) == ("note", {"mig": True})


@pytest.mark.parametrize(
    ("processes", "status", "text"),
    [
        ([], "ok", "no other process on the GPU"),
        (None, "note", "the driver does not say who else uses the GPU"),
        ([GpuProcess(4711, "Xorg", 0)], "note", "others are on the GPU and idle: Xorg (4711)"),
        (
            [GpuProcess(4711, None, None)],
            "note",
            "others are on the GPU, how busy is not known: a process (4711)",
        ),
        (
            [GpuProcess(4711, "Xorg", 0), GpuProcess(4712, "python3", 87)],
            "problem",
            "others use the SMs: Xorg (4711), python3 (4712) at 87%",
        ),
    ],
)
def test_other_processes(machine, nvml, processes, status, text):
    nvml(other_processes=processes)
    finding = gpu.other_processes(machine)
    assert found(finding) == (status, text)
    if status == "problem":
        assert finding.fix is not None
        second = {"pid": 4712, "name": "python3", "sm_utilisation": 87}
        assert finding.values["processes"][1] == second


def test_clocks_and_power(machine, nvml):
    nvml()
    finding = gpu.clocks_and_power(machine)
    text = "SM clock 345 of 1980 MHz now, memory 3201 MHz, 31 °C, 76 of 700 W"
    assert found(finding) == ("ok", text)
    nvml(state=GpuState(None, None, None, None, None), power_limit_w=None)
    finding = gpu.clocks_and_power(machine)
    assert finding.text == "SM clock ? of 1980 MHz now, memory ? MHz, ? °C, ? of ? W"
    assert finding.values["sm_clock_mhz"] is None
    nvml(power_limit_w=500.0)
    finding = gpu.clocks_and_power(machine)
    assert finding.status == "note"
    assert finding.text.endswith("76 of 500 W; the power limit is lowered, by default it is 700 W")


@pytest.mark.parametrize(
    ("reasons", "status"),
    [
        ([], "ok"),
        (None, "note"),
        (["sw_power_cap"], "note"),
        (["sw_power_cap", "hw_thermal_slowdown"], "problem"),
        (["hw_power_brake_slowdown"], "problem"),
    ],
)
def test_throttling(machine, nvml, reasons, status):
    nvml(throttle_reasons=reasons)
    finding = gpu.throttling(machine)
    assert finding.status == status
    assert finding.values == {"throttle_reasons": reasons}
    assert all(reason in finding.text for reason in reasons or ())


def test_links_between_gpus(machine, monkeypatch):
    assert found(gpu.links(machine)) == ("ok", "one GPU, no links to others")
    machine.gpus = [replace(machine.gpu, index=index) for index in range(3)]
    pairs = [Pair(*two, True, True, 18, 478.1) for two in ((0, 1), (0, 2), (1, 2))]
    monkeypatch.setattr(gpu, "topology", lambda: Topology(tuple(pairs), 18))
    finding = gpu.links(machine)
    start, linked = "3 GPUs, 18 NVLinks each; ", "18 NVLinks, 478 GB/s one way, peer access"
    assert found(finding) == ("ok", f"{start}all pairs of GPUs: {linked}")
    assert finding.values["pairs"][1] == asdict(pairs[1])
    pairs[2] = Pair(1, 2, True, False, 0, 63.0)
    finding = gpu.links(machine)
    pcie = "GPUs 1 and 2: PCIe, 63 GB/s one way, peer access"
    assert found(finding) == ("note", f"{start}GPUs 0 and 1, 0 and 2: {linked}; {pcie}")
    assert finding.fix is None
    pairs[1:] = [Pair(0, 2, False, None), Pair(1, 2, None, None)]
    finding = gpu.links(machine)
    assert finding.status == "note"
    assert finding.text.endswith(
        "; GPUs 0 and 2: links not known, no peer access; GPUs 1 and 2: links not known, peer"
        " access not known"
    )
