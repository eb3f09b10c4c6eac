"""Timings made up so that the fastest candidate is obvious."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanbench.kernels.lean.configs import LeanConfig, LeanTritonConfig
from leanbench.kernels.lean.cuda_settings import chosen, space

from leanbench.configs.signature import signature_of
from leanbench.configs.store import TimedCall
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find

H200 = find("h200")
LEAN = kernel("lean")
#: Launched in CUDA C++ and in Triton alone.
CUDA, TRITON = kernel("lean_cuda"), kernel("lean_triton")
#: Its signature is ``8 tiles d128 g4 2 B HND, 4096 tokens``.
PROBLEM = AttentionProblem(1, 32, 8, 4096, 128)
#: The same call as served: lengths on the device.
SERVED = AttentionProblem(1, 32, 8, 4096, 128, lengths_on="device", capacity=4096)
#: The model's choice for `PROBLEM`, and others.
MODELS, *OTHERS = space(PROBLEM, H200)[:5]
OF_TRITON = LeanTritonConfig(128, 4, 3, 1, 1, True)
assert chosen(PROBLEM, H200) == MODELS


def timed(
    *costs: float,
    problem: AttentionProblem = PROBLEM,
    configs: Sequence[LeanConfig] = (MODELS, *OTHERS),
    **fields: Any,
) -> TimedCall:
    """Return a call whose first configs took `costs`."""
    about: dict[str, Any] = {
        "signature": signature_of(problem),
        "objective": "latency",
        "time": "2026-11-28T09:30:00+00:00",
        "versions": {"leanbench": "0.1.0"},
        **fields,
    }
    return TimedCall(problem, costs=dict(zip(configs, costs, strict=False)), **about)
