"""Tuned configs designed so that the fastest candidate is obvious."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leanbench.kernels.lean.configs import LeanConfig, LeanTritonConfig

from leanbench.configs.tuned import (
    Build,
    Candidate,
    Family,
    Timed,
    TunedConfigs,
    TunedGpu,
    TunedProblem,
)
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

H200 = find("h200")
#: The Triton implementation of lean: its heuristic does not depend on the installation.
LEAN = kernel("lean_triton")
#: head_dim 128, group size 4; its heuristic is 64 tokens, 4 warps, 4 stages, 1 CTA per SM.
PROBLEM = AttentionProblem(1, 32, 8, 4096, 128)
HEURISTIC = LeanTritonConfig(64, 4, 4, 1, 1, True)
#: Same as the heuristic except for its grid: the same build.
SAME_BUILD = LeanTritonConfig(64, 4, 4, 1, 2, False)
LARGE = LeanTritonConfig(128, 4, 3, 1, 1, True)
WIDE = LeanTritonConfig(128, 8, 3, 1, 1, True)
assert LEAN.default_config(PROBLEM, H200) == HEURISTIC

#: Source text of a `family`, without its file's.
FROM = "measured 2026-11-21 on NVIDIA H200"


def problem_of(group_size: int, head_dim: int = 128) -> AttentionProblem:
    return AttentionProblem(1, 8 * group_size, 8, 4096, head_dim)


#: Coefficients that reduce a launch to its start, within 0.1 us for these problems.
_INSTANT = dict.fromkeys(("gpu_bytes_per_us", "cta_bytes_per_us", "sm_bytes_per_us"), 1e12)
_NOTHING = dict.fromkeys(
    (
        "ramp_us",
        "boundary_us",
        "more_boundaries_us",
        "split_us",
        "partial_us",
        "round_us",
        "excess",
    ),
    1e-9,
)


def build(start_us: float, **fields: Any) -> Build:
    """Return a build with launches that take `start_us` for any problem."""
    values: dict[str, Any] = {
        "start_us": start_us,
        **_INSTANT,
        **_NOTHING,
        "points": 10,
        "median_error": 0.01,
    }
    return Build(**{**values, **fields})


def candidate(config: LeanConfig, build: int | None, **fields: Any) -> Candidate:
    return Candidate(**{"config": config, "shared_bytes": 98304, "build": build, **fields})


def tuned(context: int = 4096, chosen: int = 1, **fields: Any) -> TunedProblem:
    values: dict[str, Any] = {
        "batch": 1,
        "kv_heads": 8,
        "context": context,
        "heuristic": 0,
        "chosen": chosen,
    }
    timed = [Timed(candidate=1, latency_us=9.0), Timed(candidate=0, latency_us=10.0)]
    return TunedProblem(**{**values, "ties": [1], "timed": timed, **fields})


def family(heuristic_us: float = 10.0, large_us: float = 9.0, **fields: Any) -> Family:
    """Return a family with candidate 0, the heuristic's, and 1, LARGE, alone on the shortlist.

    Each build takes a constant time.
    """
    values: dict[str, Any] = {
        "head_dim": 128,
        "dtype": "fp16",
        "group_size": 4,
        "kv_layout": "HND",
        "source": "measured",
        "objective": "latency",
        "time": "2026-11-21T09:30:00+00:00",
        "versions": {"leanbench": "0.1.0", "torch": "2.12"},
        "stopped": "the plan was done",
        "candidates": [candidate(HEURISTIC, 0), candidate(LARGE, 1)],
        "builds": [build(heuristic_us), build(large_us)],
        "shortlist": [1],
        "problems": [],
    }
    return Family(**{**values, **fields})


def gpu(name: str = "h200", **fields: Any) -> TunedGpu:
    return TunedGpu.of(replace(find(name), **fields))


def tuned_configs(*families: Family, of: TunedGpu | None = None) -> TunedConfigs:
    return TunedConfigs(kernel="lean", gpu=of or gpu(), families=list(families) or [family()])
