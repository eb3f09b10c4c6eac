"""Run directories made in code, with latencies chosen so that every statistic is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leanbench.problem import AttentionProblem

GPU = "NVIDIA H200"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def row(problem: AttentionProblem, kernel: str, latency_us: float | None = None, **fields: Any) -> dict[str, Any]:
    """One line of results.jsonl; a row without a latency needs a `status`."""
    taken: dict[str, Any] = {}
    if latency_us is not None:
        floor_us = problem.kv_bytes / 4e6 + 2.0
        taken = {
            "config": {"tile_tokens": 128, "num_warps": 4, "num_stages": 3},
            "config_choice": "default",
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


def manifest(**fields: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
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


def problem(context: int | tuple[int, ...] = 1024, heads: int = 56, **fields: Any) -> AttentionProblem:
    batch = len(context) if isinstance(context, tuple) else 1
    shapes = {"batch": batch, "q_heads": heads, "kv_heads": heads, "context": context, "head_dim": 64}
    return AttentionProblem(**{**shapes, **fields})


def measured_rows() -> list[dict[str, Any]]:
    """lean is 2x and 8x as fast as fa2 (geometric mean 4x), 1x and 0.5x as fast as fixed_split (0.7071x)."""
    short, long, ragged = problem(1024), problem(65536), problem((512, 4096))
    return [
        row(short, "lean", 10.0),
        row(short, "fa2", 20.0),
        row(short, "fixed_split", 10.0),
        row(long, "lean", 200.0),
        row(long, "fa2", 1600.0),
        row(long, "fixed_split", 100.0),
        row(ragged, "lean", 12.5, status="noisy", reason="the confidence interval stayed at 4% of the median"),
        row(ragged, "fa2", status="crashed", reason=HOSTILE),
        row(ragged, "fixed_split", status="unsupported", reason="ragged batches are not supported"),
    ]


#: Writes a run directory: rows, then `tail` as it is, and fields over those of `manifest`.
WriteRun = Callable[..., Path]
