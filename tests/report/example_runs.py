"""Run directories made in code, with latencies chosen so that every statistic is known by hand."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanbench.core.problem import AttentionProblem
from leanbench.records.row import SCHEMA_VERSION, Row

GPU = "NVIDIA H200"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def row(
    problem: AttentionProblem, kernel: str, latency_us: float | None = None, **fields: Any
) -> dict[str, Any]:
    """One line of results.jsonl; a row without a latency needs a `status`."""
    taken: dict[str, Any] = {}
    if latency_us is not None:
        floor_us = problem.kv_bytes / 4e6 + 2.0
        taken = {
            "config": {"tile_tokens": 128, "num_warps": 4, "num_stages": 3},
            "config_choice": "heuristic",
            "latency_us": latency_us,
            "latency_p25_us": latency_us * 0.98,
            "latency_p75_us": latency_us * 1.05,
            "latency_ci_low_us": latency_us * 0.99,
            "latency_ci_high_us": latency_us * 1.01,
            "samples": 25,
            "bandwidth_tb_s": problem.kv_bytes / latency_us * 1e-6,
            "read_floor_us": floor_us,
            "read_floor_share": floor_us / latency_us,
            "relative_error": 3.2e-4,
            "sm_clock_mhz": 1980,
        }
    return {
        "cell": f"{problem.label} {kernel}",
        "problem": problem.to_dict(),
        "kernel": kernel,
        "decomposition": "stream_k",
        "source": "measured",
        "status": "ok",
        "kv_bytes": problem.kv_bytes,
        "wall_s": 1.5,
        "time": "2026-01-02T03:04:05+00:00",
        "environment": "env0",
        **taken,
        **fields,
    }


def as_rows(rows: Iterable[dict[str, Any]]) -> list[Row]:
    return [Row.model_validate(row) for row in rows]


def manifest(**fields: Any) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "name": "example",
        "command": "leanbench sweep example",
        "created": "2026-01-02T03:04:05.123456+00:00",
        "source": "measured",
        "gpu": {"name": "h200", "product": GPU, "sms": 132, "bandwidth_tb_s": 4.8},
        "environments": {
            "env0": {
                "python": "3.11.2",
                "torch": "2.11.0",
                "triton": "3.6.0",
                "driver": "580.1",
                "gpu_product": GPU,
            }
        },
        **fields,
    }


def problem(
    context: int | tuple[int, ...] = 1024, heads: int = 56, **fields: Any
) -> AttentionProblem:
    batch = len(context) if isinstance(context, tuple) else 1
    base = AttentionProblem(batch, heads, heads, context, 64)
    return replace(base, **fields)


def measured_rows() -> list[dict[str, Any]]:
    """lean is 2x and 8x as fast as fa2 (geometric mean 4x), 1x and 0.5x as fast as fixed_split."""
    short, long, ragged = problem(1024), problem(65536), problem((512, 4096))
    kernels = ("lean", "fa2", "fixed_split")
    wide = "the confidence interval stayed at 4% of the median"
    timed = {short: (10.0, 20.0, 10.0), long: (200.0, 1600.0, 100.0)}
    return [
        *(row(of, *each) for of, us in timed.items() for each in zip(kernels, us, strict=True)),
        row(ragged, "lean", 12.5, status="noisy", reason=wide),
        row(ragged, "fa2", status="crashed", reason=HOSTILE),
        row(ragged, "fixed_split", status="unsupported", reason="ragged batches are not supported"),
    ]


def row_with_all_fields(
    problem: AttentionProblem, kernel: str, latency_us: float, **fields: Any
) -> dict[str, Any]:
    """Return a row with every measurement, each in proportion to the latency or the bytes."""
    sustained_us, power_w, floor_mj = latency_us * 1.25, 500.0, problem.kv_bytes * 1e-7
    energy_mj = power_w * sustained_us * 1e-3
    taken = {
        "warnings": [],
        "throttled_samples": 0,
        "crosscheck_us": latency_us * 1.01,
        "sustained_us": sustained_us,
        "sustained_s": 3.0,
        "sustained_clock_mhz": 1700,
        "energy_mj": energy_mj,
        "energy_above_idle_mj": energy_mj * 0.8,
        "energy_by_power_mj": energy_mj * 0.98,
        "sustained_power_w": power_w,
        "idle_power_w": 100.0,
        "energy_delay_mj_us": energy_mj * sustained_us,
        "energy_floor_mj": floor_mj,
        "quantisation_efficiency": 0.97,
        "sm_busy_share": 0.85,
        "instrumentation_cost": 1.02,
        "theoretical_warp_occupancy": 0.25,
        "registers_per_thread": 168,
        "shared_kb_per_cta": 96.0,
        "spilled_registers": 0,
        "counted_warp_occupancy": 0.21,
        "counted_dram_bytes": problem.kv_bytes + 4096,
        "counted_dram_tb_s": 3.2,
        "temperature_c": 55,
        "power_w": 450.0,
        "throttle_reasons": [],
    }
    return row(problem, kernel, latency_us, **{**taken, **fields})


def rows_with_all_fields() -> list[dict[str, Any]]:
    """Return `measured_rows` with all fields, warnings, a noisy and a suspect row."""
    short, long = problem(1024), problem(65536)
    side = "the confidence interval of the median reaches 1.4% to one side"
    wide = f"{side} after 60 samples, above 0.5%"
    beats = "2.00 µs beats a kernel that only reads the same bytes"
    lowered = {"throttle_reasons": ["sw_power_cap"], "instrumentation_cost": 1.1}

    def warned(us: float, percent: str) -> dict[str, Any]:
        sentence = f"the cross-check ({us} µs) differs by {percent}% from the latency"
        return {"warnings": [sentence], "crosscheck_us": us}

    return [
        row_with_all_fields(short, "lean", 10.0, crosscheck_us=10.5, throttled_samples=3),
        row_with_all_fields(short, "fa2", 20.0, **warned(22.0, "10.0")),
        row_with_all_fields(short, "fixed_split", 10.0, status="noisy", reason=wide),
        row_with_all_fields(long, "lean", 200.0, **lowered),
        row_with_all_fields(long, "fa2", 1600.0, **warned(1552.0, "3.0")),
        row_with_all_fields(long, "fixed_split", 2.0, status="suspect", reason=beats),
    ]


def data_of(page: str) -> dict[str, Any]:
    """Return what a page holds for its scripts."""
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(data)


#: Writes a run directory `folder`: rows, then `tail` as it is, and fields over those of `manifest`.
WriteRun = Callable[..., Path]


def two_runs(write_run: WriteRun) -> tuple[Path, Path]:
    """Write a measured run, and a prediction for another GPU that takes half and less."""
    short, long = problem(1024), problem(4096)
    here = [
        row(short, "lean", 10.0, energy_mj=2.0),
        row(long, "lean", 40.0, energy_mj=4.0),
        row(short, "fa2", 12.0, status="noisy", reason="x"),
        row(long, "fa2", 60.0),
    ]
    times = [(short, "lean", 5.0), (long, "lean", 10.0), (short, "fa2", 8.0), (long, "fa2", 30.0)]
    there = [row(*time, source="predicted", environment="env1", energy_mj=1.0) for time in times]
    gpu = {"name": "b200", "product": "NVIDIA B200"}
    return (
        write_run(here, folder="here", name="here"),
        write_run(there, folder="there", name="there", source="predicted", gpu=gpu),
    )
