"""Pairs of runs for the tests of comparing: rows, manifest and samples by the project's writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.measure.timing import median_interval
from leanbench.records.directory import RunDirectory
from leanbench.records.row import Row
from leanbench.records.samples import Samples
from leanbench.run.cells import Cell

ENVIRONMENT = {
    "python": "3.12.3",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "driver": "580.1",
    "gpu_product": "NVIDIA H200",
    "gpu_uuid": "GPU-1",
    "leanbench": "0.1.0",
    "commit": "abc",
}


def problem(context: int = 1024, **fields: Any) -> AttentionProblem:
    shapes = {"batch": 1, "q_heads": 8, "kv_heads": 8, "context": context, "head_dim": 64}
    return AttentionProblem(**{**shapes, **fields})


def spread(middle_us: float, count: int = 11, step: float = 0.001) -> list[float]:
    """Return samples around a median, evenly spaced by `step` relative to it."""
    return [middle_us * (1 + step * (index - (count - 1) / 2)) for index in range(count)]


def row(
    problem: AttentionProblem, kernel: str = "lean", samples_us: Sequence[float] = (), **fields: Any
) -> dict[str, Any]:
    """Return a row with the median and the interval of `samples_us`.

    A row without samples needs a `status`.
    """
    measured: dict[str, Any] = {}
    if samples_us:
        low, high = median_interval(samples_us)
        measured = {
            "config": {"tile_tokens": 64},
            "config_choice": "heuristic",
            "latency_us": median(samples_us),
            "latency_ci_low_us": low,
            "latency_ci_high_us": high,
            "samples": len(samples_us),
        }
    shared = {
        "cell": Cell(problem, kernel).key,
        "problem": problem.to_dict(),
        "kernel": kernel,
        "decomposition": "stream_k",
        "source": "measured",
        "status": "ok",
        "kv_bytes": problem.kv_bytes,
        "wall_s": 1.0,
        "time": "2026-01-02T03:04:05+00:00",
        "environment": "env0",
    }
    return Row.model_validate({**shared, **measured, **fields}).model_dump(mode="json")


def write_run(
    path: Path,
    rows: Sequence[dict[str, Any]],
    samples_us: Mapping[str, Sequence[float]] | None = None,
    *,
    configs: str = "default",
    source: str = "measured",
    gpu: str = "NVIDIA H200",
    environment: Mapping[str, Any] = ENVIRONMENT,
    measure: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run directory with these rows, and the samples of their cells."""
    manifest = {
        "command": "leanbench sweep",
        "source": source,
        "sweep": {"name": "example", "configs": configs},
        "gpu": {"name": gpu.split()[-1].lower(), "product": gpu},
        "environments": {"env0": dict(environment)},
        "cells": [row["cell"] for row in rows],
        **({"measure": dict(measure)} if measure else {}),
    }
    with RunDirectory.create(path, manifest) as run:
        for row in rows:
            us = list((samples_us or {}).get(row["cell"], ()))
            count = len(us)
            samples = Samples(
                cell=row["cell"],
                samples_us=us,
                rounds=list(range(count)),
                sm_clock_mhz=[1980] * count,
            )
            run.append(Row.model_validate(row), samples if us else None)
    return path


def run_of(
    path: Path, latencies: Mapping[tuple[AttentionProblem, str], Sequence[float]], **fields: Any
) -> Path:
    """Write a run with a row and raw samples for each (problem, kernel)."""
    rows = [row(problem, kernel, samples_us) for (problem, kernel), samples_us in latencies.items()]
    samples = {row["cell"]: us for row, us in zip(rows, latencies.values(), strict=True)}
    return write_run(path, rows, samples, **fields)
