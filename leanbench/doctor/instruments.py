"""Checks of what measures: timers, energy and hardware counters, read bandwidth, noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanbench.core.inputs import AttentionInputs
from leanbench.core.problem import AttentionProblem
from leanbench.doctor.machine import Finding, Machine, note, ok, problem
from leanbench.measure.counters import ADMINISTRATORS_ONLY, count, find_ncu

if TYPE_CHECKING:
    from leanbench.measure.timing import Timing

#: Recorded event pairs. Their distances vary by a few steps.
_EVENT_PAIRS = 200
#: 0.1% of a sample, which lasts 4 ms.
_MAX_EVENT_STEP_NS = 4000
#: CTAs of small problems live for some microseconds.
_MAX_TIMER_TICK_NS = 1100
#: Linux capabilities that can read restricted counters, by bit.
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
#: Minimum share of the datasheet's bandwidth. Data-centre GPUs reach 90 to 97%.
_MIN_BANDWIDTH_SHARE = 0.8
#: Relative differences of `lean` to itself. Quiet machines stay well below the first.
_NOISE_NOTE = 0.01
_NOISE_PROBLEM = 0.05
_BUSY_FIX = "stop other work on this GPU and this machine, then run `leanbench doctor` again"


def event_resolution(machine: Machine) -> Finding:
    """Check the smallest difference of distances between CUDA events."""
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
    """Return the smallest difference between distinct values; None if all are equal."""
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
    """Check access to hardware counters. With `machine.deep`, read some."""
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
    """Return True if the driver restricts counters and this process has no privilege."""
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
    """Return the value of a line ``name: value``."""
    for line in lines.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _sizes(machine: Machine) -> list[AttentionProblem]:
    """Return problems of 4 MB, 67 MB and 1.1 GB of K and V. Reduce the last if memory is short."""
    free = (machine.gpu.memory_free_bytes if machine.gpus else None) or 0
    large = 16 if free > 4_000_000_000 else 4
    return [
        AttentionProblem(1, 32, 8, 1024, 128),
        AttentionProblem(4, 32, 8, 4096, 128),
        AttentionProblem(large, 32, 8, 16384, 128),
    ]


def read_bandwidth(machine: Machine) -> Finding:
    """Check the read floor of sweeps at 1.1 GB. The fastest of all read kernels counts."""
    from leanbench.measure.judge import knows_bandwidth
    from leanbench.measure.read_floor import measure_read_floor

    large, datasheet_tb_s = _sizes(machine)[-1], machine.spec.bandwidth_tb_s
    timing = measure_read_floor(_inputs(machine, large), large.kv_bytes)
    bandwidth_tb_s = large.kv_bytes / timing.median_us / 1e6
    share = bandwidth_tb_s / datasheet_tb_s
    values = {
        "read_bandwidth_tb_s": bandwidth_tb_s,
        "datasheet_tb_s": datasheet_tb_s,
        "share": share,
    }
    text = (
        f"reads {large.kv_bytes / 1e9:.1f} GB at {bandwidth_tb_s:.2f} TB/s, "
        f"{share:.0%} of the datasheet's {datasheet_tb_s:.2f}"
    )
    if share < _MIN_BANDWIDTH_SHARE:
        return problem(
            f"{text}, below {_MIN_BANDWIDTH_SHARE:.0%}",
            f"{_BUSY_FIX}, and look at clocks and throttling",
            **values,
        )
    if share > 1 and knows_bandwidth(machine.spec):
        return problem(
            f"{text}, more than the memory can deliver",
            "report it: part was read from a cache or not at all, so shares of the floor are wrong",
            **values,
        )
    return ok(text, **values)


def timed_sizes(machine: Machine) -> dict[AttentionProblem, Timing]:
    """Time `lean` on three problems."""
    from leanbench.measure.timing import Effort, time_launches

    effort = Effort(max_seconds=0.5)
    return {size: time_launches(_launches(machine, size), effort) for size in _sizes(machine)}


def noise_floor(machine: Machine) -> Finding:
    """Time `lean` as two candidates in one measurement. Their medians should be equal."""
    from leanbench.measure.timing import Effort, measure_interleaved

    differences: dict[AttentionProblem, float] = {}
    for size in _sizes(machine):
        launches = _launches(machine, size)
        timings = measure_interleaved(
            {"once": launches, "again": launches}, Effort(max_seconds=0.5)
        )
        once, again = timings["once"].median_us, timings["again"].median_us
        differences[size] = abs(once - again) / min(once, again)
    worst = max(differences.values())
    by_size = ", ".join(
        f"{differs:.2%} at {size.kv_bytes / 1e6:.0f} MB" for size, differs in differences.items()
    )
    values = {"differences": {size.label: differs for size, differs in differences.items()}}
    text = f"lean against itself differs by {by_size}"
    if worst > _NOISE_PROBLEM:
        return problem(f"{text}: nothing here can be compared", _BUSY_FIX, **values)
    if worst > _NOISE_NOTE:
        return note(
            f"{text}: smaller differences between kernels mean nothing here", _BUSY_FIX, **values
        )
    return ok(text, **values)


def _inputs(machine: Machine, size: AttentionProblem) -> list[AttentionInputs]:
    from leanbench.measure.buffers import rotating_inputs

    return rotating_inputs(size, machine.device, machine.spec, "cold")


def _launches(machine: Machine, size: AttentionProblem) -> list[Callable[[], object]]:
    from leanbench.core.registry import kernel

    lean = kernel("lean")
    config = lean.default_config(size, machine.spec)
    return [lean.prepare(inputs, config) for inputs in _inputs(machine, size)]
