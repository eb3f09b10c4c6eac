"""Predicts one cell: the fields of its row that a model can fill."""

from __future__ import annotations

from typing import Any

from leanbench.decomposition import Schedule, quantisation_efficiency
from leanbench.gpu.spec import GpuSpec
from leanbench.model.rates import read_floor_us, resident_ctas
from leanbench.model.simulate import Simulation, simulate
from leanbench.problem import AttentionProblem
from leanbench.registry import Kernel, KernelConfig


def predict_cell(problem: AttentionProblem, kernel: Kernel, configs: str, spec: GpuSpec) -> dict[str, Any]:
    """Fields of a `leanbench.row.Row`, `source` predicted; what only a measurement can know is left out.

    Args:
        configs: `default`, or `best`: the kernel's candidate with the lowest predicted latency.
    """
    fields: dict[str, Any] = {
        "decomposition": kernel.decomposition,
        "source": "predicted",
        "kv_bytes": problem.kv_bytes,
    }
    if (reason := kernel.unsupported_reason(problem)) is not None:
        return {**fields, "status": "unsupported", "reason": reason}
    if (reason := _memory_shortage(problem, spec)) is not None:
        return {**fields, "status": "out_of_memory", "reason": reason}
    candidates = _candidates(problem, kernel, configs, spec)
    schedules = [
        (config, schedule)
        for config in candidates
        if config is not None and (schedule := kernel.schedule(problem, config, spec)) is not None
    ]
    if not schedules:
        return {**fields, "status": "unsupported", "reason": f"{kernel.name} has no schedule to predict from"}
    fitting = [(config, schedule) for config, schedule in schedules if resident_ctas(problem, config, spec)]
    if not fitting:
        reason = (
            f"{kernel.name} has no config that fits the {spec.shared_kb_per_cta} KB of shared memory of {spec.name}"
        )
        return {**fields, "status": "unsupported", "reason": reason}
    choice = f"best of {len(fitting)}" if configs == "best" else "default"
    config, schedule, simulation = _fastest(fitting, problem, spec)
    return {**fields, "config_choice": choice, **_result(config, schedule, simulation, problem, spec)}


def _candidates(
    problem: AttentionProblem, kernel: Kernel, configs: str, spec: GpuSpec
) -> list[KernelConfig] | list[KernelConfig | None]:
    if configs == "best":
        return kernel.candidate_configs(problem, spec)
    return [kernel.default_config(problem, spec)]


def _memory_shortage(problem: AttentionProblem, spec: GpuSpec) -> str | None:
    needed_gb = problem.kv_allocated_bytes / 1e9
    if needed_gb <= spec.memory_gb:
        return None
    return (
        f"K and V take {needed_gb:.1f} GB, {spec.name} has {spec.memory_gb:g} GB: "
        "lower context, batch or kv_heads, or choose a GPU with more memory"
    )


def _fastest(
    candidates: list[tuple[KernelConfig, Schedule]], problem: AttentionProblem, spec: GpuSpec
) -> tuple[KernelConfig, Schedule, Simulation]:
    """The first of the fastest, so that equal ones do not change places between runs."""
    played = [(config, schedule, simulate(schedule, problem, config, spec)) for config, schedule in candidates]
    return min(played, key=lambda candidate: candidate[2].latency_us)


def _result(
    config: KernelConfig, schedule: Schedule, simulation: Simulation, problem: AttentionProblem, spec: GpuSpec
) -> dict[str, Any]:
    floor_us = read_floor_us(problem.kv_bytes, spec)
    # As for measured rows: one CTA on an SM at once, or as many as the config asks for.
    slots = spec.sms * (config.ctas_per_sm or 1)
    return {
        "status": "ok",
        "config": config.to_dict(),
        "latency_us": simulation.latency_us,
        "bandwidth_tb_s": simulation.bandwidth_tb_s,
        "read_floor_us": floor_us,
        "read_floor_share": floor_us / simulation.latency_us,
        "quantisation_efficiency": quantisation_efficiency(schedule, slots),
    }
