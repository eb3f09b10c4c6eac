"""Checks of the instruments: timers, the energy counter, hardware counters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.doctor.finding import Finding, note, ok
from leanbench.doctor.machine import Machine
from leanbench.measure.counters import ADMINISTRATORS_ONLY, count, find_ncu

#: Event pairs that are recorded; their distances vary by a few steps.
_EVENT_PAIRS = 200
#: 0.1% of a sample, which lasts 4 ms.
_MAX_EVENT_STEP_NS = 4000
#: A CTA of a small problem lives for some microseconds.
_MAX_TIMER_TICK_NS = 1100
#: Capabilities that may read counters although the driver keeps them from users, by their bits in
#: Linux.
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38


def event_resolution(machine: Machine) -> Finding:
    """The smallest difference between the distances of CUDA events."""
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_EVENT_PAIRS)]
    for start, end in pairs:
        start.record()
        end.record()
    torch.cuda.synchronize()
    step_ns = smallest_step(round(start.elapsed_time(end) * 1e6) for start, end in pairs)
    if step_ns is None:
        return note(
            "CUDA events are all equally far apart, their step is not known", event_step_ns=None
        )
    text = f"CUDA events step by {step_ns} ns"
    if step_ns > _MAX_EVENT_STEP_NS:
        return note(f"{text}, above 0.1% of a sample", event_step_ns=step_ns)
    return ok(text, event_step_ns=step_ns)


def smallest_step(values: Iterable[int]) -> int | None:
    """The smallest difference between unlike values; None where all are alike."""
    return min((later - earlier for earlier, later in pairwise(sorted(set(values)))), default=None)


def timer_tick(machine: Machine) -> Finding:
    from leanbench.measure.timeline import timer_tick_ns

    tick_ns = timer_tick_ns(machine.device)
    text = f"%globaltimer, the clock of timeline events, ticks every {tick_ns} ns"
    if tick_ns > _MAX_TIMER_TICK_NS:
        return note(f"{text}: timelines of small problems are coarse", timer_tick_ns=tick_ns)
    return ok(text, timer_tick_ns=tick_ns)


def energy_counter(machine: Machine) -> Finding:
    from leanbench.measure.energy_meter import calibrate

    with machine.nvml() as nvml:
        calibration = calibrate(nvml)
    idle = "" if calibration.idle_power_w is None else f"{calibration.idle_power_w:.0f} W idle"
    values: dict[str, Any] = {
        "energy_tick_ms": calibration.tick_ms,
        "idle_power_w": calibration.idle_power_w,
        "idle_power_by_reading_w": calibration.idle_power_by_reading_w,
    }
    counter = (
        None
        if calibration.tick_ms is None
        else f"the energy counter ticks every {calibration.tick_ms:.0f} ms"
    )
    text = ", ".join(filter(None, [counter, idle]))
    if calibration.warnings:
        return note("; ".join([*filter(None, [text]), *calibration.warnings]), **values)
    return ok(text, **values)


def hardware_counters(machine: Machine) -> Finding:
    """Access to hardware counters, by looking, or by trying if `machine.deep` is set."""
    ncu = find_ncu()
    if ncu is None:
        return note(
            "Nsight Compute is not here, so no hardware counters",
            "install it, or put `ncu` on the PATH",
            ncu=None,
        )
    if machine.deep:
        return _try_counters(machine, ncu)
    if counters_are_restricted():
        return note(
            f"{ncu} is here, but {ADMINISTRATORS_ONLY.partition(': ')[0]}",
            ADMINISTRATORS_ONLY.partition(": ")[2],
            ncu=ncu,
        )
    return ok(f"{ncu} is here and seems allowed to read counters; --deep tries it", ncu=ncu)


def _try_counters(machine: Machine, ncu: str) -> Finding:
    from leanbench.core.registry import kernel

    tried = AttentionProblem(1, 32, 8, 4096, 128)
    config = kernel("lean").default_config(tried, machine.spec)
    counted = count(tried, "lean", config, machine.device.index)
    if isinstance(counted, str):
        return note(f"hardware counters cannot be read: {counted}", ncu=ncu)
    return ok(
        f"hardware counters: lean moves {counted.dram_bytes / tried.kv_bytes:.3f} times the bytes"
        f" of K and V, and its warps fill {counted.warp_occupancy:.0%} of an SM",
        ncu=ncu,
        counted_dram_bytes=counted.dram_bytes,
        kv_bytes=tried.kv_bytes,
        counted_warp_occupancy=counted.warp_occupancy,
    )


def counters_are_restricted(proc: Path = Path("/proc")) -> bool:
    """Whether the driver keeps counters from users and this process has no privilege; False where
    that is unknown.
    """
    try:
        options = (proc / "driver" / "nvidia" / "params").read_text()
        status = (proc / "self" / "status").read_text()
    except OSError:
        return False
    restricted = _value(options, "RmProfilingAdminOnly") == "1"
    # A container's root often lacks them.
    capabilities = int(_value(status, "CapEff") or "0", 16)
    return restricted and not capabilities & (1 << _CAP_SYS_ADMIN | 1 << _CAP_PERFMON)


def _value(lines: str, name: str) -> str | None:
    """Of a line ``name: value``."""
    for line in lines.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
