"""Timings made up so that the fastest candidate is obvious."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leanbench.kernels.lean.configs import LeanTritonConfig
from leanbench.kernels.lean.cuda_settings import chosen, space
from leanbench.kernels.mla import LEAN_MLA

from leanbench.configs.signature import signature_of
from leanbench.configs.store import TimedCall, TunedConfig
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
#: Over a latent cache: ``11 tiles d576 v512 g32 q2 2 B HND latent, 470 tokens``.
LATENT = AttentionProblem(11, 32, 1, 431, 576, "bf16", q_len=2, latent=True, v_head_dim=512)
LATENT_SERVED = replace(LATENT, context=4000, q_len=1, page_size=64, lengths_on="device")
#: The rules' choice for `LATENT`, and others.
RULES = LEAN_MLA.default_config(LATENT, H200)
OTHERS_OF_LATENT = [each for each in LEAN_MLA.tuning_space(LATENT, H200) if each != RULES]


def timed(
    *costs: float,
    problem: AttentionProblem = PROBLEM,
    configs: Sequence[TunedConfig] = (MODELS, *OTHERS),
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
