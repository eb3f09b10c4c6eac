"""Checks of the GPU and its state, as the driver reports them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from leanbench.doctor.machine import Finding, Machine, note, ok, problem
from leanbench.gpu.catalogue import match_product
from leanbench.gpu.topology import pairs_in_words, topology
from leanbench.gpu.visible import why_no_gpu

#: The kernels need features of compute capability 8.0.
_MIN_COMPUTE_CAPABILITY = (8, 0)
#: With a smaller share of free memory, other processes use the GPU.
_MIN_FREE_SHARE = 0.9
#: Reasons for lowered clocks that are faults or heat, not ordinary limits.
_SERIOUS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


def product(machine: Machine) -> Finding:
    if not machine.gpus and machine.device_index is not None:
        assert machine.target is not None
        return note(f"{machine.spec.product}, which torch sees. {machine.target.note}", gpus=0)
    if not machine.gpus:
        return note(
            f"{why_no_gpu()}; sweeps predict with the performance model, nothing is measured",
            gpus=0,
        )
    gpu, listed = machine.gpu, match_product(machine.gpu.product)
    if gpu.fault is not None:
        raise gpu.fault
    spec = listed if machine.device_index is None else machine.spec
    capability = gpu.compute_capability
    values = {
        "gpus": len(machine.gpus),
        "product": gpu.product,
        "sms": None if spec is None else spec.sms,
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "catalogue_name": None if listed is None else listed.name,
    }
    text = (
        f"{gpu.product}, {values['sms'] or '?'} SMs, compute capability"
        f" {values['compute_capability'] or '?'}"
    )
    if len(machine.gpus) > 1:
        text += f"; GPU {gpu.index} of {len(machine.gpus)}, CUDA_VISIBLE_DEVICES picks another"
    faults = "".join(f"; {other.fault}" for other in machine.gpus if other.fault is not None)
    if capability is not None and capability < _MIN_COMPUTE_CAPABILITY:
        return problem(
            text, "the kernels need compute capability 8.0 or newer: use another GPU", **values
        )
    if listed is None:
        text += "; not in the catalogue, its figures are the driver's"
    else:
        text += f"; `{listed.name}` in the catalogue"
    return (note if faults or listed is None else ok)(text + faults, **values)


def driver(machine: Machine) -> Finding:
    return ok(f"NVIDIA driver {machine.gpu.driver_version}", driver=machine.gpu.driver_version)


def memory(machine: Machine) -> Finding:
    """Check the free memory before this process takes any."""
    free, total = machine.gpu.memory_free_bytes, machine.gpu.memory_total_bytes
    if free is None or total is None:
        return note("the driver does not say how much memory is free", memory_free_bytes=None)
    values = {"memory_free_bytes": free, "memory_total_bytes": total}
    text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < _MIN_FREE_SHARE * total:
        return note(f"{text}: something else holds the rest", "`nvidia-smi` lists who", **values)
    return ok(text, **values)


def mig(machine: Machine) -> Finding:
    if machine.gpu.mig:
        return note(
            "MIG: kernels get a part of the GPU, while clocks, power and energy are of the whole",
            "for energy, use a GPU that is not partitioned",
            mig=True,
        )
    return ok("not partitioned (MIG is off)", mig=False)


def links(machine: Machine) -> Finding:
    """Check if GPUs can share a problem, see leanbench.distributed."""
    if len(machine.gpus) < 2:
        return ok("one GPU, no links to others", pairs=[])
    found = topology()
    values = {"pairs": [asdict(pair) for pair in found.pairs], "nvlinks": found.nvlinks}
    text = f"{len(machine.gpus)} GPUs, {found.nvlinks} NVLinks each; {pairs_in_words(found.pairs)}"
    if not all(pair.peer_access for pair in found.pairs):
        fix = "share problems among GPUs with peer access: CUDA_VISIBLE_DEVICES picks them"
        return note(text, fix, **values)
    if not all(pair.nvlink for pair in found.pairs):
        return note(text, **values)
    return ok(text, **values)


def other_processes(machine: Machine) -> Finding:
    with machine.nvml() as nvml:
        processes = nvml.other_processes()
    if processes is None:
        return note("the driver does not say who else uses the GPU", processes=None)
    values: dict[str, Any] = {
        "processes": [
            {"pid": process.pid, "name": process.name, "sm_utilisation": process.sm_utilisation}
            for process in processes
        ]
    }
    if not processes:
        return ok("no other process on the GPU", **values)
    names = ", ".join(
        f"{process.name or 'a process'} ({process.pid})"
        + (f" at {process.sm_utilisation}%" if process.sm_utilisation else "")
        for process in processes
    )
    fix = "wait for them or stop them; a figure that was measured next to them is not the GPU's"
    if any(process.sm_utilisation for process in processes):
        return problem(f"others use the SMs: {names}", fix, **values)
    if any(process.sm_utilisation is None for process in processes):
        return note(f"others are on the GPU, how busy is not known: {names}", fix, **values)
    return note(f"others are on the GPU and idle: {names}", **values)


def clocks_and_power(machine: Machine) -> Finding:
    with machine.nvml() as nvml:
        state, limits, limit_w = nvml.state(), nvml.limits(), nvml.power_limit_w()
    values = {
        "sm_clock_mhz": state.sm_clock_mhz,
        "sm_clock_max_mhz": limits.sm_clock_mhz,
        "memory_clock_mhz": state.memory_clock_mhz,
        "temperature_c": state.temperature_c,
        "power_w": state.power_w,
        "power_limit_w": limit_w,
        "power_limit_default_w": limits.power_limit_w,
    }

    def shown(name: str) -> str:
        value = values[name]
        return "?" if value is None else f"{value:.0f}"

    text = (
        f"SM clock {shown('sm_clock_mhz')} of {shown('sm_clock_max_mhz')} MHz now, "
        f"memory {shown('memory_clock_mhz')} MHz, {shown('temperature_c')} °C, "
        f"{shown('power_w')} of {shown('power_limit_w')} W"
    )
    if limit_w is not None and limits.power_limit_w is not None and limit_w < limits.power_limit_w:
        fix = (
            "say so with sustained figures, or set the default again with `nvidia-smi"
            " --power-limit`"
        )
        return note(
            f"{text}; the power limit is lowered, by default it is"
            f" {shown('power_limit_default_w')} W",
            fix,
            **values,
        )
    return ok(text, **values)


def throttling(machine: Machine) -> Finding:
    with machine.nvml() as nvml:
        reasons = nvml.throttle_reasons()
    if reasons is None:
        return note("the driver does not say whether clocks are lowered", throttle_reasons=None)
    if not reasons:
        return ok("no reason for lowered clocks", throttle_reasons=[])
    text = f"clocks are lowered now: {', '.join(reasons)}"
    if any(reason in _SERIOUS for reason in reasons):
        return problem(
            text,
            "let the GPU cool down; if that does not help, look at its cooling and power supply",
            throttle_reasons=reasons,
        )
    return note(text, "wait until other work on the GPU is done", throttle_reasons=reasons)
