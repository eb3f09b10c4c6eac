"""A shared prefix on a fake GPU: its launch by many_rows.cu or lean.cu, and the launch of lean.cu
that merges its results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from lean_on_cpu import Cpu, Workspace, needs_compiler, settings
from leanbench.kernels.lean.configs import LeanCudaConfig

from leanbench.attention import lean_attn_with_kvcache, prefix
from leanbench.attention.call import Call
from leanbench.check.launches import api_arguments
from leanbench.check.poison import poison_unused
from leanbench.check.reference import CheckResult, Reference
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem

pytestmark = needs_compiler

DEEP = pytest.mark.deep
OWN = settings(32, 2, 2, 1, 1, 8, "bulk")
#: Of the prefix: a warpgroup of rows.
ROWS = settings(64, 4, 2, 1, 1, 64, "bulk")
#: One sequence has no tokens of its own, one has few enough for a warp.
PLAIN = AttentionProblem(
    4, 4, 1, (300, 128, 135, 200), 64, page_size=16, capacity=384, shared_prefix=128
)
CASES: dict[str, tuple[dict[str, Any], LeanCudaConfig, LeanCudaConfig]] = {
    "lengths on the device": ({"dtype": "bf16", "sinks": True}, ROWS, OWN),
}
DEEP_CASES: dict[str, tuple[dict[str, Any], LeanCudaConfig, LeanCudaConfig]] = {
    "a length on the host, several queries": (
        {"context": 300, "q_len": 3, "softcap": 5.0, "capacity": None},
        *(settings(32, 2, 2, 1, 1, 16, "bulk"), settings(32, 2, 2, 1, 1, 16, "bulk")),
    ),
    "settings of many rows": ({"q_len": 3, "causal": False}, ROWS, ROWS),
    "not causal": ({"q_len": 3, "causal": False}, OWN, OWN),
    "packed queries": ({"q_lens": (3, 1, 5, 2), "context": (300, 128, 140, 200)}, ROWS, OWN),
    "clusters": ({}, ROWS, settings(32, 2, 2, 1, 2, 8, "bulk")),
    "two heads of a row": (
        {"q_heads": 8, "kv_heads": 2, "head_dim": 80, "kv_layout": "NHD"},
        *(OWN, settings(32, 2, 2, 1, 1, 16, "bulk")),
    ),
    "fp8": ({"kv_dtype": "e4m3", "page_scales": "page-head"}, OWN, OWN),
    "no tokens of their own": ({"context": 128, "capacity": None}, OWN, OWN),
    "pages of 3 tokens": (
        {"page_size": 3, "shared_prefix": 126, "capacity": None},
        *(settings(32, 2, 2, 1, 1, 8, "async"), settings(32, 2, 2, 1, 1, 8, "async")),
    ),
}


def attend(
    cpu: Cpu,
    inputs: AttentionInputs,
    configs: tuple[LeanCudaConfig, LeanCudaConfig],
    is_shared: bool = True,
) -> CheckResult:
    """Make a public call on a fake GPU and compare its results with the reference."""
    launched: list[bool] = []

    def run(call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(call.lse_shape, torch.nan)
        out = torch.full(call.out_shape, torch.nan, dtype=call.out_dtype)
        is_own = call.all_extras.prior is not None or not is_shared
        launched.append(is_own)
        cpu.launch(call.inputs(out, lse), configs[is_own], 5, Workspace(1000))
        return out, lse

    with mock.patch.multiple(prefix, run=run, shares_prefix=lambda *sizes: is_shared):
        out, lse = lean_attn_with_kvcache(
            inputs.q, inputs.k_cache, inputs.v_cache, **api_arguments(inputs)
        )
    assert launched == ([False, True] if is_shared else [True])
    inputs.out.copy_(out)
    inputs.lse.copy_(lse)
    return Reference(inputs).check(inputs)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=DEEP) for name in DEEP_CASES)])
def test_a_shared_prefix_is_merged(cpu: Cpu, name: str) -> None:
    axes, *configs = (CASES | DEEP_CASES)[name]
    problem = replace(PLAIN, **axes)
    inputs = poison_unused(make_inputs(problem, "cpu", 1, score_scale=12.0))
    assert attend(cpu, inputs, (configs[0], configs[1])).failure(problem.dtype) is None


def test_each_sequence_may_read_the_prefix(cpu: Cpu) -> None:
    axes, *configs = CASES["lengths on the device"]
    problem = replace(PLAIN, **axes)
    inputs = poison_unused(make_inputs(problem, "cpu", 1, score_scale=12.0))
    result = attend(cpu, inputs, (configs[0], configs[1]), is_shared=False)
    assert result.failure(problem.dtype) is None


@pytest.mark.parametrize("own", [True, False], ids=["own tokens", "the prefix"])
def test_nearly_all_weight_may_be_on_one_side(cpu: Cpu, own: bool) -> None:
    axes, *configs = CASES["lengths on the device"]
    problem = replace(PLAIN, **axes)
    inputs = make_inputs(problem, "cpu", 1, score_scale=6.0)
    assert inputs.block_table is not None
    is_shared = torch.zeros(inputs.k_cache.shape[0], dtype=torch.bool)
    is_shared[inputs.block_table[0, : problem.shared_prefix // 16].long()] = True
    inputs.k_cache[is_shared ^ own] *= 16
    inputs = poison_unused(inputs)
    assert attend(cpu, inputs, (configs[0], configs[1])).failure(problem.dtype) is None
